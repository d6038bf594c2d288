"""The decoder: one forward pass for every supported architecture; what differs is in `ModelConfig`.

It holds weights and the rotary table and nothing about requests. Pages belong to the attention backend. A decoder that
is split over ranks holds a part of each linear, and meets its peers after attention, after the feed-forward and at the
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.attention.base import AttentionBackend
from runner.model.config import ModelConfig
from runner.model.parameters import EMBEDDING, FINAL_NORM, HEAD
from runner.model.rope import cos_sin_table
from runner.model.shard import Shard
from runner.ops import Ops, PackedLinear


class Peers(Protocol):
    """The ranks that hold the parts of one decoder. Every rank makes the same calls in the same order."""

    shard: Shard

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, the same bits on each rank. May overwrite `part`."""
        ...

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """part [S, W], of which rank r fills widths[r] columns -> on rank 0 all of those, [S, sum of widths]; on
        others `part`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one transformer block, linears fused and packed."""

    input_norm: Tensor
    qkv: PackedLinear
    """[(Hq + 2 Hk) * D, hidden]: queries, keys, values."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    post_attention_norm: Tensor
    gate_up: PackedLinear
    """[2 * intermediate, hidden]: gates, ups."""
    down: PackedLinear


class Decoder:
    """Token ids and positions in, normed hidden states out; `logits` turns chosen rows into scores."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: dict[str, Tensor],
        ops: Ops,
        max_positions: int,
        peers: Peers | None = None,
    ) -> None:
        """Takes over `parameters` (fused names, see `runner.model.parameters`) and empties the dict as it packs, so
        that a layer's plain and packed weights exist twice only while it is being packed.

        `max_positions` is the longest sequence that will be run: the length of the rotary table. With `peers`, `config`
        and `parameters` are those of this rank's part.
        """
        self.config = config
        self._ops = ops
        self._peers = peers
        self._embedding = parameters.pop(EMBEDDING)
        self._final_norm = parameters.pop(FINAL_NORM)
        head = self._embedding if config.tie_word_embeddings else parameters.pop(HEAD)
        self._head_widths = peers.shard.vocab_widths(config) if peers is not None else [config.vocab_size]
        self._head = ops.pack_head(head if peers is None else _head_part(head, config, peers.shard))
        adds_bias = peers is None or peers.shard.rank == 0
        self._layers = [_pack_layer(parameters, index, ops, adds_bias) for index in range(config.num_layers)]
        assert not parameters, f"parameters nobody uses: {sorted(parameters)}"
        self._cos_sin = cos_sin_table(config.rope, max_positions).to(self._embedding.device)
        self._stack = ops.stack(self._layers, config, self._cos_sin) if peers is None else None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and keys/values."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def max_positions(self) -> int:
        """Positions 0 … max_positions - 1 can be run."""
        return self._cos_sin.shape[0]

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """token_ids, positions: i64 [T], as `attention` was planned for -> [T, hidden], final norm applied."""
        residual = self._embedding.index_select(0, token_ids)
        if self._stack is not None and self._stack.serves(attention):
            self._stack.run(residual, positions, attention)
        else:
            self._run_layers(residual, positions, attention)
        return self._ops.rms_norm(residual, self._final_norm, self.config.rms_norm_eps)

    def _run_layers(self, residual: Tensor, positions: Tensor, attention: AttentionBackend) -> None:
        """residual [T, hidden], embeddings on entry, becomes the output of the last block."""
        ops, config = self._ops, self.config
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        for index, layer in enumerate(self._layers):
            normed = ops.rms_norm(residual, layer.input_norm, config.rms_norm_eps)
            heads = ops.linear(normed, layer.qkv).view(-1, sum(sizes), config.head_dim)
            q, k, v = torch.split(heads, sizes, dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                ops.head_norm(q, layer.q_norm, config.rms_norm_eps)
                ops.head_norm(k, layer.k_norm, config.rms_norm_eps)
            ops.rope(q, k, positions, self._cos_sin)
            self._add(attention.run(index, q, k, v), layer.output, residual)
            normed = ops.rms_norm(residual, layer.post_attention_norm, config.rms_norm_eps)
            self._add(ops.linear_silu_and_mul(normed, layer.gate_up), layer.down, residual)

    def _add(self, x: Tensor, linear: PackedLinear, residual: Tensor) -> None:
        """residual [T, hidden] += linear(x), summed over the ranks' parts of the input."""
        if self._peers is None:
            self._ops.linear_add(x, linear, residual)
        else:
            residual += self._peers.sum(self._ops.linear(x, linear))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> float32 [S, vocab_size], padding ids of the head included. Other ranks than the first
        get only what they computed of it."""
        scores = self._ops.linear(hidden, self._head, torch.float32)
        return scores if self._peers is None else self._peers.gather(scores, self._head_widths)


def _head_part(head: Tensor, config: ModelConfig, shard: Shard) -> Tensor:
    """This rank's rows of the head (given whole where it is tied to the embedding), padded to the widest part."""
    first, end = shard.vocab(config)
    part = head[first:end] if config.tie_word_embeddings else head
    missing = max(shard.vocab_widths(config)) - len(part)
    return F.pad(part, (0, 0, 0, missing)) if missing else part


def _pack_layer(parameters: dict[str, Tensor], index: int, ops: Ops, adds_bias: bool) -> Layer:
    """`adds_bias`: whether biases of linears whose outputs are summed over the ranks are this rank's to add."""
    prefix = f"layers.{index}"

    def take(name: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, which nobody else holds from here on."""
        return parameters.pop(f"{prefix}.{name}.weight"), parameters.pop(f"{prefix}.{name}.bias", None)

    def take_summed(name: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = take(name)
        return weight, bias if adds_bias else None

    return Layer(
        input_norm=parameters.pop(f"{prefix}.input_layernorm.weight"),
        qkv=ops.pack_linear(*take("qkv")),
        q_norm=parameters.pop(f"{prefix}.q_norm.weight", None),
        k_norm=parameters.pop(f"{prefix}.k_norm.weight", None),
        output=ops.pack_linear(*take_summed("output")),
        post_attention_norm=parameters.pop(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=ops.pack_gate_up(*take("gate_up")),
        down=ops.pack_linear(*take_summed("down")),
    )
