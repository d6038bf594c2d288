"""What the tests of other schedulers of this kind ask of theirs, asked of ours: counts, orders, books."""

from __future__ import annotations

from random import Random

import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import FetchKv, RequestStatus, StepResult
from tests.scheduler.isolated import Isolated, default_sample, limits, solo_tokens

S = RequestStatus


# --- what a step holds ------------------------------------------------------------------------------------------


def test_all_that_fits_is_scheduled_at_once_in_full_and_in_order() -> None:
    isolated = Isolated(256)
    for request_id in range(1, 11):
        isolated.add(request_id, 3 * request_id, max_tokens=2)
    assert list(isolated.step().items()) == [(request_id, 3 * request_id) for request_id in range(1, 11)]
    step = isolated.steps[-1]
    assert step is not None and [new.id for new in step.new] == list(range(1, 11)) and not step.left
    isolated.drain()


def test_a_budget_for_two_and_a_half_prompts_cuts_the_third_and_leaves_the_fourth_waiting() -> None:
    isolated = Isolated(256, max_num_batched_tokens=50, max_num_seqs=4)
    for request_id in (1, 2, 3, 4):
        isolated.add(request_id, 20, max_tokens=2)
    assert isolated.step() == {1: 20, 2: 20, 3: 10}
    assert isolated.request(4).status == S.WAITING and isolated.request(4).held == {"tokens": 1}
    assert isolated.step() == {1: 1, 2: 1, 3: 10, 4: 20}
    isolated.drain()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_the_tokens_of_all_steps_are_the_prompts_and_all_outputs_but_the_last(max_tokens: int, delay: int) -> None:
    isolated = Isolated(256, delay=delay)
    prompts = {1: 1, 2: 15, 3: 16, 4: 17, 5: 70}
    for request_id, prompt in prompts.items():
        isolated.add(request_id, prompt, max_tokens=max_tokens)
    isolated.drain()
    assert sum(sum(step.values()) for step in isolated.runner.scheduled) == sum(prompts.values()) + 5 * (max_tokens - 1)
    assert all(len(stream) == max_tokens for stream in isolated.tokens.values())
    assert isolated.core.stats.scheduled_tokens == sum(prompts.values()) + 5 * (max_tokens - 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_whoever_leaves_with_two_steps_in_flight_has_the_tokens_of_the_steps_before(how: str, seed: int) -> None:
    isolated = Isolated(256, delay=2)
    order = list(range(1, 9))
    for request_id in order:
        isolated.add(request_id, 10, max_tokens=40)
    Random(seed).shuffle(order)
    isolated.step()
    isolated.step()
    for turn, request_id in enumerate(order, start=1):
        isolated.step()
        assert len(isolated.tokens[request_id]) == turn
        if how == "abort":
            isolated.abort(request_id)
        else:
            isolated.preempt(request_id)
    isolated.drain()
    if how == "abort":
        assert {i: len(stream) for i, stream in isolated.tokens.items()} == {i: n + 1 for n, i in enumerate(order)}
    for request_id, stream in isolated.tokens.items():
        assert stream == solo_tokens(request_id, 10, 40)[: len(stream)]


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(
    load=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=2, max_size=7),
    usable=st.integers(6, 12),
    budget=st.sampled_from([7, 16, 64]),
    caching=st.booleans(),
    host_blocks=st.sampled_from([0, 20]),
)
def test_useful_and_replayed_tokens_are_all_that_is_scheduled(
    load: list[tuple[int, int]], usable: int, budget: int, caching: bool, host_blocks: int
) -> None:
    """With nothing in flight in vain: each position of a request once, and what was lost a second time."""
    isolated = Isolated(
        usable,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        recovery_policy="swap",
        limit=limits(usable, host_blocks=host_blocks),
    )
    for request_id, (prompt, outputs) in enumerate(load, start=1):
        isolated.add(request_id, prompt, max_tokens=outputs)
    isolated.drain()
    stats = isolated.core.stats
    useful = sum(prompt + outputs - 1 for prompt, outputs in load) - stats.prefix_hit_tokens
    assert stats.scheduled_tokens == useful + stats.replayed_tokens
    records = [isolated.control("timeline", id=str(i)) for i in range(1, len(load) + 1)]
    assert sum(record["replayed_tokens"] for record in records) == stats.replayed_tokens


# --- the cache --------------------------------------------------------------------------------------------------


def test_a_waiter_that_is_held_back_touches_neither_its_cached_blocks_nor_their_age() -> None:
    isolated = Isolated(8)
    prompt = [500 + j for j in range(96)]
    isolated.add(1, prompt[:48], max_tokens=1)
    isolated.drain()
    isolated.add(2, 70, max_tokens=20)
    isolated.step()
    isolated.add(3, prompt, max_tokens=2)
    pool = isolated.core.pool
    before = (list(pool.refs), list(pool.free), dict(pool.cached))
    scheduled = isolated.step()
    assert scheduled == {2: 1} and isolated.request(3).held == {"blocks": 1}
    assert (list(pool.refs), list(pool.free), dict(pool.cached)) == before
    isolated.drain()
    assert isolated.tokens[3] == solo_tokens(3, 96, 2)


def test_no_cached_block_is_overwritten_while_one_without_content_is_free() -> None:
    isolated = Isolated(8)
    isolated.add(1, 48, max_tokens=1)
    isolated.drain()
    isolated.add(2, 70, max_tokens=1)
    isolated.drain()
    assert isolated.core.stats.evictions == 0 == isolated.core.pool.evictions
    isolated.add(3, [default_sample(1, j) for j in range(48)], max_tokens=1)
    isolated.drain()
    assert isolated.finished[3].num_cached_tokens == 32


def test_each_turn_of_a_conversation_hits_all_full_blocks_of_the_one_before() -> None:
    isolated = Isolated(128)
    history = [700 + j for j in range(20)]
    computed = 0
    for turn in range(1, 6):
        isolated.add(turn, list(history), max_tokens=21)
        isolated.drain()
        assert isolated.finished[turn].num_cached_tokens == computed // 16 * 16
        history += isolated.tokens[turn]
        computed = len(history) - 1  # the last output has no KV
        history += [turn] * 20


def test_a_request_that_is_tried_again_and_again_is_one_look_up() -> None:
    isolated = Isolated(8)
    isolated.add(1, 100, max_tokens=20)
    isolated.step()
    isolated.add(2, 60, max_tokens=2)
    for _ in range(5):
        isolated.step()
    assert isolated.request(2).held["blocks"] == 5
    isolated.drain()
    assert isolated.core.stats.prefix_queried_tokens == 160


# --- priorities -------------------------------------------------------------------------------------------------


def test_eight_requests_enter_by_priority_and_equals_by_arrival() -> None:
    isolated = Isolated(64, queue_policy="priority", max_num_seqs=1)
    priorities = {1: 5, 2: 1, 3: 8, 4: 2, 5: 1, 6: 5, 7: 0, 8: 2}
    for request_id, priority in priorities.items():
        isolated.add(request_id, 8, max_tokens=1, priority=priority)
    isolated.drain()
    assert list(isolated.finished) == sorted(priorities, key=lambda i: (priorities[i], i))


def test_with_room_for_all_nobody_is_preempted_however_urgent_the_newcomer() -> None:
    isolated = Isolated(64, queue_policy="priority", max_num_seqs=4)
    isolated.add(1, 20, max_tokens=9, priority=100)
    isolated.add(2, 20, max_tokens=9, priority=50)
    isolated.step()
    isolated.add(3, 20, max_tokens=9, priority=-100)
    isolated.step()
    assert sorted(isolated.running()) == [1, 2, 3]
    isolated.drain()
    assert isolated.core.stats.preemptions == 0


def test_under_pressure_the_least_urgent_leaves_first_and_returns_last() -> None:
    isolated = Isolated(9, queue_policy="priority")
    for request_id, priority in ((1, 2), (2, 3), (3, 1)):
        isolated.add(request_id, 40, max_tokens=40, priority=priority)
    isolated.drain()
    assert list(isolated.finished) == [3, 1, 2]
    counts = {i: end.num_preemptions for i, end in isolated.finished.items()}
    assert counts[3] == 0 and counts[2] >= counts[1]
    assert isolated.tokens == {i: solo_tokens(i, 40, 40) for i in (1, 2, 3)}


# --- KV from elsewhere ------------------------------------------------------------------------------------------


def fetches(isolated: Isolated) -> list[FetchKv]:
    return [order for order in isolated.orders() if isinstance(order, FetchKv)]


def test_a_transfer_that_finds_no_room_waits_and_preempts_nobody() -> None:
    """Eight blocks and five, in a pool of nine."""
    isolated = Isolated(9)
    prompts = {1: [100 + j for j in range(129)], 2: [900 + j for j in range(81)]}
    isolated.add(1, prompts[1], max_tokens=2, kv_source="elsewhere")
    isolated.add(2, prompts[2], max_tokens=2, kv_source="elsewhere")
    isolated.step()
    (order,) = fetches(isolated)
    assert order.id == 1 and isolated.request(2).status == S.WAITING
    isolated.deliver_kv(order, prompts[1], order.num_tokens)
    while 1 not in isolated.finished:
        isolated.step()
    isolated.step()
    (order,) = fetches(isolated)
    assert order.id == 2
    isolated.deliver_kv(order, prompts[2], order.num_tokens)
    isolated.drain()
    assert isolated.core.stats.preemptions == 0
    assert isolated.tokens == {i: solo_tokens(i, len(prompt), 2) for i, prompt in prompts.items()}


def test_a_preempted_request_does_not_ask_for_its_kv_again() -> None:
    isolated = Isolated(64)
    prompt = [100 + j for j in range(65)]
    isolated.add(1, prompt, max_tokens=9, kv_source="elsewhere")
    isolated.step()
    (order,) = fetches(isolated)
    isolated.deliver_kv(order, prompt, order.num_tokens)
    isolated.step()
    isolated.preempt(1)
    isolated.drain()
    assert not fetches(isolated)
    assert isolated.tokens[1] == solo_tokens(1, 65, 9)
    assert isolated.core.stats.prefix_queried_tokens == 65


def test_those_that_wait_for_something_else_are_counted_apart() -> None:
    isolated = Isolated(64, max_num_seqs=1)
    isolated.add(1, 20, max_tokens=9)
    isolated.step()
    isolated.add(2, 20)
    isolated.add(3, 20, grammar="json_schema:{}")
    stats = isolated.core.refresh_stats()
    assert (stats.running, stats.waiting, stats.parked) == (1, 1, {"waiting_for_grammar": 1})
    isolated.abort(3)
    isolated.drain()


# --- results in any order ---------------------------------------------------------------------------------------


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    load=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 25)), min_size=2, max_size=6),
    order=st.permutations(range(4)),
    again=st.integers(0, 3),
    usable=st.integers(8, 64),
)
def test_results_in_any_order_and_twice_give_the_tokens_of_results_in_order(
    load: list[tuple[int, int]], order: list[int], again: int, usable: int
) -> None:
    """Four steps are sent, then their results come in some order, one of them a second time; and so on."""
    isolated = Isolated(usable, delay=3)
    for request_id, (prompt, outputs) in enumerate(load, start=1):
        isolated.add(request_id, prompt, max_tokens=outputs)
    for _ in range(2000):
        if not isolated.core.has_requests and not isolated.core.in_flight:
            break
        results: list[StepResult] = []
        while len(results) < 4 and (step := isolated.core.schedule()) is not None:
            results.append(isolated.runner.execute(step))
        for index in order:
            if index < len(results):
                isolated.core.update(results[index])
        if results:
            isolated.core.update(results[again % len(results)])
        isolated.collect()
        assert not isolated.core.check()
    isolated.check_drained()
    assert isolated.tokens == {i: solo_tokens(i, *each) for i, each in enumerate(load, start=1)}
