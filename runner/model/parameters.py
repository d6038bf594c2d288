"""Where every checkpoint tensor goes: fused parameters, and the rows of each that one checkpoint tensor fills.

Names are Hugging Face's without the `model.` prefix. Nothing here reads files or computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from runner.model.config import ModelConfig
from runner.model.errors import ModelError

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "norm.weight"


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one checkpoint tensor: rows `start` … `start + shape[0]` of the parameter `target`."""

    target: str
    start: int
    shape: tuple[int, ...]


def layout(config: ModelConfig) -> dict[str, Slot]:
    """Checkpoint name → slot, for every tensor that a checkpoint of this configuration must have, and no other."""
    slots: dict[str, Slot] = {}

    def fuse(target: str, parts: Iterable[tuple[str, int]], width: int | None) -> None:
        """`parts` (name, rows) stacked into `target`; matrices of `width` columns, or vectors where it is None."""
        start = 0
        for name, rows in parts:
            slots[name] = Slot(target, start, (rows,) if width is None else (rows, width))
            start += rows

    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fuse(EMBEDDING, [(EMBEDDING, config.vocab_size)], hidden)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        linears: list[tuple[str, list[tuple[str, int]], int, bool]] = [
            (
                f"{prefix}.qkv",
                [(f"{attention}.q_proj", q_rows), (f"{attention}.k_proj", kv_rows), (f"{attention}.v_proj", kv_rows)],
                hidden,
                config.qkv_bias,
            ),
            (f"{prefix}.output", [(f"{attention}.o_proj", hidden)], q_rows, config.output_bias),
            (f"{prefix}.gate_up", [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)], hidden, config.mlp_bias),
            (f"{prefix}.down", [(f"{mlp}.down_proj", hidden)], inner, config.mlp_bias),
        ]
        for target, parts, width, bias in linears:
            fuse(f"{target}.weight", [(f"{name}.weight", rows) for name, rows in parts], width)
            if bias:
                fuse(f"{target}.bias", [(f"{name}.bias", rows) for name, rows in parts], None)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            fuse(f"{prefix}.{norm}.weight", [(f"{prefix}.{norm}.weight", hidden)], None)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                fuse(f"{prefix}.{norm}.weight", [(f"{attention}.{norm}.weight", config.head_dim)], None)
    fuse(FINAL_NORM, [(FINAL_NORM, hidden)], None)
    if not config.tie_word_embeddings:
        fuse(HEAD, [(HEAD, config.vocab_size)], hidden)
    return slots


def fused_shapes(slots: Mapping[str, Slot]) -> dict[str, tuple[int, ...]]:
    """Parameter name → shape, all its slots stacked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in slots.values():
        rows = max(slot.start + slot.shape[0], shapes.get(slot.target, (0,))[0])
        shapes[slot.target] = (rows, *slot.shape[1:])
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
        """Copy a checkpoint tensor into its rows, converting to the set's dtype.

        Raises ModelError `unexpected_tensor`, `duplicate_tensor` or `wrong_shape`, naming the tensor.
        """
        slot = self._slots.get(name)
        if slot is None:
            raise ModelError("unexpected_tensor", f"tensor {name!r} has no place in this model")
        if name in self._written:
            raise ModelError("duplicate_tensor", f"tensor {name!r} came twice")
        if tuple(tensor.shape) != slot.shape:
            raise ModelError("wrong_shape", wrong_shape(name, tuple(tensor.shape), slot.shape))
        self._tensors[slot.target][slot.start : slot.start + slot.shape[0]].copy_(tensor)
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
