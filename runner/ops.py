"""The dense operations a decoder needs, behind one interface: linears, norms, activations, rotary embedding.

`TorchOps` is the reference, in plain torch, for any dtype and device. `NativeOps` (runner/kernels/native.py) runs the
same operations in our own C++ kernels on the CPU. Attention is not here: see runner/attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from runner.attention.base import AttentionBackend
    from runner.model.config import ModelConfig
    from runner.model.decoder import Layer


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A linear layer's weight in the layout that one `Ops` packed it into; only that `Ops` can apply it.

    `weight` is whatever that implementation keeps (a tensor, a prepacked blob); `bias` is [out] or None.
    """

    out_features: int
    in_features: int
    weight: Any
    bias: Tensor | None


class Ops(Protocol):
    """Dense operations over rows of tokens. T = number of tokens of the step; tensors are contiguous unless said."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Take a weight [out, in] (and bias [out]) and lay it out once for `linear`. Keeps no reference to `weight`
        unless the layout is unchanged."""
        ...

    def pack_head(self, weight: Tensor) -> PackedLinear:
        """Like pack_linear for the projection to logits, which stays whole where others are quantized."""
        ...

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, in] -> [T, out] in x's dtype, or in `out_dtype` (float32, for logits)."""
        ...

    def linear_add(self, x: Tensor, packed: PackedLinear, residual: Tensor) -> None:
        """residual [T, out] += linear(x) in place."""
        ...

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Like pack_linear for a weight [2I, in] of gates, then ups, laid out for `linear_silu_and_mul` only."""
        ...

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [T, in] -> silu_and_mul(linear(x)), [T, I], with `packed` from pack_gate_up."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, d], weight [d] -> x / sqrt(mean(x²) + eps) * weight, [T, d]; the mean is taken in float32."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2I] -> silu(gate_up[:, :I]) * gate_up[:, I:], [T, I]."""
        ...

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate q [T, Hq, D] and k [T, Hk, D] in place, half-split (NeoX) style, by positions i64 [T].

        cos_sin [max_pos, rot_dim] float32 holds cos in its first half and sin in its second. Only the first rot_dim
        of each head are rotated. q and k may be slices of one fused projection: rows may be strided, heads may not.
        """
        ...

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """rms_norm over each head of x [T, H, D] in place, weight [D]. Rows may be strided."""
        ...

    def stack(self, layers: Sequence[Layer], config: ModelConfig, cos_sin: Tensor) -> LayerStack | None:
        """All blocks as one call, if this implementation can do that for these weights."""
        ...


class LayerStack(Protocol):
    """A decoder's blocks in one call, equal to the same operations one by one. Borrows the layers' tensors."""

    def serves(self, attention: AttentionBackend) -> bool:
        """Whether `run` can attend over the pages of this backend."""
        ...

    def run(self, residual: Tensor, positions: Tensor, attention: Any) -> None:
        """residual [T, hidden], embeddings on entry, becomes the output of the last block. positions: i64 [T].

        `attention` is planned and `serves` said yes to it.
        """
        ...


class TorchOps:
    """The reference implementation: plain torch, any dtype, any device."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        out_features, in_features = weight.shape
        return PackedLinear(out_features, in_features, weight, bias)

    def pack_head(self, weight: Tensor) -> PackedLinear:
        return self.pack_linear(weight)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        y = F.linear(x, packed.weight, packed.bias)
        return y if out_dtype is None else y.to(out_dtype)

    def linear_add(self, x: Tensor, packed: PackedLinear, residual: Tensor) -> None:
        residual += self.linear(x, packed)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self.pack_linear(weight, bias)

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self.silu_and_mul(self.linear(x, packed))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        # Round before the weight, as the published models were trained and as transformers does.
        return wide.to(x.dtype) * weight

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        half = cos.shape[-1]
        for x in (q, k):
            wide = x if x.dtype == torch.float64 else x.float()
            first, second = wide[..., :half], wide[..., half : 2 * half]
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            x[..., : 2 * half] = rotated.to(x.dtype)

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        x.copy_(self.rms_norm(x, weight, eps))

    def stack(self, layers: Sequence[Layer], config: ModelConfig, cos_sin: Tensor) -> LayerStack | None:
        return None
