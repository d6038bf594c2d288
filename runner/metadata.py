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
    held = np.arange(page_table.shape[1]) < needed[:, None]
    return BatchMetadata(
        num_tokens=len(positions),
        num_rows=len(counts),
        qo_indptr=_indptr(counts),
        kv_indptr=_indptr(needed),
        kv_indices=np.ascontiguousarray(page_table[held], np.int32),
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


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step as FlashInfer takes it: rows of one token first (decodes), then the others (prefills), in one page table.

    The table has A ≥ R rows: kv_indptr int32 [A+1] into kv_indices int32, last_page_len int32 [A]. Rows past
    `num_decodes + num_prefills` only receive keys and values that nobody is to keep. seq_lens int32 [R].

    batch_indices, positions int32 [T], in the step's own order of tokens: table row and position of each token's K/V.
    qo_indptr and prefill_indptr int32 [num_prefills + 1] count from the first prefill's token and page.
    order int32 [T]: token order[i] of the step is the i-th here; None where they are in this order already.
    """

    num_decodes: int
    num_prefills: int
    kv_indptr: Int32s
    kv_indices: Int32s
    last_page_len: Int32s
    seq_lens: Int32s
    batch_indices: Int32s
    positions: Int32s
    qo_indptr: Int32s
    prefill_indptr: Int32s
    order: Int32s | None = None

    @property
    def num_rows(self) -> int:
        """Rows that attend."""
        return self.num_decodes + self.num_prefills


def paged_plan(meta: BatchMetadata) -> PagedPlan:
    """The plan of a step with rows in any order. Tokens with a negative slot are written to the null page."""
    lengths = np.diff(meta.qo_indptr)
    decodes = lengths == 1
    num_decodes = int(np.count_nonzero(decodes))
    table = (meta.kv_indptr, meta.kv_indices, meta.last_page_len, meta.seq_lens)
    if num_decodes == meta.num_rows:  # by far the most frequent step: nothing to count or to move
        rows, order = np.arange(meta.num_rows, dtype=np.int32), None
        qo_indptr = np.zeros(1, np.int32)
    else:
        ranks = np.argsort(~decodes, kind="stable")
        in_order = bool(decodes[:num_decodes].all())
        if not in_order:
            table = _reordered(meta, ranks)
        places = np.empty(meta.num_rows, np.int32)
        places[ranks] = np.arange(meta.num_rows, dtype=np.int32)
        rows = np.repeat(places, lengths)
        order = None if in_order else np.argsort(rows, kind="stable").astype(np.int32)
        qo_indptr = _indptr(lengths[ranks[num_decodes:]])
    kv_indptr, kv_indices, last_page_len, seq_lens = table
    prefill_indptr = kv_indptr[num_decodes:] - kv_indptr[num_decodes]
    positions = meta.positions.astype(np.int32)
    nowhere = meta.slot_mapping < 0
    if nowhere.any():
        kv_indptr, kv_indices, last_page_len = _with_null_rows(kv_indptr, kv_indices, last_page_len, 1)
        rows = np.where(nowhere, np.int32(meta.num_rows), rows)
        positions = np.where(nowhere, np.int32(0), positions)
    return PagedPlan(
        num_decodes=num_decodes,
        num_prefills=meta.num_rows - num_decodes,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_page_len=last_page_len,
        seq_lens=seq_lens,
        batch_indices=rows,
        positions=positions,
        qo_indptr=qo_indptr,
        prefill_indptr=prefill_indptr,
        order=order,
    )


def padded_decodes(meta: BatchMetadata, rows: int) -> PagedPlan:
    """The plan of exactly `rows` decode rows: the step's, then rows of length 1 whose only page is the null page.

    MetadataError if the step has more rows, or one of more than a token.
    """
    missing = rows - meta.num_rows
    if missing < 0 or meta.num_tokens != meta.num_rows:
        raise MetadataError(f"{meta.num_tokens} tokens in {meta.num_rows} rows don't fit {rows} decode rows")
    plan = paged_plan(meta)
    table = _with_null_rows(
        plan.kv_indptr[: meta.num_rows + 1],
        plan.kv_indices[: plan.kv_indptr[meta.num_rows]],
        plan.last_page_len[: meta.num_rows],
        missing,
    )
    if missing == 0 and len(plan.last_page_len) > rows:
        raise MetadataError("a token that is kept nowhere needs a padded row, and there is none")
    return PagedPlan(
        num_decodes=rows,
        num_prefills=0,
        kv_indptr=table[0],
        kv_indices=table[1],
        last_page_len=table[2],
        seq_lens=np.concatenate((plan.seq_lens, np.ones(missing, np.int32))),
        batch_indices=np.concatenate((plan.batch_indices, np.arange(meta.num_rows, rows, dtype=np.int32))),
        positions=np.concatenate((plan.positions, np.zeros(missing, np.int32))),
        qo_indptr=plan.qo_indptr,
        prefill_indptr=plan.prefill_indptr[:1],
    )


def check_plan(plan: PagedPlan, meta: BatchMetadata, page_size: int) -> None:
    """Raise MetadataError unless `plan`, padded or not, reads and writes exactly what the checked `meta` says.

    Rows beyond the step's may touch the first slot of the null page and nothing else.
    """
    extra = len(plan.last_page_len) - meta.num_rows
    held = np.diff(plan.kv_indptr)
    if plan.kv_indptr[0] != 0 or plan.kv_indptr[-1] != len(plan.kv_indices) or (held < 1).any() or extra < 0:
        raise MetadataError(f"the table of {meta.num_rows} rows has {held.tolist()} pages of {len(plan.kv_indices)}")
    own = plan.kv_indices[: len(plan.kv_indices) - extra]
    null = (plan.kv_indices[len(own) :] != 0).any() or (plan.last_page_len[meta.num_rows :] != 1).any()
    if null or (held[meta.num_rows :] != 1).any() or (plan.seq_lens[meta.num_rows :] != 1).any():
        raise MetadataError(f"one of {extra} padded rows is more than the first slot of the null page")
    in_order = plan.order is None  # so are the rows then, and there is nothing to sort
    if not np.array_equal(*(own, meta.kv_indices) if in_order else (np.sort(own), np.sort(meta.kv_indices))):
        raise MetadataError("a row holds other pages than the step gave it")
    covered = (held - 1) * page_size + plan.last_page_len
    _refuse(covered[: plan.num_rows] != plan.seq_lens, "has pages for another length", covered)
    if len(plan.batch_indices) and not 0 <= plan.batch_indices.min() <= plan.batch_indices.max() < len(held):
        raise MetadataError(f"a token is written for a row outside 0..{len(held) - 1}")
    columns = plan.positions // page_size
    _refuse_token((columns < 0) | (columns >= held[plan.batch_indices]), "is beyond its pages at", plan.positions)
    pages = plan.kv_indices[plan.kv_indptr[:-1][plan.batch_indices] + columns]
    slots = pages.astype(np.int64) * page_size + plan.positions % page_size
    wanted = np.concatenate((np.maximum(meta.slot_mapping, 0), np.zeros(len(slots) - meta.num_tokens, np.int64)))
    _refuse_token(slots != wanted, "is written to a slot that isn't its own:", slots)
    _check_order(plan, meta)


def _check_order(plan: PagedPlan, meta: BatchMetadata) -> None:
    """Every token attends as its own row."""
    order = np.arange(meta.num_tokens) if plan.order is None else plan.order
    counts = np.concatenate((np.ones(plan.num_decodes, np.int64), np.diff(plan.qo_indptr)))
    rows, offsets = spread(counts)
    rows, offsets = rows[: meta.num_tokens], offsets[: meta.num_tokens]
    positions = plan.seq_lens[rows] - counts[rows] + offsets
    _refuse_token(positions != meta.positions[order], "attends from the wrong position:", positions)
    kept = meta.slot_mapping[order] >= 0
    _refuse_token((plan.batch_indices[order] != rows) & kept, "attends as another row than it is written for:", rows)
    if not np.array_equal(np.sort(order), np.arange(meta.num_tokens)):
        raise MetadataError("the order names a token twice or not at all")
    if not np.array_equal(
        plan.prefill_indptr, plan.kv_indptr[plan.num_decodes : plan.num_rows + 1] - plan.kv_indptr[plan.num_decodes]
    ):
        raise MetadataError("the prefills' pages don't begin where the decodes' end")


def _reordered(meta: BatchMetadata, ranks: Int64s) -> tuple[Int32s, Int32s, Int32s, Int32s]:
    """The page table with row ranks[i] as its i-th: kv_indptr, kv_indices, last_page_len, seq_lens."""
    held = np.diff(meta.kv_indptr)[ranks]
    rows, offsets = spread(held)
    indices = meta.kv_indices[meta.kv_indptr[ranks][rows] + offsets]
    return _indptr(held), indices, meta.last_page_len[ranks], meta.seq_lens[ranks]


def _with_null_rows(indptr: Int32s, indices: Int32s, last: Int32s, count: int) -> tuple[Int32s, Int32s, Int32s]:
    """The table followed by `count` rows of one token in the null page."""
    more = indptr[-1] + np.arange(1, count + 1, dtype=np.int32)
    return (
        np.concatenate((indptr, more)),
        np.concatenate((indices, np.zeros(count, np.int32))),
        np.concatenate((last, np.ones(count, np.int32))),
    )


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
