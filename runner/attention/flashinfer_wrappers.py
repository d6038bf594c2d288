"""FlashInfer's paged attention wrappers, made and planned the way a pipelined runner needs it.

The first plan of a wrapper is FlashInfer's own. Later ones, where the release is the one this was written for, go to
the compiled planner directly: `plan()` copies arrays that are on the device already, and takes Python's max() over
tensors, 0.4 ms at 256 rows. Any other release is planned by its own `plan()` every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.attention.base import AttentionError
from runner.cuda.library import PINNED

HEAD_DIMS = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
"""Query heads per key/value head for which the CUDA-core decode kernel is compiled."""
TENSOR_CORES_FROM = 4
"""Query heads per key/value head from which a tensor-core tile of 16 rows is filled enough to win (sglang, vLLM)."""
PLAN_BYTES = 8 << 20
"""Of a wrapper's integer workspace: FlashInfer's own size."""
_MIB = 1 << 20
_CTAS_PER_SM = 2  # what the fa2 planner counts on
_DECODE_THREADS = 2048  # of an SM, in blocks of at least 128


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What every plan is for."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_q_heads // self.num_kv_heads

    def check(self) -> None:
        """AttentionError unless FlashInfer's fa2 kernels serve this."""
        if self.head_dim not in HEAD_DIMS:
            raise AttentionError(f"FlashInfer serves a head_dim of {HEAD_DIMS}, not {self.head_dim}")
        if self.q_dtype not in (torch.float16, torch.bfloat16):
            raise AttentionError(f"FlashInfer computes in float16 or bfloat16, not {self.q_dtype}")
        if self.kv_dtype not in (self.q_dtype, torch.float8_e4m3fn):
            raise AttentionError(f"pages of {self.kv_dtype} don't go with queries of {self.q_dtype}")
        # Appending gives each key/value head of a token so many threads, and all of them one block of 1,024.
        threads = self.head_dim // max(16 // self.kv_dtype.itemsize, self.head_dim // 32)
        if threads * self.num_kv_heads > 1024:
            raise AttentionError(
                f"FlashInfer serves {1024 // threads} key/value heads of {self.head_dim}, not {self.num_kv_heads}"
            )


def wants_tensor_cores(shape: HeadShape) -> bool:
    """Whether decode goes through the tensor-core (prefill) kernel.

    It must for group sizes without a CUDA-core kernel. It pays from 4 query heads per key/value head on, where the
    CUDA-core kernel computes more than it reads, and for fp8 pages, whose conversion CUDA cores pay once per head.
    """
    return shape.group not in CUDA_CORE_GROUPS or shape.group >= TENSOR_CORES_FROM or shape.kv_dtype.itemsize == 1


def workspace_bytes(shape: HeadShape, multiprocessors: int, graph_rows: int = 0) -> int:
    """Bytes of float workspace that no plan exceeds: partial outputs and sums of rows whose KV is split.

    From FlashInfer's planners (scheduler.cuh). fa2 splits only into ctas = 2 * SMs / kv_heads tiles, each up to 128
    packed rows; with CUDA graphs, decode is planned for every tile it might need, 16 or 64 rows each. CUDA-core decode
    splits into as many blocks as fit the SMs.
    """
    per_row = (shape.head_dim + 1) * 4
    ctas = _CTAS_PER_SM * multiprocessors // shape.num_kv_heads + 1
    tile = 128 if shape.head_dim < 256 else 64
    needs = [
        shape.num_q_heads * ctas * tile * per_row,
        shape.group * multiprocessors * _DECODE_THREADS // 128 * per_row,
    ]
    if graph_rows and wants_tensor_cores(shape):
        tile = 16 if shape.group <= 16 else 64 if shape.group <= 64 else tile
        tiles = -(-graph_rows * shape.group // tile) + graph_rows - 1
        needs.append(shape.num_q_heads * max(ctas, tiles) * tile * per_row)
    return -(-(max(needs) + 4096) // _MIB) * _MIB


@dataclass(frozen=True, slots=True)
class Pages:
    """Rows of a page table in both places. Host tensors are what plans read, device tensors what kernels read."""

    indptr: Tensor
    """int32 [R+1], host, from 0."""
    device_indptr: Tensor
    indices: Tensor
    """int32 [pages], device."""
    last_page_len: Tensor
    """int32 [R], host."""
    device_last_page_len: Tensor
    seq_lens: Tensor
    """int32 [R], host."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Device buffers of a wrapper for CUDA graphs: int32 [R+1], [as many pages as a plan may have], [R]."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class _Kernel:
    """What both wrappers share: the workspace is lent, the pinned memory of a plan comes with the plan."""

    def __init__(self, module: Any, shape: HeadShape, wrapper: Any, planned: Tensor | None) -> None:
        self._shape = shape
        self._wrapper = wrapper
        self._direct = module.__version__ == PINNED
        self._planned = False
        if planned is not None:
            wrapper._int_workspace_buffer = planned
        # Each plan brings its own, from a fenced ring; the one made by the constructor would be rewritten too early.
        wrapper._pin_memory_int_workspace_buffer = None

    @property
    def planned_memory(self) -> Tensor:
        """The device memory that plans are copied to; wrappers that never run at a time may share one."""
        memory: Tensor = self._wrapper._int_workspace_buffer
        return memory

    def run(self, q: Tensor, pool: Tensor, out: Tensor, scales: tuple[float, float] | None) -> None:
        """q [T, Hq, D] and pool as `AttentionBackend` has them -> out [T, Hq, D], contiguous. `scales`: k, v of fp8."""
        if scales is None:
            self._wrapper.run(q, pool, out=out)
        else:
            self._wrapper.run(q, pool, k_scale=scales[0], v_scale=scales[1], out=out)


class DecodeKernel(_Kernel):
    """Rows of one token each."""

    def __init__(
        self,
        module: Any,
        shape: HeadShape,
        workspace: Tensor,
        *,
        rows: int,
        backend: str,
        tensor_cores: bool,
        fixed: Fixed | None = None,
        planned: Tensor | None = None,
    ) -> None:
        """At most `rows`; exactly as many with `fixed` buffers. `planned`: memory to plan into, see `_Kernel`."""
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=fixed is not None,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=None if fixed is None else fixed.indptr,
            paged_kv_indices_buffer=None if fixed is None else fixed.indices,
            paged_kv_last_page_len_buffer=None if fixed is None else fixed.last_page_len,
            backend=backend,
        )
        super().__init__(module, shape, wrapper, planned)
        self._tensor_cores = tensor_cores
        self._fixed = fixed is not None
        self._backend = backend
        self._empty = (torch.empty(0, dtype=shape.q_dtype), torch.empty(0, dtype=shape.kv_dtype))
        # Which queries are whose: each row has its own.
        self._range = torch.arange(rows + 1, dtype=torch.int32)
        self._device_range = self._range.to(workspace.device)

    def plan(self, pages: Pages, pinned: Tensor) -> None:
        """Take the rows of `pages`; `pinned` uint8 is written and read by copies that are issued here."""
        wrapper, shape = self._wrapper, self._shape
        wrapper._pin_memory_int_workspace_buffer = pinned
        if self._planned and self._direct:
            self._plan_directly(pages)
            return
        wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            pos_encoding_mode="NONE",
            q_data_type=shape.q_dtype,
            kv_data_type=shape.kv_dtype,
            sm_scale=shape.scale,
            non_blocking=True,
            seq_lens=pages.seq_lens,
        )
        self._planned = True

    def _plan_directly(self, pages: Pages) -> None:
        wrapper, shape, rows = self._wrapper, self._shape, len(pages.last_page_len)
        if not self._fixed:
            wrapper._paged_kv_indptr_buf = pages.device_indptr
            wrapper._paged_kv_indices_buf = pages.indices
            wrapper._paged_kv_last_page_len_buf = pages.device_last_page_len
            wrapper._batch_size = rows
        workspaces = (
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
        )
        heads = (shape.num_q_heads, shape.num_kv_heads, shape.page_size, self._fixed)
        dims = (shape.head_dim, shape.head_dim)
        if self._tensor_cores:
            if not self._fixed:
                wrapper._qo_indptr_buf = self._device_range[: rows + 1]
            lengths = (self._range[: rows + 1], pages.indptr, pages.seq_lens, rows, rows)
            # Not causal: a decode row sees all its keys. Only fa2 takes a split size, no split, colocated blocks.
            fa2 = (-1, False, 0) if self._backend == "fa2" else ()
            wrapper._plan_info = wrapper._cached_module.plan(*workspaces, *lengths, *heads, *dims, False, -1, *fa2)
        else:
            wrapper._plan_info = wrapper._cached_module.plan(
                *workspaces, pages.indptr, rows, *heads, -1, 0.0, *dims, *self._empty
            )


class PrefillKernel(_Kernel):
    """Rows of any number of tokens, causal, aligned at their last token."""

    def __init__(self, module: Any, shape: HeadShape, workspace: Tensor, *, backend: str) -> None:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        super().__init__(module, shape, wrapper, None)
        self._backend = backend

    def plan(self, qo_indptr: Tensor, device_qo_indptr: Tensor, pages: Pages, pinned: Tensor) -> None:
        """Take rows: qo_indptr int32 [R+1] on the host and on the device, from 0. `pinned` as for decodes."""
        wrapper, shape = self._wrapper, self._shape
        wrapper._pin_memory_int_workspace_buffer = pinned
        if self._planned and self._direct:
            self._plan_directly(qo_indptr, device_qo_indptr, pages)
            return
        wrapper.plan(
            qo_indptr,
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            pos_encoding_mode="NONE",
            sm_scale=shape.scale,
            q_data_type=shape.q_dtype,
            kv_data_type=shape.kv_dtype,
            non_blocking=True,
            seq_lens=pages.seq_lens,
        )
        self._planned = True

    def _plan_directly(self, qo_indptr: Tensor, device_qo_indptr: Tensor, pages: Pages) -> None:
        wrapper, shape, rows = self._wrapper, self._shape, len(pages.last_page_len)
        tokens = int(qo_indptr[-1])
        wrapper._qo_indptr_buf = device_qo_indptr
        wrapper._paged_kv_indptr_buf = pages.device_indptr
        wrapper._paged_kv_indices_buf = pages.indices
        wrapper._paged_kv_last_page_len_buf = pages.device_last_page_len
        wrapper._qo_indptr_last = tokens
        wrapper._batch_size = rows
        fa2 = (-1, False, 0) if self._backend == "fa2" else ()
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            qo_indptr,
            pages.indptr,
            pages.seq_lens,
            tokens,
            rows,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.page_size,
            False,
            shape.head_dim,
            shape.head_dim,
            True,
            -1,
            *fa2,
        )
