"""The plan of a step for FlashInfer: right for rows in any order, padded or not, and what the checker catches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.metadata import (
    BatchMetadata,
    MetadataError,
    PagedPlan,
    build,
    check,
    check_plan,
    padded_decodes,
    paged_plan,
)

ROWS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 3, 17])), min_size=0, max_size=9)


def step(rows: list[tuple[int, int]], page_size: int, seed: int = 0) -> BatchMetadata:
    """Rows of (known tokens, tokens of this step) over shuffled pages."""
    starts = np.array([start for start, _ in rows], np.int32)
    counts = np.array([count for _, count in rows], np.int32)
    needed = -(-(starts + counts) // page_size)
    width = max(needed.tolist(), default=1)
    table = np.zeros((len(rows), width), np.int32)
    pages = np.random.default_rng(seed).permutation(int(needed.sum())).astype(np.int32) + 1
    table[np.arange(width) < needed[:, None]] = pages
    meta = build(table, starts, counts, page_size)
    check(meta, page_size, len(pages) + 1)
    return meta


@settings(max_examples=examples(50), deadline=None)
@given(ROWS, st.integers(1, 8), st.integers(0, 2**16))
def test_every_token_is_written_and_attends_where_the_step_says(
    rows: list[tuple[int, int]], page_size: int, seed: int
) -> None:
    """Against the slow way: one token at a time."""
    meta = step(rows, page_size, seed)
    plan = paged_plan(meta)
    check_plan(plan, meta, page_size)
    assert plan.num_decodes == sum(count == 1 for _, count in rows) and plan.num_rows == len(rows)
    assert (plan.order is None) == (sorted(rows, key=lambda row: row[1] != 1) == rows)
    order = range(meta.num_tokens) if plan.order is None else plan.order.tolist()
    assert sorted(order) == list(range(meta.num_tokens))
    for place, token in enumerate(order):
        row = int(np.searchsorted(meta.qo_indptr, token, "right")) - 1
        ours = place if place < plan.num_decodes else _prefill_row(plan, place)
        pages = plan.kv_indices[plan.kv_indptr[ours] : plan.kv_indptr[ours + 1]]
        assert pages.tolist() == meta.kv_indices[meta.kv_indptr[row] : meta.kv_indptr[row + 1]].tolist()
        assert plan.last_page_len[ours] == meta.last_page_len[row] and plan.seq_lens[ours] == meta.seq_lens[row]
        assert plan.batch_indices[token] == ours and plan.positions[token] == meta.positions[token]


def _prefill_row(plan: PagedPlan, place: int) -> int:
    row = int(np.searchsorted(plan.qo_indptr, place - plan.num_decodes, "right")) - 1
    begin = int(plan.kv_indptr[plan.num_decodes])
    assert plan.prefill_indptr[row] + begin == plan.kv_indptr[plan.num_decodes + row]
    return plan.num_decodes + row


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 60), min_size=0, max_size=9), st.integers(0, 5), st.integers(1, 8))
def test_padded_rows_are_one_token_of_the_null_page(starts: list[int], more: int, page_size: int) -> None:
    meta = step([(start, 1) for start in starts], page_size)
    rows = len(starts) + more
    plan = padded_decodes(meta, rows)
    check_plan(plan, meta, page_size)
    assert plan.num_decodes == rows == len(plan.seq_lens) == len(plan.batch_indices) == len(plan.positions)
    assert plan.kv_indptr[: len(starts) + 1].tolist() == meta.kv_indptr.tolist()
    assert plan.kv_indices.tolist() == [*meta.kv_indices.tolist(), *[0] * more]
    assert plan.last_page_len[len(starts) :].tolist() == plan.seq_lens[len(starts) :].tolist() == [1] * more
    assert plan.batch_indices.tolist() == list(range(rows)) and plan.positions[len(starts) :].tolist() == [0] * more
    assert {array.dtype for array in (plan.kv_indptr, plan.kv_indices, plan.batch_indices, plan.positions)} == {
        np.dtype(np.int32)
    }


@settings(max_examples=examples(20), deadline=None)
@given(ROWS.filter(bool), st.integers(1, 8), st.data())
def test_tokens_without_a_slot_go_to_the_null_page(
    rows: list[tuple[int, int]], page_size: int, data: st.DataObject
) -> None:
    meta = step(rows, page_size)
    nowhere = data.draw(st.sets(st.integers(0, meta.num_tokens - 1), min_size=1))
    meta.slot_mapping[list(nowhere)] = -1
    plan = paged_plan(meta)
    check_plan(plan, meta, page_size)
    assert plan.kv_indices[-1] == 0 and len(plan.last_page_len) == len(rows) + 1
    assert {token for token in range(meta.num_tokens) if plan.batch_indices[token] == len(rows)} == nowhere
    decodes = [row for row in rows if row[1] == 1]
    if decodes == rows:
        check_plan(padded_decodes(meta, len(rows) + 2), meta, page_size)
        with pytest.raises(MetadataError, match="needs a padded row"):
            padded_decodes(meta, len(rows))


def changed(plan: PagedPlan, **fields: Any) -> PagedPlan:
    return dataclasses.replace(plan, **fields)


def test_the_checker_sees_each_way_to_go_wrong() -> None:
    meta = step([(0, 3), (6, 1), (9, 1)], 4)
    plan = paged_plan(meta)
    assert plan.order is not None
    padded = padded_decodes(step([(6, 1), (9, 1)], 4), 3)
    decodes = step([(6, 1), (9, 1)], 4)

    def at(array: np.ndarray, index: int, value: int) -> np.ndarray:
        copy = array.copy()
        copy[index] = value
        return copy

    wrong = [
        (changed(plan, kv_indptr=at(plan.kv_indptr, -1, 4)), meta, "table of 3 rows"),
        (changed(plan, kv_indices=at(plan.kv_indices, 0, 0)), meta, "other pages"),
        (changed(plan, kv_indices=at(plan.kv_indices, 0, 99)), meta, "other pages"),
        (changed(plan, kv_indices=plan.kv_indices[::-1].copy()), meta, "slot that isn't its own"),
        (changed(plan, last_page_len=at(plan.last_page_len, 0, 1)), meta, "another length"),
        (changed(plan, positions=at(plan.positions, 0, 1)), meta, "slot that isn't its own"),
        (changed(plan, batch_indices=plan.batch_indices[::-1].copy()), meta, "beyond its pages at 6"),
        (changed(plan, batch_indices=at(plan.batch_indices, 0, 3)), meta, "outside 0..2"),
        (changed(plan, order=None), meta, "other pages"),
        (changed(plan, order=at(plan.order, 0, int(plan.order[1]))), meta, "wrong position|another row"),
        (changed(plan, seq_lens=plan.seq_lens[::-1].copy()), meta, "another length"),
        (changed(plan, prefill_indptr=plan.prefill_indptr + 1), meta, "don't begin where"),
        (changed(padded, kv_indices=at(padded.kv_indices, -1, 3)), decodes, "more than the first slot"),
        (changed(padded, last_page_len=at(padded.last_page_len, -1, 2)), decodes, "more than the first slot"),
        (changed(padded, positions=at(padded.positions, -1, 1)), decodes, "slot that isn't its own"),
    ]
    check_plan(plan, meta, 4)
    check_plan(padded, decodes, 4)
    for bad, of, match in wrong:
        with pytest.raises(MetadataError, match=match):
            check_plan(bad, of, 4)
