"""The part of flashinfer 0.6.14 that the runner uses, importable anywhere: its names, arguments, checks, attributes.

Beneath are the stand-in kernels. Every call from outside is kept in `CALLS`, so that a test can hold it against the
real signatures. Attributes with an underscore are those of the real wrappers, which the runner's planner sets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.runner import flashinfer_kernels as kernels

__version__ = "0.6.14"

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
_F = TypeVar("_F", bound=Callable[..., Any])


def _recorded(function: _F) -> _F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS.append((function.__qualname__, args, kwargs))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _workspaces(wrapper: Any, float_workspace_buffer: Tensor, kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout}")
    kernels.need(float_workspace_buffer.dtype == torch.uint8, "a workspace of bytes")
    wrapper._kv_layout = kv_layout
    wrapper._float_workspace_buffer = float_workspace_buffer
    wrapper.device = float_workspace_buffer.device
    wrapper._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, device=wrapper.device)
    wrapper._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
    wrapper._plan_info = None


def _check_run(wrapper: Any, q: Tensor, paged_kv_cache: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if wrapper._plan_info is None:
        raise AssertionError("plan info is not initialized")
    k_cache, v_cache = paged_kv_cache.unbind(dim=1)
    if q.dtype != wrapper._cached_q_data_type:
        raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type {wrapper._cached_q_data_type}")
    if k_cache.dtype != wrapper._cached_kv_data_type:
        raise ValueError(f"The dtype of k {k_cache.dtype} does not match {wrapper._cached_kv_data_type}")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.shape != q.shape or out.dtype != wrapper._cached_q_data_type:
        raise ValueError(f"Invalid shape or dtype of out: {out.shape}, {out.dtype}")
    return k_cache, v_cache, out


def _check_host(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        kernels.need(tensor.device.type == "cpu", f"{name} on the device makes plan() wait for it")
        kernels.need(tensor.dtype == torch.int32, f"{name} is int32")


class BatchDecodeWithPagedKVCacheWrapper:
    @_recorded
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        _workspaces(self, float_workspace_buffer, kv_layout)
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            if not all(torch.is_tensor(buffer) for buffer in buffers):
                raise ValueError("the buffers should be torch.Tensors in cudagraph mode")
            assert paged_kv_indptr_buffer is not None and paged_kv_last_page_len_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
            if use_tensor_cores:
                self._qo_indptr_buf = torch.arange(self._fixed_batch_size + 1, dtype=torch.int32, device=self.device)
        self._use_cuda_graph, self._use_tensor_cores, self._backend = use_cuda_graph, use_tensor_cores, backend
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buffer
        self._paged_kv_indices_buf: Any = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buffer

    @_recorded
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert seq_lens is not None and isinstance(q_data_type, torch.dtype) and isinstance(kv_data_type, torch.dtype)
        _check_host(indptr=indptr, last_page_len=last_page_len, seq_lens=seq_lens)
        kernels.need(indices.device == self.device, "indices from the host are copied while everybody waits")
        rows = len(last_page_len)
        if self._use_cuda_graph:
            if rows != self._fixed_batch_size:
                raise ValueError(f"The batch size should be fixed in cudagraph mode: {rows}, {self._fixed_batch_size}")
            if len(indices) > len(self._paged_kv_indices_buf):
                raise ValueError("The size of indices should be less than or equal to the allocated buffer")
            self._paged_kv_indptr_buf.copy_(indptr, non_blocking=non_blocking)
            self._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking=non_blocking)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr.clone(), indices
            self._paged_kv_last_page_len_buf = last_page_len.clone()
            self._qo_indptr_buf = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        self._cached_q_data_type, self._cached_kv_data_type = q_data_type, kv_data_type
        made_for = (q_data_type, kv_data_type, q_data_type, indptr.dtype, head_dim, head_dim, 0, False, False)
        spaces = (self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer)
        if self._use_tensor_cores:
            self._cached_module: Any = kernels.PrefillModule(self._backend, *made_for, False)
            host = torch.arange(rows + 1, dtype=torch.int32)
            heads = (num_qo_heads, num_kv_heads, page_size, self._use_cuda_graph, head_dim, head_dim)
            self._plan_info = self._cached_module.plan(
                *spaces, host, indptr, seq_lens, rows, rows, *heads, False, window_left, -1, disable_split_kv, 0
            )
        else:
            self._cached_module = kernels.DecodeModule(*made_for)
            empty = (torch.empty(0, dtype=q_data_type), torch.empty(0, dtype=kv_data_type))
            heads = (num_qo_heads, num_kv_heads, page_size, self._use_cuda_graph)
            self._plan_info = self._cached_module.plan(
                *spaces, indptr, rows, *heads, window_left, 0.0, head_dim, head_dim, *empty
            )
        self._sm_scale = sm_scale if sm_scale is not None else head_dim**-0.5

    @_recorded
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        k_cache, v_cache, out = _check_run(self, q, paged_kv_cache, out)
        rows = len(self._paged_kv_last_page_len_buf)
        if len(q) != rows:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match batch_size ({rows})")
        scale = self._sm_scale * (1.0 if k_scale is None else k_scale)
        spaces = (self._float_workspace_buffer, self._int_workspace_buffer, self._plan_info)
        table = (self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf, out, None)
        if self._use_tensor_cores:
            more = (None, None, torch.empty(0), None, None, None, 0.0, scale)
            self._cached_module.paged_run(
                *spaces, q, k_cache, v_cache, self._qo_indptr_buf, *table, 0, 0, -1, False, *more
            )
        else:
            self._cached_module.run(
                *spaces, q, k_cache, v_cache, *table, 0, -1, False, torch.empty(0), 0.0, scale, 1.0, 1e4
            )
        if v_scale is not None and v_scale != 1.0:
            out *= v_scale
        return out


class BatchPrefillWithPagedKVCacheWrapper:
    @_recorded
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        _workspaces(self, float_workspace_buffer, kv_layout)
        kernels.need(not use_cuda_graph, "prefills aren't captured")
        self._backend = backend

    @_recorded
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        assert seq_lens is not None and isinstance(q_data_type, torch.dtype) and isinstance(kv_data_type, torch.dtype)
        host = {"qo_indptr": qo_indptr, "paged_kv_indptr": paged_kv_indptr, "seq_lens": seq_lens}
        _check_host(paged_kv_last_page_len=paged_kv_last_page_len, **host)
        kernels.need(paged_kv_indices.device == self.device, "indices on the device")
        rows = len(qo_indptr) - 1
        self._batch_size, self._qo_indptr_last = rows, int(qo_indptr[-1])
        self._qo_indptr_buf: Any = qo_indptr.clone()
        self._paged_kv_indptr_buf: Any = paged_kv_indptr.clone()
        self._paged_kv_indices_buf: Any = paged_kv_indices
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len.clone()
        self._cached_q_data_type, self._cached_kv_data_type = q_data_type, kv_data_type
        made_for = (q_data_type, kv_data_type, q_data_type, paged_kv_indptr.dtype, head_dim_qk, head_dim_qk)
        self._cached_module: Any = kernels.PrefillModule(self._backend, *made_for, 0, False, False, False)
        self._plan_info = self._cached_module.plan(
            *(self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer),
            *(qo_indptr, paged_kv_indptr, seq_lens, self._qo_indptr_last, rows),
            *(num_qo_heads, num_kv_heads, page_size, False, head_dim_qk, head_dim_qk, causal, window_left),
            *(-1, False, 0),
        )
        self._sm_scale, self._causal = sm_scale if sm_scale is not None else head_dim_qk**-0.5, causal

    @_recorded
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        k_cache, v_cache, out = _check_run(self, q, paged_kv_cache, out)
        if len(q) != self._qo_indptr_last:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._qo_indptr_last}).")
        scale = self._sm_scale * (1.0 if k_scale is None else k_scale)
        self._cached_module.paged_run(
            *(self._float_workspace_buffer, self._int_workspace_buffer, self._plan_info, q, k_cache, v_cache),
            *(self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_indices_buf),
            *(self._paged_kv_last_page_len_buf, out, None, int(self._causal), 0, -1, False),
            *(None, None, torch.empty(0), None, None, None, 0.0, scale),
        )
        if v_scale is not None and v_scale != 1.0:
            out *= v_scale
        return out


@_recorded
def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    where = (batch_indices, positions, *paged_kv_cache.unbind(1), kv_indices, kv_indptr, kv_last_page_len)
    kernels.PageModule().append_paged_kv_cache(append_key, append_value, *where, layout=("NHD", "HND").index(kv_layout))


@_recorded
def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty_like(input)
    kernels.NormModule().rmsnorm(out, input, weight, eps, False)
    return out


@_recorded
def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    if input.shape[-1] * input.dtype.itemsize % 16:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    if out is None:
        out = torch.empty((*input.shape[:-1], input.shape[-1] // 2), dtype=input.dtype, device=input.device)
    kernels.ActivationModule().silu_and_mul(out, input, False)
    return out


@_recorded
def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    q, k = query.view(len(query), -1, head_size), key.view(len(key), -1, head_size)
    kernels.RopeModule().apply_rope_pos_ids_cos_sin_cache(q, k, q, k, cos_sin_cache, positions, not is_neox)


class sampling:
    """The module of that name."""

    @staticmethod
    @_recorded
    def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
        pair = (top_k, 0) if isinstance(top_k, Tensor) else (None, top_k)
        return kernels.SamplingModule().top_k_mask_logits(logits, *pair, torch.zeros(1 << 20, dtype=torch.uint8))

    @staticmethod
    @_recorded
    def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
        pair = (top_p, 0) if isinstance(top_p, Tensor) else (None, top_p)
        return kernels.SamplingModule().top_p_renorm_probs(probs, *pair, is_deterministic, torch.empty(0))
