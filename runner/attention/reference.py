"""Attention over pages in plain torch, one row at a time, for any dtype and device. It is the yardstick, not the path.

Every number that leaves it was computed in at least float32; it reads exactly the slots a row owns and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runner.attention.base import AttentionError, check_pools

if TYPE_CHECKING:
    from runner.metadata import BatchMetadata


class ReferenceAttention:
    """`AttentionBackend` as the textbook has it: gather a row's pages, scores, causal mask, softmax, weighted sum."""

    def __init__(self, pools: list[Tensor], num_q_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        check_pools(pools, num_q_heads, num_kv_heads, head_dim)
        self._pools = pools
        self._num_kv_heads = num_kv_heads
        self._group = num_q_heads // num_kv_heads
        self._scale = scale
        self._meta: BatchMetadata | None = None

    def plan(self, meta: BatchMetadata) -> None:
        self._meta = meta

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        meta = self._meta
        if meta is None:
            raise AttentionError("run() before plan()")
        pool = self._pools[layer]
        self._append(pool, k, v, meta)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for row in range(meta.num_rows):
            begin, end = int(meta.qo_indptr[row]), int(meta.qo_indptr[row + 1])
            if begin == end:
                continue
            keys, values = self._gather(pool, meta, row)
            out[begin:end] = self._attend(q[begin:end], keys, values).to(q.dtype)
        return out.flatten(1)

    @staticmethod
    def _append(pool: Tensor, k: Tensor, v: Tensor, meta: BatchMetadata) -> None:
        slots = torch.as_tensor(meta.slot_mapping, dtype=torch.int64, device=pool.device)
        kept = slots >= 0  # a negative slot is a token not to be kept; as an index it would wrap to the last page
        pages, offsets = slots[kept] // pool.shape[2], slots[kept] % pool.shape[2]
        pool[pages, 0, offsets] = k[kept].to(pool.dtype)
        pool[pages, 1, offsets] = v[kept].to(pool.dtype)

    @staticmethod
    def _gather(pool: Tensor, meta: BatchMetadata, row: int) -> tuple[Tensor, Tensor]:
        """A row's keys and values, [length, Hk, D] each, in the order of positions."""
        length = int(meta.seq_lens[row])
        first, last = int(meta.kv_indptr[row]), int(meta.kv_indptr[row + 1])
        pages = torch.as_tensor(meta.kv_indices[first:last], dtype=torch.int64, device=pool.device)
        both = pool[pages]
        return both[:, 0].flatten(0, 1)[:length], both[:, 1].flatten(0, 1)[:length]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [n, Hq, D] are the row's last n positions; keys and values [length, Hk, D] -> [n, Hq, D] in wide dtype."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        count, length = q.shape[0], keys.shape[0]
        keys = keys.to(wide).repeat_interleave(self._group, dim=1)
        values = values.to(wide).repeat_interleave(self._group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys) * self._scale
        position = torch.arange(length - count, length, device=q.device).unsqueeze(1)
        hidden = torch.arange(length, device=q.device).unsqueeze(0) > position
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
