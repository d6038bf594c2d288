"""`AttentionBackend` on FlashInfer's paged kernels: any step eagerly, decode steps of a fixed size in CUDA graphs.

A step is planned once: one copy of its index arrays, one plan for its decode rows (one token each) and one for the
others. `plan` doesn't wait for the device unless as many plans as staging slots are under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runner.attention.base import AttentionError, check_pools
from runner.attention.flashinfer_staging import PlanStaging, packed_size
from runner.attention.flashinfer_wrappers import (
    PLAN_BYTES,
    DecodeKernel,
    Fixed,
    HeadShape,
    Pages,
    PrefillKernel,
    wants_tensor_cores,
    workspace_bytes,
)
from runner.cuda.device import Device
from runner.cuda.library import load_flashinfer
from runner.metadata import Int32s, check_plan, padded_decodes, paged_plan

if TYPE_CHECKING:
    from runner.metadata import BatchMetadata

_CPU_MULTIPROCESSORS = 132  # sizes the workspace where there is no GPU to ask: that of an H100 or H200
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The largest step that will be planned: rows, tokens, and pages summed over its rows."""

    rows: int
    tokens: int
    pages: int


@dataclass(frozen=True, slots=True)
class _Append:
    """Where a step's keys and values go, on the device: int32 [T], [T], [A+1], [pages], [A]."""

    batch_indices: Tensor
    positions: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@dataclass(frozen=True, slots=True)
class _Planned:
    """The step that `run` serves. Tokens 0..num_decodes - 1 of its order are decodes."""

    append: _Append
    num_tokens: int
    num_decodes: int
    order: Tensor | None = None
    """int32 [T], device: the step's token at each place of the order; None: nothing to move."""
    places: Tensor | None = None
    """int32 [T], device: the place of each of the step's tokens."""


class FlashInferAttention:
    """FlashInfer on pools of one GPU. AttentionError for pools, heads and dtypes it doesn't serve.

    `device` is where the pools are and makes staging memory and events. `depth` is the number of steps whose plans may
    be waiting for the device, plus one. Pools of float8_e4m3fn need `q_dtype` and the scales (k, v) that stored numbers
    are multiplied with. `tensor_cores` overrides the rule for decodes, `backend` the kernels ("auto" would choose, and
    compile, fa3 on Hopper). `graph_rows` is the largest `for_graph`. `module` is flashinfer itself.

    All instances made here share a workspace and index memory on the device: one step at a time, on one stream.
    """

    def __init__(
        self,
        pools: list[Tensor],
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        limits: PlanLimits,
        device: Device,
        depth: int = 3,
        q_dtype: torch.dtype | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        tensor_cores: bool | None = None,
        graph_rows: int = 0,
        backend: str = "fa2",
        module: Any = None,
    ) -> None:
        check_pools(pools, num_q_heads, num_kv_heads, head_dim)
        kv_dtype = pools[0].dtype
        shape = HeadShape(
            *(num_q_heads, num_kv_heads, head_dim, pools[0].shape[2], scale),
            q_dtype=q_dtype or kv_dtype,
            kv_dtype=kv_dtype,
        )
        shape.check()
        if any(pool.dtype != kv_dtype or pool.device != device.torch for pool in pools):
            raise AttentionError(f"every pool must be of {kv_dtype} on {device.torch}")
        self._module = load_flashinfer() if module is None else module
        self._pools = pools
        self._shape = shape
        self._scales = kv_scales if kv_dtype.itemsize == 1 else None
        self._limits = limits
        self._backend = backend
        self._tensor_cores = wants_tensor_cores(shape) if tensor_cores is None else tensor_cores
        rows, tokens = limits.rows + 1, limits.tokens  # a row more: where tokens go that are kept nowhere
        capacity = packed_size([tokens, tokens, rows + 1, rows, rows, rows, tokens, tokens, limits.pages + 1])
        # A graph has rows for padding, each with a page, and never an order.
        graph = packed_size([graph_rows, graph_rows, graph_rows + 1, graph_rows, limits.pages + graph_rows])
        self._staging = PlanStaging(device, depth, max(capacity, graph), (PLAN_BYTES, PLAN_BYTES))
        count = workspace_bytes(shape, _multiprocessors(device.torch), graph_rows)
        self._workspace = torch.zeros(count, dtype=torch.uint8, device=device.torch)
        self._decode = DecodeKernel(
            *(self._module, shape, self._workspace), rows=limits.rows, backend=backend, tensor_cores=self._tensor_cores
        )
        self._prefill = PrefillKernel(self._module, shape, self._workspace, backend=backend)
        self._graph_rows = graph_rows
        self._planned: _Planned | None = None

    @property
    def pools(self) -> list[Tensor]:
        """A layer's pages each, as given."""
        return self._pools

    @property
    def device_bytes(self) -> int:
        """What this takes on the device beside the pools, in bytes."""
        target = self._staging.target
        return self._workspace.numel() + 2 * PLAN_BYTES + target.numel() * target.itemsize

    def for_graph(self, rows: int) -> FlashInferGraphAttention:
        """A backend for exactly `rows` decode rows whose `run` can be captured. At most `graph_rows`."""
        if not 1 <= rows <= self._graph_rows:
            raise AttentionError(f"graphs were sized for 1 to {self._graph_rows} rows, not {rows}")
        return FlashInferGraphAttention(self, rows)

    def plan(self, meta: BatchMetadata) -> None:
        limits = self._limits
        if meta.num_rows > limits.rows or meta.num_tokens > limits.tokens or len(meta.kv_indices) > limits.pages:
            raise AttentionError(
                f"{meta.num_tokens} tokens in {meta.num_rows} rows with {len(meta.kv_indices)} pages exceed {limits}"
            )
        self._planned = None  # nothing half planned may run
        plan = paged_plan(meta)
        check_plan(plan, meta, self._shape.page_size)  # a kernel would leave its pages without a word
        with self._staging.slot() as slot:
            arrays = [plan.batch_indices, plan.positions, plan.kv_indptr, plan.last_page_len]
            arrays += [plan.qo_indptr, plan.prefill_indptr]
            arrays += [] if plan.order is None else [plan.order, _inverse(plan.order)]
            sent = self._staging.send(slot, [*arrays, plan.kv_indices])
            indptr, last, qo_indptr, prefill_indptr, indices = sent[2], sent[3], sent[4], sent[5], sent[-1][1]
            split = int(plan.kv_indptr[plan.num_decodes])
            seq_lens = torch.from_numpy(plan.seq_lens)
            if plan.num_decodes:
                some = slice(plan.num_decodes)
                pages = Pages(
                    *(indptr[0][: plan.num_decodes + 1], indptr[1][: plan.num_decodes + 1], indices[:split]),
                    *(last[0][some], last[1][some], seq_lens[some]),
                )
                self._decode.plan(pages, slot.planned[0])
            if plan.num_prefills:
                some = slice(plan.num_decodes, plan.num_rows)
                pages = Pages(*prefill_indptr, indices[split:], last[0][some], last[1][some], seq_lens[some])
                self._prefill.plan(*qo_indptr, pages, slot.planned[1])
        moved = (None, None) if plan.order is None else (sent[6][1], sent[7][1])
        append = _Append(sent[0][1], sent[1][1], indptr[1], indices, last[1])
        self._planned = _Planned(append, meta.num_tokens, plan.num_decodes, *moved)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        planned = self._planned
        if planned is None:
            raise AttentionError("run() before plan()")
        if q.shape[0] != planned.num_tokens:
            raise AttentionError(f"the step was planned for {planned.num_tokens} tokens, not {q.shape[0]}")
        pool = self._pools[layer]
        self._append(planned.append, pool, k, v)
        if planned.order is not None:
            q = q.index_select(0, planned.order)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = planned.num_decodes
        if decodes:
            self._decode.run(q[:decodes], pool, out[:decodes], self._scales)
        if decodes < planned.num_tokens:
            self._prefill.run(q[decodes:], pool, out[decodes:], self._scales)
        if planned.places is not None:
            out = out.index_select(0, planned.places)
        return out.flatten(1)

    def _append(self, where: _Append, pool: Tensor, k: Tensor, v: Tensor) -> None:
        if self._scales is not None:
            k, v = (_to_fp8(x, scale, pool.dtype) for x, scale in zip((k, v), self._scales, strict=True))
        self._module.append_paged_kv_cache(
            k,
            v,
            where.batch_indices,
            where.positions,
            pool,
            where.indices,
            where.indptr,
            where.last_page_len,
            kv_layout="NHD",
        )


class FlashInferGraphAttention:
    """An `AttentionBackend` for exactly `rows` decode rows, whose `run` reads fixed memory only: it can be captured.

    `plan` takes up to `rows` decode rows and pads with rows of length 1 in the null page. Their queries, keys and
    values may be anything; what comes out for them means nothing. It can't be captured, and comes before each replay,
    on the same stream.
    """

    def __init__(self, parent: FlashInferAttention, rows: int) -> None:
        """Made by `FlashInferAttention.for_graph`."""
        self._parent = parent
        self.rows = rows
        most = parent._limits.pages + rows
        target, places = parent._staging.target, [rows, rows, rows + 1, rows, most]
        begins = [packed_size(places[:index]) for index in range(len(places))]
        fields = [target[begin : begin + count] for begin, count in zip(begins, places, strict=True)]
        self._where = _Append(fields[0], fields[1], fields[2], fields[4], fields[3])
        self._kernel = DecodeKernel(
            parent._module,
            parent._shape,
            parent._workspace,
            rows=rows,
            backend=parent._backend,
            tensor_cores=parent._tensor_cores,
            fixed=Fixed(fields[2], fields[4], fields[3]),
            planned=parent._decode.planned_memory,
        )
        self._ready = False

    def plan(self, meta: BatchMetadata) -> None:
        """MetadataError if the step is not at most `rows` decode rows."""
        limits, staging = self._parent._limits, self._parent._staging
        if len(meta.kv_indices) > limits.pages:
            raise AttentionError(f"{len(meta.kv_indices)} pages exceed {limits}")
        plan = padded_decodes(meta, self.rows)
        check_plan(plan, meta, self._parent._shape.page_size)
        self._parent._planned = None  # its memory is this one's now
        with staging.slot() as slot:
            arrays = [plan.batch_indices, plan.positions, plan.kv_indptr, plan.last_page_len, plan.kv_indices]
            sent = staging.send(slot, arrays)
            pages = Pages(*sent[2], sent[4][1], *sent[3], torch.from_numpy(plan.seq_lens))
            self._kernel.plan(pages, slot.planned[0])
        self._ready = True

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self._ready:
            raise AttentionError("run() before plan()")
        if q.shape[0] != self.rows:
            raise AttentionError(f"the graph is for {self.rows} rows, not {q.shape[0]}")
        pool = self._parent._pools[layer]
        self._parent._append(self._where, pool, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._kernel.run(q, pool, out, self._parent._scales)
        return out.flatten(1)


def _inverse(order: Int32s) -> Int32s:
    """Where each index is in `order`, a permutation."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.int32)
    return places


def _to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Numbers that `scale` multiplies back. Beyond the range they saturate; some releases of torch make them NaN."""
    return (x / scale).clamp(-_FP8_MAX, _FP8_MAX).to(dtype)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
