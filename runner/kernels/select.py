"""Chooses the kernels: native C++ where they can be had, plain torch otherwise. One log line says which and why."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import Tensor

from runner.attention.base import AttentionBackend, AttentionError
from runner.attention.cpu import CpuAttention
from runner.attention.torch_paged import TorchAttention
from runner.kernels.build import SUFFIX, KernelError
from runner.kernels.native import NativeOps
from runner.ops import Ops, TorchOps

log = logging.getLogger(__name__)

Choice = Literal["auto", "native", "torch"]


def select_ops(dtype: torch.dtype, device: str | torch.device = "cpu", choice: Choice = "auto") -> Ops:
    """`auto` takes the native kernels where they work; `native` insists on them (KernelError); `torch` does without."""
    if choice == "torch":
        log.info("operations: plain torch, as configured")
        return TorchOps()
    try:
        if torch.device(device).type != "cpu" or dtype not in SUFFIX:
            raise KernelError(f"there are none for {dtype} on {device}")
        ops = NativeOps(dtype)
    except KernelError as error:
        if choice == "native":
            raise
        log.warning("operations: plain torch, which is slower, because native kernels can't be used: %s", error)
        return TorchOps()
    log.info("operations: native kernels for %s", dtype)
    return ops


def select_attention(
    pools: list[Tensor], num_q_heads: int, num_kv_heads: int, head_dim: int, scale: float, choice: Choice = "auto"
) -> AttentionBackend:
    """The same choice for attention; pools that the native kernel can't serve (head_dim, dtype) count as can't."""
    if choice == "torch":
        log.info("attention: plain torch, as configured")
        return TorchAttention(pools, num_q_heads, num_kv_heads, head_dim, scale)
    try:
        attention = CpuAttention(pools, num_q_heads, num_kv_heads, head_dim, scale)
    except (KernelError, AttentionError) as error:
        if choice == "native":
            raise
        log.warning("attention: plain torch, which is slower, because the native kernel can't be used: %s", error)
        return TorchAttention(pools, num_q_heads, num_kv_heads, head_dim, scale)
    log.info("attention: native kernel on paged %s pools", pools[0].dtype)
    return attention
