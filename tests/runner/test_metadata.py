"""Index arrays for attention kernels: a table, a slow twin, and the checker that guards the kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.metadata import BatchMetadata, MetadataError, build, check


def made(table: list[list[int]], starts: list[int], counts: list[int], size: int) -> BatchMetadata:
    width = max(map(len, table))
    padded = np.array([row + [0] * (width - len(row)) for row in table], np.int32)
    return build(padded, np.array(starts, np.int32), np.array(counts, np.int32), size)


@pytest.mark.parametrize(
    ("table", "starts", "counts", "last", "slots", "indices"),
    [
        ([[5]], [0], [1], [1], [20], [5]),
        ([[5]], [0], [4], [4], [20, 21, 22, 23], [5]),
        ([[5, 9]], [0], [5], [1], [20, 21, 22, 23, 36], [5, 9]),
        ([[5, 9]], [4], [4], [4], [36, 37, 38, 39], [5, 9]),
        ([[5, 9]], [3], [1], [4], [23], [5]),
        ([[5, 9], [7, 0]], [6, 2], [1, 2], [3, 4], [38, 30, 31], [5, 9, 7]),
    ],
    ids=["one token", "a full page", "across a border", "second page exactly", "last slot of a page", "two rows"],
)
def test_tokens_land_where_the_page_table_says(
    table: list[list[int]],
    starts: list[int],
    counts: list[int],
    last: list[int],
    slots: list[int],
    indices: list[int],
) -> None:
    meta = made(table, starts, counts, 4)
    assert meta.last_page_len.tolist() == last
    assert meta.slot_mapping.tolist() == slots
    assert meta.kv_indices.tolist() == indices
    assert meta.seq_lens.tolist() == [start + count for start, count in zip(starts, counts, strict=True)]
    check(meta, 4, 16)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int], int]:
    size = draw(st.sampled_from([1, 3, 4, 16]))
    shapes = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6))
    table, first = [], 1
    for start, count in shapes:
        needed = -(-(start + count) // size)
        table.append(list(range(first, first + needed))[:: draw(st.sampled_from([1, -1]))])
        first += needed
    return table, [start for start, _ in shapes], [count for _, count in shapes], size


@settings(max_examples=examples(30), deadline=None)
@given(batches())
def test_the_arrays_equal_those_of_a_slow_twin(batch: tuple[list[list[int]], list[int], list[int], int]) -> None:
    table, starts, counts, size = batch
    meta = made(table, starts, counts, size)
    qo, kv, indices, slots, positions = [0], [0], [], [], []
    for pages, start, count in zip(table, starts, counts, strict=True):
        for position in range(start, start + count):
            slots.append(pages[position // size] * size + position % size)
            positions.append(position)
        used = pages[: (start + count - 1) // size + 1]
        indices += used
        qo.append(qo[-1] + count)
        kv.append(kv[-1] + len(used))
    assert meta.num_tokens == len(slots) and meta.num_rows == len(counts)
    assert meta.qo_indptr.tolist() == qo and meta.kv_indptr.tolist() == kv and meta.kv_indices.tolist() == indices
    assert meta.slot_mapping.tolist() == slots and meta.positions.tolist() == positions
    assert meta.slot_mapping.dtype == np.int64 and meta.positions.dtype == np.int64
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "seq_lens"):
        assert getattr(meta, name).dtype == np.int32 and getattr(meta, name).flags.c_contiguous, name
    check(meta, size, max(indices) + 1)


@pytest.mark.parametrize(
    ("field", "index", "value", "words"),
    [
        ("last_page_len", 0, 0, "row 0 has a bad last page"),
        ("last_page_len", 1, 5, "row 1 has a bad last page"),
        ("kv_indices", 1, 0, "page 0 is outside"),
        ("kv_indices", 1, 16, "page 16 is outside 1..15"),
        ("slot_mapping", 0, -1, "token 0 is written to a slot that isn't its own: -1"),
        ("slot_mapping", 0, 63, "isn't its own"),
        ("positions", 1, 7, "token 1 is at the wrong position 7"),
        ("seq_lens", 0, 9, "row 0 has pages for another length"),
        ("qo_indptr", 1, 9, "qo_indptr doesn't run"),
        ("kv_indptr", 2, 2, "kv_indptr doesn't run"),
    ],
)
def test_the_checker_names_what_would_leave_the_pages(field: str, index: int, value: int, words: str) -> None:
    meta = made([[5, 9], [7]], [6, 2], [1, 2], 4)
    array = getattr(meta, field).copy()
    array[index] = value
    with pytest.raises(MetadataError, match=words):
        check(dataclasses.replace(meta, **{field: array}), 4, 16)


def test_the_checker_sees_two_rows_that_write_one_page() -> None:
    meta = made([[5], [5]], [0, 0], [2, 2], 4)
    with pytest.raises(MetadataError, match="two tokens"):
        check(meta, 4, 16)


def test_the_checker_sees_an_array_of_the_wrong_length() -> None:
    meta = made([[5]], [0], [2], 4)
    with pytest.raises(MetadataError, match="positions has shape"):
        check(dataclasses.replace(meta, positions=meta.positions[:1]), 4, 16)
