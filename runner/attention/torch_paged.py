"""Paged attention in plain torch, for when the C++ kernels can't be had: decodes are batched, prefills go row by row.

It copies the pages it attends to before it can attend, which is what the kernels avoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.attention.base import AttentionError, check_pools

if TYPE_CHECKING:
    from runner.metadata import BatchMetadata


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A row with several tokens: where they are in the step, its pages, and which keys each token sees."""

    begin: int
    end: int
    pages: Tensor
    length: int
    visible: Tensor  # [tokens, length]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """All rows with one token, padded to the longest: token [B], pages [B, P] (0 = null page), visible [B, 1, 1, L]."""

    tokens: Tensor
    pages: Tensor
    visible: Tensor


class TorchAttention:
    """`AttentionBackend` on torch's scaled_dot_product_attention; any dtype and device."""

    def __init__(self, pools: list[Tensor], num_q_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        check_pools(pools, num_q_heads, num_kv_heads, head_dim)
        self._pools = pools
        self._scale = scale
        self._grouped = num_q_heads != num_kv_heads
        self._kept: Tensor | None = None
        self._slot_pages: Tensor | None = None
        self._slot_offsets: Tensor | None = None
        self._prefills: list[_Prefill] = []
        self._decodes: _Decodes | None = None

    def plan(self, meta: BatchMetadata) -> None:
        device, page_size = self._pools[0].device, self._pools[0].shape[2]
        slots = torch.as_tensor(meta.slot_mapping[: meta.num_tokens], dtype=torch.int64, device=device)
        # A negative slot is a token not to be kept; as an index it would wrap to the last page.
        self._kept = torch.nonzero(slots >= 0).squeeze(1)
        slots = slots[self._kept]
        self._slot_pages, self._slot_offsets = slots // page_size, slots % page_size
        lengths = np.diff(meta.qo_indptr[: meta.num_rows + 1])
        self._prefills = [self._plan_prefill(meta, int(row), device) for row in np.flatnonzero(lengths > 1)]
        self._decodes = self._plan_decodes(meta, np.flatnonzero(lengths == 1), page_size, device)

    @staticmethod
    def _plan_prefill(meta: BatchMetadata, row: int, device: torch.device) -> _Prefill:
        begin, end = int(meta.qo_indptr[row]), int(meta.qo_indptr[row + 1])
        pages = meta.kv_indices[meta.kv_indptr[row] : meta.kv_indptr[row + 1]]
        length = int(meta.seq_lens[row])
        positions = torch.arange(length - (end - begin), length, device=device).unsqueeze(1)
        visible = torch.arange(length, device=device) <= positions
        return _Prefill(begin, end, torch.as_tensor(pages, dtype=torch.int64, device=device), length, visible)

    @staticmethod
    def _plan_decodes(meta: BatchMetadata, rows: np.ndarray, page_size: int, device: torch.device) -> _Decodes | None:
        if not len(rows):
            return None
        begins, ends = meta.kv_indptr[rows], meta.kv_indptr[rows + 1]
        pages = np.zeros((len(rows), int((ends - begins).max())), np.int64)
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            pages[i, : end - begin] = meta.kv_indices[begin:end]
        visible = np.arange(pages.shape[1] * page_size) < meta.seq_lens[rows][:, None]
        return _Decodes(
            torch.as_tensor(meta.qo_indptr[rows], dtype=torch.int64, device=device),
            torch.as_tensor(pages, device=device),
            torch.as_tensor(visible, device=device)[:, None, None],
        )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._kept is None:
            raise AttentionError("run() before plan()")
        pool = self._pools[layer]
        pool[self._slot_pages, 0, self._slot_offsets] = k[self._kept].to(pool.dtype)
        pool[self._slot_pages, 1, self._slot_offsets] = v[self._kept].to(pool.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for row in self._prefills:
            both = pool[row.pages].transpose(0, 1).flatten(1, 2)[:, : row.length].transpose(1, 2)  # [2, Hk, L, D]
            queries = q[row.begin : row.end].transpose(0, 1)
            out[row.begin : row.end] = self._attend(queries[None], both[:1], both[1:], row.visible)[0].transpose(0, 1)
        if (rows := self._decodes) is not None:
            both = pool[rows.pages].transpose(1, 2).flatten(2, 3).permute(1, 0, 3, 2, 4)  # [2, B, Hk, L, D]
            # A mask alone doesn't do: an unused slot may hold NaN, and a weight of zero times NaN is NaN.
            keys, values = both.masked_fill(~rows.visible[..., 0, :, None], 0.0)
            out[rows.tokens] = self._attend(q[rows.tokens].unsqueeze(2), keys, values, rows.visible).squeeze(2)
        return out.flatten(1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """q [B, Hq, n, D], keys and values [B, Hk, L, D] -> [B, Hq, n, D]."""
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, scale=self._scale, enable_gqa=self._grouped
        )
