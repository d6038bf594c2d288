"""All transformer blocks of a step in one native call, for when returning to Python between kernels costs too much.

At one row a kernel takes a few microseconds, about what calling it from Python takes. The loop in
runner/model/decoder.py stays the definition: this computes the same bits, where weights and attention are all native.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runner.attention.base import AttentionBackend
from runner.attention.cpu import CpuAttention
from runner.kernels.build import SUFFIX, load
from runner.ops import PackedLinear

if TYPE_CHECKING:
    from runner.model.config import ModelConfig
    from runner.model.decoder import Layer


class _Weights(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int32),
        ("out_features", ctypes.c_int32),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("qkv", _Weights),
        ("output", _Weights),
        ("gate_up", _Weights),
        ("down", _Weights),
        ("pool", ctypes.c_void_p),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("q_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rot_dim", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("cos_sin", ctypes.c_void_p),
    )


class LayerStack:
    """The blocks of one decoder. Borrows the tensors of `layers` and `cos_sin`; they must outlive it."""

    def __init__(self, layers: Sequence[Layer], config: ModelConfig, cos_sin: Tensor, dtype: torch.dtype) -> None:
        self._call = getattr(load(), f"triptych_layers_{SUFFIX[dtype]}")
        self._dtype = dtype
        self._borrowed = (layers, cos_sin)
        self._layers = (_Layer * len(layers))(*(_describe(layer) for layer in layers))
        self._shape = _Shape(
            len(layers),
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            cos_sin.shape[1],
            eps=config.rms_norm_eps,
            cos_sin=cos_sin.data_ptr(),
        )
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._scratch_width = config.hidden_size + 2 * q_width + 2 * kv_width + config.intermediate_size
        self._bound: CpuAttention | None = None

    @staticmethod
    def takes(layers: Sequence[Layer]) -> bool:
        """Whether every weight could be packed for the kernels."""
        linears = (linear for layer in layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return all(linear.weight.dim() == 1 for linear in linears)

    def serves(self, attention: AttentionBackend) -> bool:
        """Whether `run` can attend over the pages of this backend."""
        return isinstance(attention, CpuAttention) and attention.pools[0].dtype == self._dtype

    def run(self, residual: Tensor, positions: Tensor, attention: CpuAttention) -> None:
        """residual [T, hidden], embeddings on entry, becomes the output of the last block. positions: i64 [T]."""
        if attention is not self._bound:
            self._bind(attention)
        tokens = residual.shape[0]
        scratch = torch.empty(tokens * self._scratch_width, dtype=self._dtype)
        self._call(
            ctypes.addressof(self._shape),
            ctypes.addressof(self._layers),
            residual.data_ptr(),
            positions.data_ptr(),
            attention.tables(tokens),
            scratch.data_ptr(),
        )

    def _bind(self, attention: CpuAttention) -> None:
        for layer, pool in zip(self._layers, attention.pools, strict=True):
            layer.pool = pool.data_ptr()
        self._shape.page_size = attention.pools[0].shape[2]
        self._shape.scale = attention.scale
        self._bound = attention


def _describe(layer: Layer) -> _Layer:
    return _Layer(
        layer.input_norm.data_ptr(),
        None if layer.q_norm is None else layer.q_norm.data_ptr(),
        None if layer.k_norm is None else layer.k_norm.data_ptr(),
        layer.post_attention_norm.data_ptr(),
        *(_weights(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)),
    )


def _weights(linear: PackedLinear) -> _Weights:
    bias = None if linear.bias is None else linear.bias.data_ptr()
    return _Weights(linear.weight.data_ptr(), bias, linear.in_features, linear.out_features)
