"""The persistent batch: slots, diffs, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.columns import pack_i32, pack_u64
from protocol.messages import NewRequest
from runner.batch import Batch, Rows, StepError, spread, written_pages
from tests.runner.kit import limits, new


def rows_of(batch: Batch, counts: dict[int, int]) -> Rows:
    return batch.rows(batch.lookup(pack_u64(list(counts))), np.array(list(counts.values()), np.int32))


def test_a_resident_keeps_its_slot_while_others_come_and_go() -> None:
    batch = Batch(limits(max_num_seqs=3))
    first, second = batch.add(new(10, range(5), [1, 2])), batch.add(new(20, range(5), [3, 4]))
    batch.remove(10)
    third = batch.add(new(30, range(3), [5]))
    assert batch.slot(20) == second and third == first
    assert batch.pages(second).tolist() == [3, 4] and batch.pages(third).tolist() == [5]


def test_a_row_samples_only_when_it_reaches_its_last_known_token() -> None:
    batch = Batch(limits())
    slot = batch.add(new(1, range(6), [1, 2]))
    part = rows_of(batch, {1: 4})
    assert part.samples.tolist() == [False] and part.starts.tolist() == [0]
    batch.advance(part)
    rest = rows_of(batch, {1: 2})
    assert rest.samples.tolist() == [True] and rest.starts.tolist() == [4]
    batch.advance(rest)
    batch.write(rest.slots, np.array([6], np.int32), np.array([42], np.int32))
    assert batch.tokens[slot, 6] == 42 and batch.num_tokens[slot] == 7
    assert rows_of(batch, {1: 1}).starts.tolist() == [6]


def test_a_second_residency_replaces_the_first() -> None:
    batch = Batch(limits(max_num_seqs=1))
    batch.add(new(1, range(6), [1, 2]))
    slot = batch.add(new(1, range(8), [3, 4], incarnation=2))
    assert len(batch) == 1 and batch.incarnations[slot] == 2 and batch.num_computed[slot] == 0


def test_forgetting_an_unknown_request_is_no_fault() -> None:
    batch = Batch(limits())
    batch.remove(77)
    assert len(batch) == 0


@pytest.mark.parametrize(
    ("arrival", "code", "words"),
    [
        (new(1, [], [1]), "over_limit", "0 tokens"),
        (new(1, range(65), range(1, 17)), "over_limit", "65 tokens, limit 64"),
        (new(1, range(4), [1], num_computed=4), "bad_step", "4 computed"),
        (new(1, [100], [1]), "bad_step", "outside 0..99"),
        (new(1, [-1], [1]), "bad_step", "outside 0..99"),
        (new(1, range(8), [0, 1]), "bad_step", "outside 1..63"),
        (new(1, range(8), [1, 64]), "bad_step", "outside 1..63"),
        (new(1, range(8), [1], num_computed=5), "bad_step", "1 pages"),
    ],
)
def test_a_request_that_contradicts_the_limits_is_refused_with_numbers(
    arrival: NewRequest, code: str, words: str
) -> None:
    batch = Batch(limits())
    with pytest.raises(StepError, match=words) as caught:
        batch.add(arrival)
    assert caught.value.code == code and len(batch) == 0


def test_one_request_too_many_is_refused() -> None:
    batch = Batch(limits(max_num_seqs=1))
    batch.add(new(1, range(4), [1]))
    with pytest.raises(StepError, match="all 1 slots") as caught:
        batch.add(new(2, range(4), [2]))
    assert caught.value.code == "over_limit"


def test_a_row_may_not_reach_past_its_tokens_or_its_pages() -> None:
    batch = Batch(limits())
    batch.add(new(1, range(6), [1]))
    with pytest.raises(StepError, match="past its known tokens: up to 7 of 6"):
        rows_of(batch, {1: 7})
    with pytest.raises(StepError, match="past its pages: up to 6 of 4"):
        rows_of(batch, {1: 6})
    batch.grow(batch.lookup(pack_u64([1])), np.array([1], np.int32), np.array([9], np.int32))
    assert rows_of(batch, {1: 6}).samples.tolist() == [True]


def test_more_tokens_than_a_step_may_have_are_refused() -> None:
    batch = Batch(limits(max_num_batched_tokens=5))
    batch.add(new(1, range(6), [1, 2]))
    with pytest.raises(StepError, match="6 tokens in a step, limit 5"):
        rows_of(batch, {1: 6})


def test_a_request_named_twice_or_not_at_all_known_is_refused() -> None:
    batch = Batch(limits())
    batch.add(new(1, range(6), [1, 2]))
    with pytest.raises(StepError, match="two rows"):
        batch.lookup(pack_u64([1, 1]))
    with pytest.raises(StepError, match="request 5 is not resident"):
        batch.lookup(pack_u64([5]))


def test_the_remembered_lookup_ends_when_a_request_leaves() -> None:
    batch = Batch(limits())
    batch.add(new(1, range(6), [1, 2]))
    batch.lookup(pack_u64([1]))
    batch.remove(1)
    with pytest.raises(StepError, match="not resident"):
        batch.lookup(pack_u64([1]))


def test_ids_use_all_64_bits() -> None:
    batch = Batch(limits())
    slot = batch.add(new(2**64 - 1, range(6), [1, 2]))
    assert batch.lookup(pack_u64([2**64 - 1])).tolist() == [slot]


@pytest.mark.parametrize(
    ("counts", "pages"), [([1], [4, 5]), ([0], []), ([20], list(range(4, 24))), ([1], [0]), ([1], [64])]
)
def test_growth_that_does_not_add_up_is_refused(counts: list[int], pages: list[int]) -> None:
    batch = Batch(limits())
    batch.add(new(1, range(4), [1]))
    with pytest.raises(StepError):
        batch.grow(batch.lookup(pack_u64([1])), np.array(counts, np.int32), np.array(pages, np.int32))


def test_a_dead_row_computes_what_is_known_and_samples_no_more_until_it_leaves() -> None:
    batch = Batch(limits())
    slot = batch.add(new(1, range(6), [1, 2]))
    batch.add(new(2, range(4), [2]))
    batch.dead[slot] = True
    rows = rows_of(batch, {1: 4, 2: 4})
    assert rows.ids.tolist() == [1, 2] and rows.samples.tolist() == [False, True]
    batch.advance(rows)
    last = rows_of(batch, {1: 3})  # the scheduler counts on a sampled token that will never be
    assert last.counts.tolist() == [2] and last.samples.tolist() == [False]
    batch.advance(last)
    assert len(rows_of(batch, {1: 1})) == 0
    batch.remove(1)
    assert not batch.dead[batch.add(new(3, range(4), [3]))]


@given(st.lists(st.integers(0, 5), max_size=8))
def test_spread_equals_the_loop_it_stands_for(counts: list[int]) -> None:
    rows, offsets = spread(counts)
    assert list(zip(rows.tolist(), offsets.tolist(), strict=True)) == [
        (row, offset) for row, count in enumerate(counts) for offset in range(count)
    ]


@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_a_random_history_equals_a_plain_twin(data: st.DataObject) -> None:
    """Add, grow, compute and remove at random; tokens, pages and written slots agree with lists in a dict."""
    batch = Batch(limits(max_num_seqs=4))
    twin: dict[int, dict] = {}
    for request in range(1, 12):
        for gone in [one for one in twin if len(twin) == 4 or data.draw(st.booleans())][:1]:
            batch.remove(gone)
            del twin[gone]
        tokens = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=9))
        pages = data.draw(st.lists(st.integers(1, 63), min_size=4, max_size=4))
        batch.add(new(request, tokens, pages))
        twin[request] = {"tokens": list(tokens), "computed": 0, "pages": list(pages)}
        counts = {one: data.draw(st.integers(1, len(s["tokens"]) - s["computed"])) for one, s in twin.items()}
        counts = {one: min(n, 16 - twin[one]["computed"]) for one, n in counts.items() if twin[one]["computed"] < 16}
        rows = rows_of(batch, counts)
        slots = [
            (twin[one]["pages"][p // 4], p % 4)
            for one, n in counts.items()
            for p in range(twin[one]["computed"], twin[one]["computed"] + n)
        ]
        written = written_pages(batch, rows)
        assert list(zip(written[0].tolist(), written[1].tolist(), strict=True)) == slots
        sampling = [one for one, n in counts.items() if twin[one]["computed"] + n == len(twin[one]["tokens"])]
        assert rows.ids[rows.samples].tolist() == sampling
        slots = rows.slots[rows.samples]
        known = batch.num_tokens[slots]
        batch.advance(rows)
        batch.write(slots, known, np.arange(len(sampling), dtype=np.int32))
        for one, n in counts.items():
            twin[one]["computed"] += n
        for token, one in enumerate(sampling):
            twin[one]["tokens"].append(token)
    for one, state in twin.items():
        slot = batch.slot(one)
        assert slot is not None
        assert batch.tokens[slot, : batch.num_tokens[slot]].tolist() == state["tokens"]
        assert batch.num_computed[slot] == state["computed"] and batch.pages(slot).tolist() == state["pages"]


def test_column_lengths_that_disagree_are_refused() -> None:
    batch = Batch(limits())
    batch.add(new(1, range(4), [1]))
    with pytest.raises(StepError, match="1 ids with 2 token counts"):
        batch.rows(batch.lookup(pack_u64([1])), np.frombuffer(pack_i32([1, 1]), np.int32))
