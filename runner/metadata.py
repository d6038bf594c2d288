"""What attention kernels need to know of a step: index arrays, built by pure functions from columns.

No tensors and no kernels here, so every index can be checked on any machine. `check` is what a host runs before it
hands the arrays to a kernel that would read or write out of bounds without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runner.batch import spread

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class MetadataError(ValueError):
    """Arrays that would make a kernel leave its pages; the message names the row and the numbers."""


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """One step for a paged attention kernel: T tokens in R rows.

    Row r owns pages kv_indices[kv_indptr[r] : kv_indptr[r + 1]]. qo_indptr int32 [R+1]: a row's tokens among the T;
    kv_indptr int32 [R+1]: its pages in kv_indices int32; last_page_len int32 [R]: tokens in its last page after this
    step, 1..page_size; slot_mapping int64 [T]: page * page_size + offset where each token's K/V is written;
    positions int64 [T]; seq_lens int32 [R]: KV length after this step.
    """

    num_tokens: int
    num_rows: int
    qo_indptr: Int32s
    kv_indptr: Int32s
    kv_indices: Int32s
    last_page_len: Int32s
    slot_mapping: Int64s
    positions: Int64s
    seq_lens: Int32s


def build(page_table: Int32s, starts: Int32s, counts: Int32s, page_size: int) -> BatchMetadata:
    """Metadata for rows that compute tokens [starts[r], starts[r] + counts[r]) with pages page_table[r] ([R, P]).

    Every counts[r] ≥ 1, and page_table covers the ends; entries past what a row needs are ignored.
    """
    rows, offsets = spread(counts)
    positions = starts[rows].astype(np.int64) + offsets
    pages = page_table[rows, positions // page_size].astype(np.int64)
    ends = (starts + counts).astype(np.int32)
    needed = -(-ends // page_size)
    page_rows, page_columns = spread(needed)
    return BatchMetadata(
        num_tokens=len(positions),
        num_rows=len(counts),
        qo_indptr=_indptr(counts),
        kv_indptr=_indptr(needed),
        kv_indices=np.ascontiguousarray(page_table[page_rows, page_columns], np.int32),
        last_page_len=(ends - (needed - 1) * page_size).astype(np.int32),
        slot_mapping=pages * page_size + positions % page_size,
        positions=positions,
        seq_lens=ends,
    )


def check(meta: BatchMetadata, page_size: int, num_pages: int) -> None:
    """Raise MetadataError unless a kernel that trusts `meta` stays inside the pages that the rows own."""
    _check_shapes(meta)
    lengths, held = np.diff(meta.qo_indptr), np.diff(meta.kv_indptr)
    _refuse(lengths < 1, "has no tokens", lengths)
    _refuse((meta.last_page_len < 1) | (meta.last_page_len > page_size), "has a bad last page", meta.last_page_len)
    covered = (held - 1) * page_size + meta.last_page_len
    _refuse(covered != meta.seq_lens, "has pages for another length", covered)
    _refuse(lengths > meta.seq_lens, "computes more tokens than it has", lengths)
    outside = (meta.kv_indices < 1) | (meta.kv_indices >= num_pages)
    if outside.any():
        raise MetadataError(f"page {int(meta.kv_indices[outside][0])} is outside 1..{num_pages - 1}")
    rows, offsets = spread(lengths)
    positions = (meta.seq_lens - lengths)[rows] + offsets
    wrong = positions != meta.positions
    _refuse_token(wrong, "is at the wrong position", meta.positions)
    pages = meta.kv_indices[meta.kv_indptr[:-1][rows] + positions // page_size]
    _refuse_token(
        meta.slot_mapping != pages.astype(np.int64) * page_size + positions % page_size,
        "is written to a slot that isn't its own:",
        meta.slot_mapping,
    )
    if len(np.unique(meta.slot_mapping)) != meta.num_tokens:
        raise MetadataError("two tokens are written to one slot")


def _check_shapes(meta: BatchMetadata) -> None:
    expected = (
        ("qo_indptr", meta.qo_indptr, meta.num_rows + 1),
        ("kv_indptr", meta.kv_indptr, meta.num_rows + 1),
        ("last_page_len", meta.last_page_len, meta.num_rows),
        ("seq_lens", meta.seq_lens, meta.num_rows),
        ("slot_mapping", meta.slot_mapping, meta.num_tokens),
        ("positions", meta.positions, meta.num_tokens),
    )
    for name, array, length in expected:
        if array.shape != (length,):
            raise MetadataError(f"{name} has shape {array.shape}, expected ({length},)")
    for name, indptr, end in (("qo", meta.qo_indptr, meta.num_tokens), ("kv", meta.kv_indptr, len(meta.kv_indices))):
        if indptr[0] != 0 or indptr[-1] != end or (np.diff(indptr) < 0).any():
            raise MetadataError(f"{name}_indptr doesn't run from 0 to {end} without going back")


def _refuse(wrong: npt.NDArray[np.bool_], what: str, values: npt.NDArray[np.integer]) -> None:
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise MetadataError(f"row {row} {what} ({int(values[row])})")


def _refuse_token(wrong: npt.NDArray[np.bool_], what: str, values: npt.NDArray[np.integer]) -> None:
    if wrong.any():
        token = int(np.flatnonzero(wrong)[0])
        raise MetadataError(f"token {token} {what} {int(values[token])}")


def _indptr(counts: npt.NDArray[np.integer]) -> Int32s:
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
