"""`AttentionBackend` on the C++ kernel that reads the pages in place: float32 or bfloat16 pools on the CPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from runner.attention.base import AttentionError, check_pools
from runner.kernels.build import SUFFIX, load

if TYPE_CHECKING:
    from runner.metadata import BatchMetadata

HEAD_DIM_STEP = 16


def plan_units(qo_indptr: np.ndarray, seq_lens: np.ndarray, unit_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut every row into runs of at most `unit_tokens` tokens: (row, first token within the row) of each, int32.

    The costliest come first (tokens times the context they look at), so that threads that take them one by one end at
    about the same time whatever mix of long prefills and decodes a step has.
    """
    lengths = np.diff(qo_indptr)
    counts = -(-lengths // unit_tokens)
    rows = np.repeat(np.arange(len(lengths)), counts)
    firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * unit_tokens
    tokens = np.minimum(lengths[rows] - firsts, unit_tokens)
    context = seq_lens[rows] - lengths[rows] + firsts + tokens
    order = np.argsort(-(tokens.astype(np.int64) * context), kind="stable")
    return rows[order].astype(np.int32), firsts[order].astype(np.int32)


class PageTables(ctypes.Structure):
    """A planned step as the kernels read it; mirrors src/kernels.h."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("qo_indptr", ctypes.c_void_p),
        ("kv_indptr", ctypes.c_void_p),
        ("kv_indices", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("unit_rows", ctypes.c_void_p),
        ("unit_firsts", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
        ("units", ctypes.c_int32),
        ("unit_tokens", ctypes.c_int32),
    )


class CpuAttention:
    """Paged attention on the CPU. Raises AttentionError for pools it can't serve, KernelError where it can't be built.

    head_dim is a multiple of 16; any page size; scores are scaled by `scale`.
    """

    def __init__(self, pools: list[Tensor], num_q_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        check_pools(pools, num_q_heads, num_kv_heads, head_dim)
        dtype = pools[0].dtype
        if dtype not in SUFFIX or any(pool.dtype != dtype or pool.device.type != "cpu" for pool in pools):
            raise AttentionError(f"native attention serves float32 or bfloat16 pools on the CPU, not {dtype}")
        if head_dim % HEAD_DIM_STEP:
            raise AttentionError(f"native attention needs a head_dim that divides by {HEAD_DIM_STEP}, not {head_dim}")
        library = load()
        self._call = getattr(library, f"triptych_attention_{SUFFIX[dtype]}")
        self._pools = pools
        self._width = num_q_heads * head_dim
        self._fixed = (num_kv_heads, num_q_heads // num_kv_heads, head_dim, scale)
        self._unit_tokens = max(1, library.triptych_attention_rows() // (num_q_heads // num_kv_heads))
        self._scale = scale
        self._arrays: tuple[np.ndarray, ...] = ()
        self._tables = PageTables(tokens=-1)
        self._address = 0

    @property
    def pools(self) -> list[Tensor]:
        """A layer's pages each, as given."""
        return self._pools

    @property
    def scale(self) -> float:
        return self._scale

    def tables(self, tokens: int) -> int:
        """Address of the planned step's PageTables, for kernels; AttentionError if it has another number of tokens."""
        if tokens != self._tables.tokens:
            raise AttentionError(f"the step was planned for {self._tables.tokens} tokens, not {tokens}")
        return self._address

    def plan(self, meta: BatchMetadata) -> None:
        rows = meta.num_rows
        qo_indptr = _int32(meta.qo_indptr[: rows + 1])
        seq_lens = _int32(meta.seq_lens[:rows])
        unit_rows, unit_firsts = plan_units(qo_indptr, seq_lens, self._unit_tokens)
        arrays = (
            np.ascontiguousarray(meta.slot_mapping[: meta.num_tokens], np.int64),
            qo_indptr,
            _int32(meta.kv_indptr[: rows + 1]),
            _int32(meta.kv_indices),
            seq_lens,
            unit_rows,
            unit_firsts,
        )
        self._arrays = arrays  # keeps alive what the addresses point to
        addresses = (array.ctypes.data for array in arrays)
        self._tables = PageTables(*addresses, meta.num_tokens, len(unit_rows), self._unit_tokens)
        self._address = ctypes.addressof(self._tables)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self._pools[layer]
        tables = self.tables(q.shape[0])
        out = torch.empty((q.shape[0], self._width), dtype=pool.dtype)
        self._call(
            pool.data_ptr(),
            pool.shape[2],
            *self._fixed,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
            tables,
        )
        return out


def _int32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.int32)
