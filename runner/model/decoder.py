"""The decoder: one forward pass for every supported architecture; what differs is in `ModelConfig`.

It holds weights and the rotary table and nothing about requests. Pages belong to the attention backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.attention.base import AttentionBackend
from runner.model.config import ModelConfig
from runner.model.parameters import EMBEDDING, FINAL_NORM, HEAD
from runner.model.rope import cos_sin_table
from runner.ops import Ops, PackedLinear


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

    def __init__(self, config: ModelConfig, parameters: dict[str, Tensor], ops: Ops, max_positions: int) -> None:
        """Takes over `parameters` (fused names, see `runner.model.parameters`) and empties the dict as it packs, so
        that a layer's plain and packed weights exist twice only while it is being packed.

        `max_positions` is the longest sequence that will be run: the length of the rotary table.
        """
        self.config = config
        self._ops = ops
        self._embedding = parameters.pop(EMBEDDING)
        self._final_norm = parameters.pop(FINAL_NORM)
        head = self._embedding if config.tie_word_embeddings else parameters.pop(HEAD)
        self._head = ops.pack_linear(head)
        self._layers = [_pack_layer(parameters, index, ops) for index in range(config.num_layers)]
        assert not parameters, f"parameters nobody uses: {sorted(parameters)}"
        self._cos_sin = cos_sin_table(config.rope, max_positions).to(self._embedding.device)
        self._stack = ops.stack(self._layers, config, self._cos_sin)

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
            ops.linear_add(attention.run(index, q, k, v), layer.output, residual)
            normed = ops.rms_norm(residual, layer.post_attention_norm, config.rms_norm_eps)
            ops.linear_add(ops.linear_silu_and_mul(normed, layer.gate_up), layer.down, residual)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> float32 [S, vocab_size], padding ids of the head included."""
        return self._ops.linear(hidden, self._head, torch.float32)


def _pack_layer(parameters: dict[str, Tensor], index: int, ops: Ops) -> Layer:
    prefix = f"layers.{index}"

    def take(name: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, which nobody else holds from here on."""
        return parameters.pop(f"{prefix}.{name}.weight"), parameters.pop(f"{prefix}.{name}.bias", None)

    return Layer(
        input_norm=parameters.pop(f"{prefix}.input_layernorm.weight"),
        qkv=ops.pack_linear(*take("qkv")),
        q_norm=parameters.pop(f"{prefix}.q_norm.weight", None),
        k_norm=parameters.pop(f"{prefix}.k_norm.weight", None),
        output=ops.pack_linear(*take("output")),
        post_attention_norm=parameters.pop(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=ops.pack_gate_up(*take("gate_up")),
        down=ops.pack_linear(*take("down")),
    )
