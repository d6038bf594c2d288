"""Stand-ins for FlashInfer's compiled modules in plain torch: same names, same positional arguments, same checks.

They go under FlashInfer's own Python wrappers, or under those of `flashinfer_reference`. What a kernel would do
silently (read a plan that another one overwrote, trust an index) is an error here. Written from csrc/ of 0.6.14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
HEAD_DIMS = (64, 128, 256, 512)
CAUSAL = 1
MULTIPROCESSORS = 132
BLOCKS_PER_SM = 16
"""Of the CUDA-core decode kernel: as many as an SM can hold, so that a workspace that suffices here always does."""


class KernelCheckError(RuntimeError):
    """What the compiled module would refuse, or would have got wrong."""


def need(truth: bool, what: str) -> None:
    if not truth:
        raise KernelCheckError(what)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class PageModule:
    def append_paged_kv_cache(
        self,
        append_key: Tensor,
        append_value: Tensor,
        batch_indices: Tensor,
        positions: Tensor,
        paged_k_cache: Tensor,
        paged_v_cache: Tensor,
        kv_indices: Tensor,
        kv_indptr: Tensor,
        kv_last_page_len: Tensor,
        layout: int,
    ) -> None:
        count, rows = append_key.shape[0], kv_last_page_len.shape[0]
        for x in (append_key, append_value, paged_k_cache, paged_v_cache):
            need(x.stride(-1) == 1, "the last dimension must be contiguous")
        for x in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
            need(x.is_contiguous() and x.dtype == torch.int32 and x.ndim == 1, "indices are contiguous int32")
        need(layout == 0, "NHD")
        need(len(kv_indptr) == rows + 1, "indptr is one longer than the rows")
        need(len(batch_indices) == count and len(positions) == count, "an index for each token")
        need(append_key.shape[1:] == paged_k_cache.shape[2:] == append_value.shape[1:], "heads as in the pages")
        need(append_key.dtype == paged_k_cache.dtype == append_value.dtype, "the kernel copies bytes: no other dtype")
        need(paged_k_cache.shape[3] in HEAD_DIMS, "head_dim")
        need(count == 0 or (int(batch_indices.min()) >= 0 and int(batch_indices.max()) < rows), "a row of the table")
        page_size = paged_k_cache.shape[1]
        place = kv_indptr[batch_indices.long()].long() * page_size + positions.long()
        slots = kv_indptr[batch_indices.long() + 1].long() * page_size
        need(bool((place < slots).all()), "a position in the pages of its row")
        pages, offsets = kv_indices[place // page_size].long(), place % page_size
        need(bool((pages >= 0).all() and (pages < paged_k_cache.shape[0]).all()), "a page of the pool")
        paged_k_cache[pages, offsets] = append_key
        paged_v_cache[pages, offsets] = append_value


class _Planned:
    """Plans are written to the pinned buffer and copied from it; a run reads them from the device's."""

    @staticmethod
    def write(pinned: Tensor, workspace: Tensor, *arrays: Tensor) -> list[int]:
        flat = torch.cat([array.to(torch.int32) for array in arrays])
        data = flat.view(torch.uint8)
        need(len(data) <= len(workspace) and len(data) <= len(pinned), "the integer workspace is too small")
        pinned[: len(data)] = data
        workspace[: len(data)] = pinned[: len(data)]
        return [len(array) for array in arrays]

    @staticmethod
    def check(workspace: Tensor, lengths: list[int], *arrays: Tensor) -> None:
        flat = torch.cat([array.to(torch.int32) for array in arrays]).view(torch.uint8)
        need([len(array) for array in arrays] == lengths, "planned for other rows")
        need(torch.equal(workspace[: len(flat)], flat), "the workspace holds another plan than this run's page table")


class DecodeModule:
    """CUDA-core decode for one combination of dtypes and head_dim."""

    def __init__(self, *made_for: Any) -> None:
        self.q_dtype, self.kv_dtype, self.o_dtype, idx_dtype, self.head_dim, v_dim, encoding, window, cap = made_for
        need(idx_dtype == torch.int32 and v_dim == self.head_dim and encoding == 0, "int32 indices, equal heads")
        need(not window and not cap, "neither window nor soft cap")
        need(self.q_dtype in (torch.float16, torch.bfloat16), "float16 or bfloat16")

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        indptr: Tensor,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        graph: bool,
        window_left: int,
        logits_soft_cap: float,
        head_dim_qk: int,
        head_dim_vo: int,
        empty_q: Tensor,
        empty_kv: Tensor,
    ) -> list[int]:
        need(indptr.dtype == torch.int32 and len(indptr) == batch_size + 1, "indptr")
        need(num_qo_heads // num_kv_heads in CUDA_CORE_GROUPS, f"Unsupported group_size: {num_qo_heads}/{num_kv_heads}")
        need((empty_q.dtype, empty_kv.dtype) == (self.q_dtype, self.kv_dtype), "dtypes")
        need(head_dim_qk == head_dim_vo == self.head_dim, "head_dim")
        need(window_left == -1 and logits_soft_cap == 0.0, "neither window nor soft cap")
        held = (indptr[1:] - indptr[:-1]).tolist()
        used = decode_workspace(held, num_qo_heads, num_kv_heads, self.head_dim, page_size, graph)
        need(used <= float_workspace.numel(), f"Failed to allocate {used} bytes of {float_workspace.numel()}")
        return [int(graph), *_Planned.write(pinned, int_workspace, indptr)]

    def run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: list[int],
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        alibi_slopes: Tensor,
        logits_soft_cap: float,
        sm_scale: float,
        rope_scale: float,
        rope_theta: float,
    ) -> None:
        _Planned.check(int_workspace, plan_info[1:], indptr)
        rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        attend(q, k_cache, v_cache, rows, indptr, indices, last_page_len, out, sm_scale, causal=False)


class PrefillModule:
    """fa2 prefill, also for tensor-core decode."""

    def __init__(self, backend: str, *made_for: Any) -> None:
        need(backend == "fa2", f"pinned to fa2, not {backend}")
        self.decode = DecodeModule(*made_for[:9])
        need(made_for[9] is False, "no fp16 reduction")

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
        num_colocated_ctas: int,
    ) -> list[int]:
        need(len(qo_indptr) == len(kv_indptr) == len(kv_lens) + 1 == batch_size + 1, "one entry for each row")
        need(qo_indptr.dtype == kv_indptr.dtype == kv_lens.dtype == torch.int32, "int32")
        need(int(qo_indptr[-1]) == total_num_rows and int(qo_indptr[0]) == 0 and int(kv_indptr[0]) == 0, "from 0 on")
        need(head_dim_qk == head_dim_vo == self.decode.head_dim and window_left == -1, "head_dim, no window")
        need(fixed_split_size == -1 and disable_split_kv is False and num_colocated_ctas == 0, "no fixed split")
        queries = (qo_indptr[1:] - qo_indptr[:-1]).tolist()
        held = (kv_indptr[1:] - kv_indptr[:-1]).tolist()
        used = prefill_workspace(queries, held, num_qo_heads, num_kv_heads, head_dim_qk, page_size, graph)
        need(used <= float_workspace.numel(), f"Failed to allocate {used} bytes of {float_workspace.numel()}")
        return [int(causal), *_Planned.write(pinned, int_workspace, qo_indptr, kv_indptr)]

    def paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: list[int],
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *more: Any,
    ) -> None:
        need((mask_mode == CAUSAL) == bool(plan_info[0]), "the mask that was planned for")
        _Planned.check(int_workspace, plan_info[1:], qo_indptr, kv_indptr)
        attend(
            *(q, k_cache, v_cache, qo_indptr, kv_indptr, indices, last_page_len, out),
            sm_scale=more[7],
            causal=mask_mode == CAUSAL,
        )


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    out: Tensor,
    sm_scale: float,
    causal: bool,
) -> None:
    """Row by row in float32; reads exactly the slots that a row owns."""
    need(q.stride(-1) == 1 and q.stride(1) == q.shape[2], "packed heads")
    need(out.is_contiguous() and out.shape == q.shape, "a contiguous output")
    need(int(qo_indptr[-1]) == len(q), "as many queries as planned")
    need(k_cache.stride() == v_cache.stride(), "k and v strides")
    page_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for row, last in enumerate(last_page_len.tolist()):
        begin, end = qo_indptr[row : row + 2].tolist()
        first, past = kv_indptr[row : row + 2].tolist()
        need(first < past <= len(indices) and 1 <= last <= page_size, "pages of a row")
        pages, length = indices[first:past].long(), (past - first - 1) * page_size + last
        keys = k_cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
        values = v_cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * sm_scale
        if causal:
            count = end - begin
            hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)


def decode_workspace(held: list[int], q_heads: int, kv_heads: int, head_dim: int, page_size: int, graph: bool) -> int:
    """Bytes that DecodePlan takes from the float workspace (scheduler.cuh), with the most blocks an SM can hold."""
    grid, rows = MULTIPROCESSORS * BLOCKS_PER_SM, len(held)
    if rows * kv_heads >= grid:
        return 0
    low, high = max(128 // page_size, 1), max(held)
    while low < high:
        mid = (low + high) // 2
        if sum(ceil_div(pages, mid) for pages in held) * kv_heads > grid:
            low = mid + 1
        else:
            high = mid
    parts = sum(ceil_div(max(pages, 1), low) for pages in held)
    if parts == rows and not graph:
        return 0
    padded = grid // kv_heads if graph else parts
    return q_heads * padded * (head_dim + 1) * 4 + 32


def tile_rows(packed: int, head_dim: int) -> int:
    """FA2DetermineCtaTileQ."""
    if packed > 64 and head_dim < 256:
        return 128
    return 64 if packed > 16 else 16


def prefill_workspace(
    queries: list[int], held: list[int], q_heads: int, kv_heads: int, head_dim: int, page_size: int, graph: bool
) -> int:
    """Bytes that PrefillPlan takes from the float workspace (scheduler.cuh)."""
    most, group, rows = 2 * MULTIPROCESSORS // kv_heads, q_heads // kv_heads, len(queries)
    packed = [count * group for count in queries]
    if graph:
        tile = tile_rows((sum(queries) - rows + 1) * group, head_dim)
        tiles = ceil_div(sum(queries) * group, tile) + rows - 1
    else:
        tile = tile_rows(sum(packed) // rows, head_dim)
        tiles = sum(ceil_div(count, tile) for count in packed)
    low, high = max(128 // page_size, 1), max(1, *held)
    longest = high
    while low < high:
        mid = (low + high) // 2
        if sum(ceil_div(n, tile) * ceil_div(max(p, 1), mid) for n, p in zip(packed, held, strict=True)) > most:
            low = mid + 1
        else:
            high = mid
    if not graph and low >= longest:
        return 0
    parts = sum(ceil_div(n, tile) * ceil_div(max(p, 1), low) for n, p in zip(packed, held, strict=True))
    padded = max(most, tiles) if graph else parts
    need(parts <= padded, "new batch size should not exceed padded batch size")
    return q_heads * padded * tile * (head_dim + 1) * 4 + 32


class NormModule:
    def rmsnorm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
        need(x.stride(-1) == 1 and out.stride(-1) == 1 and weight.ndim == 1, "last dimension contiguous")
        need(x.dtype in (torch.float16, torch.bfloat16) and x.dtype == weight.dtype == out.dtype, "half precision")
        need(x.ndim in (2, 3) and x.shape[-1] == len(weight) and x.shape[-1] % 8 == 0, "whole vectors")
        wide = x.float()
        out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())


class RopeModule:
    def apply_rope_pos_ids_cos_sin_cache(
        self,
        q: Tensor,
        k: Tensor,
        q_rope: Tensor,
        k_rope: Tensor,
        cos_sin_cache: Tensor,
        pos_ids: Tensor,
        interleave: bool,
    ) -> None:
        need(q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype, "half precision")
        need(cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous(), "a float32 table")
        need(pos_ids.dtype in (torch.int32, torch.int64) and pos_ids.is_contiguous(), "positions")
        need(q.shape[2] in HEAD_DIMS and q.shape[2] == k.shape[2] and not interleave, "heads")
        half = cos_sin_cache.shape[1] // 2
        need(half % 8 == 0, "a vector reaches from one half into the other")
        cos, sin = cos_sin_cache[pos_ids.long()].unsqueeze(1).split(half, dim=-1)
        for source, target in ((q, q_rope), (k, k_rope)):
            first, second = source[..., :half].float(), source[..., half : 2 * half].float()
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
            target[..., : 2 * half] = rotated.to(q.dtype)


class ActivationModule:
    def silu_and_mul(self, out: Tensor, x: Tensor, enable_pdl: bool) -> None:
        need(x.is_contiguous() and out.is_contiguous(), "packed rows")
        need(x.dtype in (torch.float16, torch.bfloat16) and out.shape[-1] % 8 == 0, "whole vectors of half precision")
        gate, up = x.float().chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)


class SamplingModule:
    def top_k_mask_logits(self, logits: Tensor, top_k: Tensor | None, value: int, row_states: Tensor) -> Tensor:
        need(logits.is_contiguous() and logits.ndim == 2, "contiguous logits")
        need(top_k is not None and top_k.dtype == torch.int32 and top_k.shape == (len(logits),), "int32 [rows]")
        assert top_k is not None
        need(bool((top_k > 0).all()), "top_k is above 0")
        places = top_k.long().clamp(max=logits.shape[1]).unsqueeze(1) - 1
        border = logits.sort(1, descending=True).values.gather(1, places)
        return logits.masked_fill(logits < border, float("-inf"))

    def top_p_renorm_probs(
        self, probs: Tensor, top_p: Tensor | None, value: float, deterministic: bool, workspace: Tensor
    ) -> Tensor:
        need(probs.is_contiguous() and probs.dtype == torch.float32, "contiguous float32 probabilities")
        need(top_p is not None and top_p.dtype == torch.float32 and top_p.shape == (len(probs),), "float32 [rows]")
        assert top_p is not None
        ordered = probs.sort(1, descending=True).values
        inside = (ordered.double().cumsum(1) - ordered) < top_p.double()[:, None]
        border = ordered.gather(1, (inside.sum(1, keepdim=True) - 1).clamp(min=0))
        kept = torch.where((probs >= border) & (top_p > 0).unsqueeze(1), probs, 0.0)  # 0 is outside what it promises
        return kept / kept.sum(1, keepdim=True)
