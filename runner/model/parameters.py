"""Where every checkpoint tensor goes: fused parameters, and the rows of each that one checkpoint tensor fills.

Names are Hugging Face's without the `model.` prefix. Of a tensor that is split over ranks, only this rank's part goes
anywhere. Nothing here reads files or computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from runner.model.config import ModelConfig
from runner.model.errors import ModelError
from runner.model.shard import WHOLE, Shard

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "norm.weight"


Span = tuple[int, int]
"""First and end."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one checkpoint tensor of this `shape`: its `part` is the rows from `start` on of the parameter
    `target`."""

    target: str
    start: int
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    """What is taken of each dimension."""

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(one.stop - one.start for one in self.part)


def layout(config: ModelConfig, shard: Shard = WHOLE) -> dict[str, Slot]:
    """Checkpoint name → slot, for every tensor that a checkpoint of this configuration must have, and no other.

    `config` is the whole model's; the slots are those of `shard`.
    """
    slots: dict[str, Slot] = {}

    def fuse(
        target: str, parts: Iterable[tuple[str, int, Span]], width: int | None, columns: Span | None = None
    ) -> None:
        """The given spans of `parts` (name, rows, span) stacked into `target`; matrices of `width` columns, of which
        `columns` are taken (None: all), or vectors where `width` is None."""
        start = 0
        for name, rows, (first, end) in parts:
            shape: tuple[int, ...] = (rows,)
            taken: tuple[slice, ...] = (slice(first, end),)
            if width is not None:
                shape, taken = (rows, width), (*taken, slice(*(columns or (0, width))))
            slots[name] = Slot(target, start, shape, taken)
            start += end - first

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    q, kv = _times(shard.heads(config), dim), _times(shard.kv_heads(config), dim)
    mine, everything, vocabulary = shard.inner(config), (0, hidden), (0, config.vocab_size)
    fuse(EMBEDDING, [(EMBEDDING, config.vocab_size, vocabulary)], hidden)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        keys_values = [(f"{attention}.k_proj", kv_rows, kv), (f"{attention}.v_proj", kv_rows, kv)]
        gate_up = [(f"{mlp}.gate_proj", inner, mine), (f"{mlp}.up_proj", inner, mine)]
        linears: list[tuple[str, list[tuple[str, int, Span]], int, Span | None, bool]] = [
            (f"{prefix}.qkv", [(f"{attention}.q_proj", q_rows, q), *keys_values], hidden, None, config.qkv_bias),
            (f"{prefix}.output", [(f"{attention}.o_proj", hidden, everything)], q_rows, q, config.output_bias),
            (f"{prefix}.gate_up", gate_up, hidden, None, config.mlp_bias),
            (f"{prefix}.down", [(f"{mlp}.down_proj", hidden, everything)], inner, mine, config.mlp_bias),
        ]
        for target, parts, width, columns, bias in linears:
            fuse(f"{target}.weight", [(f"{name}.weight", rows, span) for name, rows, span in parts], width, columns)
            if bias:
                fuse(f"{target}.bias", [(f"{name}.bias", rows, span) for name, rows, span in parts], None)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            fuse(f"{prefix}.{norm}.weight", [(f"{prefix}.{norm}.weight", hidden, everything)], None)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                fuse(f"{prefix}.{norm}.weight", [(f"{attention}.{norm}.weight", dim, (0, dim))], None)
    fuse(FINAL_NORM, [(FINAL_NORM, hidden, everything)], None)
    if not config.tie_word_embeddings:
        fuse(HEAD, [(HEAD, config.vocab_size, shard.vocab(config))], hidden)
    return slots


def _times(span: Span, factor: int) -> Span:
    return span[0] * factor, span[1] * factor


def fused_shapes(slots: Mapping[str, Slot]) -> dict[str, tuple[int, ...]]:
    """Parameter name → shape, all its slots stacked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in slots.values():
        rows = max(slot.start + slot.kept[0], shapes.get(slot.target, (0,))[0])
        shapes[slot.target] = (rows, *slot.kept[1:])
    return shapes


class ParameterSet:
    """Fused parameters being filled. Each checkpoint tensor is written exactly once, or the set is not complete."""

    def __init__(self, slots: Mapping[str, Slot], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._slots = slots
        self._written: set[str] = set()
        self._tensors = {
            target: torch.empty(shape, dtype=dtype, device=device) for target, shape in fused_shapes(slots).items()
        }

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a slot's part of a checkpoint tensor into its rows, converting to the set's dtype.

        Raises ModelError `unexpected_tensor`, `duplicate_tensor` or `wrong_shape`, naming the tensor.
        """
        slot = self._slots.get(name)
        if slot is None:
            raise ModelError("unexpected_tensor", f"tensor {name!r} has no place in this model")
        if name in self._written:
            raise ModelError("duplicate_tensor", f"tensor {name!r} came twice")
        if tuple(tensor.shape) != slot.kept:
            raise ModelError("wrong_shape", wrong_shape(name, tuple(tensor.shape), slot.kept))
        self._tensors[slot.target][slot.start : slot.start + slot.kept[0]].copy_(tensor)
        self._written.add(name)

    def complete(self) -> dict[str, torch.Tensor]:
        """Fused name → tensor. Raises ModelError `missing_tensor` if any slot was never written."""
        if missing := [name for name in self._slots if name not in self._written]:
            raise ModelError("missing_tensor", f"the checkpoint lacks {abbreviate(missing)}")
        return self._tensors


def wrong_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The message for a misshapen tensor."""
    return f"tensor {name!r} has shape {list(got)}, the configuration wants {list(wanted)}"


def abbreviate(names: Iterable[str], shown: int = 3) -> str:
    """The first few names quoted, and how many more there are."""
    listed = list(names)
    text = ", ".join(repr(name) for name in listed[:shown])
    return text if len(listed) <= shown else f"{text} and {len(listed) - shown} more"
