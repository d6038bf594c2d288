"""`Ops` on our C++ kernels, for bfloat16 or float32 on the CPU. Nothing here computes; it checks, allocates and calls.

Every operation gives a row the same bits whatever other rows are in the call, so a request's outputs don't depend on
the company it is batched with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.kernels.build import SUFFIX, load
from runner.kernels.stack import LayerStack
from runner.ops import PackedLinear

if TYPE_CHECKING:
    from runner.model.config import ModelConfig
    from runner.model.decoder import Layer

_PANEL = 32
_STORE, _ADD_TO, _SILU_MUL = 0, 1, 2


class NativeOps:
    """The dense operations of a decoder in one dtype. Raises KernelError where the kernels can't be had.

    Weights are packed into panels of 32 outputs. A weight that the kernels can't take (odd width in bfloat16, gates
    that don't fill whole vectors) stays as it is and goes through torch.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in SUFFIX:
            raise ValueError(f"no native kernels for {dtype}; there are some for float32 and bfloat16")
        library = load()
        self.dtype = dtype
        self._depth = 4 // dtype.itemsize
        self._pack = self._function(library, "pack")
        self._linear = self._function(library, "linear")
        self._linear_wide = library.triptych_linear_bf16_f32 if dtype == torch.bfloat16 else self._linear
        self._rms_norm = self._function(library, "rms_norm")
        self._silu_and_mul = self._function(library, "silu_and_mul")
        self._rope = self._function(library, "rope")
        self._head_norm = self._function(library, "head_norm")

    def _function(self, library: ctypes.CDLL, name: str) -> Callable[..., None]:
        return getattr(library, f"triptych_{name}_{SUFFIX[self.dtype]}")

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        out_features, in_features = weight.shape
        if in_features % self._depth:
            return PackedLinear(out_features, in_features, weight, bias)
        panels = self._panels(weight, paired=False)
        if bias is not None:
            bias = F.pad(bias.float(), (0, -out_features % _PANEL))
        return PackedLinear(out_features, in_features, panels, bias)

    def pack_head(self, weight: Tensor) -> PackedLinear:
        return self.pack_linear(weight)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        out_features, in_features = weight.shape
        if in_features % self._depth or out_features % _PANEL:
            return PackedLinear(out_features, in_features, weight, bias)
        panels = self._panels(weight, paired=True)
        if bias is not None:  # 16 gates, then their 16 ups, as the weights
            bias = bias.float().view(2, -1, _PANEL // 2).transpose(0, 1).flatten()
        return PackedLinear(out_features, in_features, panels, bias)

    def _panels(self, weight: Tensor, paired: bool) -> Tensor:
        """weight [out, in] as a flat tensor of panels, the outputs padded with zeros to a multiple of 32."""
        out_features, in_features = weight.shape
        weight = weight.to(self.dtype).contiguous()
        panels = torch.empty(-(-out_features // _PANEL) * _PANEL * in_features, dtype=self.dtype)
        self._pack(weight.data_ptr(), panels.data_ptr(), out_features, in_features, paired)
        return panels

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        out_dtype = out_dtype or self.dtype
        if packed.weight.dim() == 2:
            return F.linear(x, packed.weight, packed.bias).to(out_dtype)
        if out_dtype is not self.dtype and out_dtype is not torch.float32:
            return self.linear(x, packed).to(out_dtype)
        y = x.new_empty((x.shape[0], packed.out_features), dtype=out_dtype)
        call = self._linear if out_dtype is self.dtype else self._linear_wide
        self._apply(call, x, packed, y, _STORE)
        return y

    def linear_add(self, x: Tensor, packed: PackedLinear, residual: Tensor) -> None:
        if packed.weight.dim() == 2:
            residual += F.linear(x, packed.weight, packed.bias)
        else:
            self._apply(self._linear, x, packed, residual, _ADD_TO)

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if packed.weight.dim() == 2:
            return self.silu_and_mul(F.linear(x, packed.weight, packed.bias))
        y = x.new_empty((x.shape[0], packed.out_features // 2))
        self._apply(self._linear, x, packed, y, _SILU_MUL)
        return y

    def _apply(self, call: Callable[..., None], x: Tensor, packed: PackedLinear, y: Tensor, epilogue: int) -> None:
        x = self._rows(x)
        bias = packed.bias
        call(
            x.data_ptr(),
            x.stride(0),
            packed.weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            x.shape[0],
            packed.in_features,
            packed.out_features,
            epilogue,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = self._rows(x)
        rows, width = x.shape
        y = x.new_empty((rows, width))
        self._rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(), width, rows, width, eps)
        return y

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        y = gate_up.new_empty((rows, width // 2))
        self._silu_and_mul(gate_up.data_ptr(), y.data_ptr(), rows, width // 2)
        return y

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        rows, q_heads, head_dim = q.shape
        self._rope(
            q.data_ptr(),
            q.stride(0),
            q_heads,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            head_dim,
            positions.data_ptr(),
            cos_sin.data_ptr(),
            cos_sin.shape[1],
            rows,
        )

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        rows, heads, head_dim = x.shape
        self._head_norm(x.data_ptr(), x.stride(0), heads, head_dim, weight.data_ptr(), rows, eps)

    def stack(self, layers: Sequence[Layer], config: ModelConfig, cos_sin: Tensor) -> LayerStack | None:
        return LayerStack(layers, config, cos_sin, self.dtype) if LayerStack.takes(layers) else None

    def _rows(self, x: Tensor) -> Tensor:
        """x with elements of a row side by side, as the kernels read it."""
        return x if x.stride(-1) == 1 else x.contiguous()
