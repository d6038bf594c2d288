"""`Ops` on a GPU: norms, rotary embedding and activation through FlashInfer, linears through torch (cuBLAS).

What FlashInfer's kernels don't serve in a given shape goes through plain torch, each with its reason at the method.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.attention.flashinfer_wrappers import HEAD_DIMS
from runner.cuda.library import load_flashinfer
from runner.kernels.build import KernelError
from runner.ops import PackedLinear, TorchOps

VECTOR = 8
"""Elements of 16 bytes in float16 or bfloat16: what the kernels load at a time."""


class FlashInferOps(TorchOps):
    """float16 or bfloat16 on one GPU. KernelError for other dtypes: FlashInfer's kernels are compiled for these two.

    `fused_add_rmsnorm` has no place: `linear_add` adds in the matrix product's own epilogue, rounding once, and a norm
    reads what it left, so a fused addition would save neither a kernel nor a pass over memory.
    """

    def __init__(self, dtype: torch.dtype, module: Any = None) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise KernelError(f"FlashInfer computes in float16 or bfloat16, not {dtype}")
        self._module = load_flashinfer() if module is None else module

    def linear_add(self, x: Tensor, packed: PackedLinear, residual: Tensor) -> None:
        if packed.bias is not None:
            residual += F.linear(x, packed.weight, packed.bias)
        else:
            residual.addmm_(x, packed.weight.t())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `TorchOps`, but rounded once, after the weight: at most one unit in the last place apart.

        The kernel loads whole vectors, so torch serves widths that 8 doesn't divide.
        """
        if x.shape[-1] % VECTOR:
            return super().rms_norm(x, weight, eps)
        normed: Tensor = self._module.rmsnorm(x, weight, eps)
        return normed

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """As `TorchOps`, but rounded once: the activation isn't rounded before it is multiplied.

        The kernel reads packed rows in whole vectors: rows with gaps are packed first, and torch serves widths that 8
        doesn't divide.
        """
        if gate_up.shape[-1] % (2 * VECTOR):
            return super().silu_and_mul(gate_up)
        activated: Tensor = self._module.silu_and_mul(gate_up.contiguous())
        return activated

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """FlashInfer's table is ours: float32, cosines then sines, one for each pair of the two halves.

        Its kernel is compiled for heads of 64, 128 and 256, and a vector must not reach from the first half into the
        second; torch serves the rest.
        """
        head_dim = q.shape[-1]
        if head_dim not in HEAD_DIMS or cos_sin.shape[-1] % (2 * VECTOR):
            super().rope(q, k, positions, cos_sin)
            return
        self._module.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, cos_sin, is_neox=True)

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Strided rows are served; torch serves a head_dim that 8 doesn't divide, as in `rms_norm`."""
        if x.shape[-1] % VECTOR:
            super().head_norm(x, weight, eps)
            return
        self._module.rmsnorm(x, weight, eps, out=x)
