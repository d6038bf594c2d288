"""Weights in fewer bits, through torchao: quantized while they are packed, so that a layer is whole only for a moment.

The projections of the blocks are quantized; embedding, norms and the head stay as they are, as is usual: they are a
small part of the weights and a large part of the error. Activations stay in the model's dtype, except under `fp8` on a
GPU that multiplies fp8 itself (compute capability 8.9 and later), where they are quantized row by row as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.kernels.build import KernelError
from runner.ops import LayerStack, Ops, PackedLinear

if TYPE_CHECKING:
    from runner.model.config import ModelConfig
    from runner.model.decoder import Layer

SCHEMES = ("none", "int8", "fp8", "int4")
INT4_GROUP = 128
"""Weights that share a scale under `int4`; the largest power of two up to this that divides the layer's width."""
LEAST_GROUP = 32
_FP8_CAPABILITY = (8, 9)


def quantized(ops: Ops, scheme: str, device: torch.device | str) -> Ops:
    """`ops` with linears under `scheme`, one of SCHEMES. KernelError, saying what to install, if that can't be."""
    if scheme == "none":
        return ops
    try:
        import torchao.quantization as torchao
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelError(f"quantization {scheme}: torchao can't be imported ({error}); install torchao") from error
    return QuantizedOps(ops, scheme, torch.device(device), torchao)


class QuantizedOps:
    """`Ops` whose block projections are torchao tensors; all else is the wrapped implementation's.

    int8 and fp8: one scale for each output feature. int4: one for each group of INT4_GROUP input features.
    """

    def __init__(self, inner: Ops, scheme: str, device: torch.device, torchao: Any) -> None:
        self._inner = inner
        self._scheme = scheme
        self._device = device
        self._torchao = torchao

    def pack_head(self, weight: Tensor) -> PackedLinear:
        return self._inner.pack_head(weight)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """KernelError if the layer's width has no group to share scales in."""
        out_features, in_features = weight.shape
        linear = nn.Linear(in_features, out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        self._torchao.quantize_(linear, self._config(in_features))
        return PackedLinear(out_features, in_features, linear.weight.detach(), bias)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self.pack_linear(weight, bias)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype is not None:  # only the head is asked for another dtype, and it is not ours
            return self._inner.linear(x, packed, out_dtype)
        return F.linear(x, packed.weight, packed.bias)

    def linear_add(self, x: Tensor, packed: PackedLinear, residual: Tensor) -> None:
        residual += self.linear(x, packed)

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._inner.silu_and_mul(self.linear(x, packed))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._inner.rms_norm(x, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._inner.silu_and_mul(gate_up)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        self._inner.rope(q, k, positions, cos_sin)

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        self._inner.head_norm(x, weight, eps)

    def stack(self, layers: Sequence[Layer], config: ModelConfig, cos_sin: Tensor) -> LayerStack | None:
        """None: a stack's kernels read weights of the model's dtype."""
        return None

    def _config(self, width: int) -> Any:
        torchao, on_gpu = self._torchao, self._device.type == "cuda"
        if self._scheme == "int8":
            return torchao.Int8WeightOnlyConfig()
        if self._scheme == "fp8":
            if on_gpu and torch.cuda.get_device_capability(self._device) >= _FP8_CAPABILITY:
                return torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
            return torchao.Float8WeightOnlyConfig()
        group = group_of(width)
        if on_gpu:  # two weights a byte, in the order of the tensor-core kernel that torch brings
            return torchao.Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d")
        # Kept as one a byte: torchao has no 4-bit kernel for CPUs that it brings itself.
        return torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(group))


def group_of(width: int) -> int:
    """How many of `width` input features share a scale under int4. KernelError if no group divides the width."""
    group = INT4_GROUP
    while group >= LEAST_GROUP:
        if width % group == 0:
            return group
        group //= 2
    raise KernelError(f"quantization int4: a layer of {width} input features isn't a multiple of {LEAST_GROUP}")
