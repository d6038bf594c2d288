"""Requests that one scheduler hands over to another: what they bring, what they leave behind, and who is suspected."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.messages import CompileGrammar, GrammarStatus, RequestStatus
from scheduler.interface import HandedOver
from tests.scheduler.isolated import Isolated, default_sample, limits, solo_tokens

EVERYTHING = 1 << 30


def pair(blocks: int = 64, **config: Any) -> tuple[Isolated, Isolated]:
    """Two schedulers with a runner each, whose clients are the same."""
    first, second = Isolated(blocks, **config), Isolated(blocks, **config)
    second.tokens, second.accepted = first.tokens, []
    return first, second


def move(first: Isolated, second: Isolated, most_tokens: int = EVERYTHING) -> list[HandedOver]:
    """The first one's runner is gone for good."""
    first.pending.clear()
    left = first.core.hand_over(most_tokens)
    assert not first.core.take_outputs(), "nobody is told"
    assert not first.core.check()
    for one in left:
        second.core.take_in(one)
    second.collect()
    return left


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 40])
def test_requests_go_on_elsewhere_with_no_token_lost_and_none_twice(delay: int, steps: int) -> None:
    first, second = pair(16, delay=delay, max_num_seqs=3)
    for request_id in range(5):
        first.add(request_id, 20 + request_id, 60)
    for _ in range(steps):
        first.step()
    live = set(first.core.requests)
    assert {one.submit.id for one in move(first, second)} == live
    assert not first.core.has_requests and first.core.pool.num_free == first.core.pool.num_usable
    second.drain()
    assert first.tokens == {request_id: solo_tokens(request_id, 20 + request_id, 60) for request_id in range(5)}


def test_the_scheduler_that_they_left_serves_again_when_its_runner_is_back() -> None:
    first, second = pair()
    first.add(1, 20, 30)
    for _ in range(5):
        first.step()
    move(first, second)
    first.lose_runner()
    first.add(2, 20, 10)
    second.drain()
    while first.core.has_requests:
        first.step()
    assert first.tokens[1] == solo_tokens(1, 20, 30) and first.tokens[2] == solo_tokens(2, 20, 10)
    assert first.core.stats.started == sum(first.core.stats.finished.values())
    assert first.core.stats.finished["moved"] == 1


def test_who_does_not_fit_the_other_pools_waits_for_its_own_runner() -> None:
    first, second = pair()
    first.add(1, 200, 30)
    first.add(2, 20, 30)
    for _ in range(3):
        first.step()
    assert [one.submit.id for one in move(first, second, 100)] == [2]
    first.lose_runner()
    first.tokens, finished = second.tokens, second
    finished.drain()
    while first.core.has_requests:
        first.step()
    assert first.tokens == {1: solo_tokens(1, 200, 30), 2: solo_tokens(2, 20, 30)}


def test_everything_that_a_request_asked_for_goes_with_it() -> None:
    first, second = pair()
    asked = {"priority": -3, "cache_salt": "s", "tenant": "t", "label": "l", "routing_key": "r"}
    first.add(1, 20, 30, seed=9, temperature=0.5, adapter="a", adapter_generation=4, **asked)
    [one] = move(first, second)
    moved = second.request(1)
    assert (moved.priority, moved.tenant, moved.label, moved.routing_key) == (-3, "t", "l", "r")
    assert dict(moved.cache_keys) == {"salt": "s", "adapter": "a", "adapter_generation": "4"}
    assert one.submit.resumed and one.submit.params.seed == 9
    assert "moved" in [event["event"] for event in second.control("timeline", id="1")["events"]]


def test_what_is_left_of_a_waiting_time_and_a_deadline_goes_on_to_count() -> None:
    first, second = pair(max_num_seqs=1)
    first.add(1, 20, 30)
    first.step()
    first.add(2, 20, 30, timeout_ms=1000, deadline_ms=9000)
    first.now += 400_000_000
    submits = {one.submit.id: one.submit for one in move(first, second)}
    assert submits[2].timeout_ms == 600 and submits[2].deadline_ms == 8600
    assert submits[1].timeout_ms == submits[1].deadline_ms == 0


def test_a_grammar_is_compiled_again_by_the_other_runner() -> None:
    first, second = pair()
    first.add(1, 20, 10, grammar="regex:a")
    assert [type(order) for order in first.orders()] == [CompileGrammar]
    move(first, second)
    assert second.orders() == [CompileGrammar(1, "regex:a")]
    second.core.on_grammar_status(GrammarStatus(1))
    second.drain()
    assert second.tokens[1] == solo_tokens(1, 20, 10)


def test_an_open_session_goes_on_with_what_it_has_been_given() -> None:
    first, second = pair()
    whole = [default_sample(1, position) for position in range(50)]
    first.add(1, whole[:20], 5, open=True)
    for _ in range(3):
        first.step()
    first.extend(1, whole[20:40])
    move(first, second)
    second.step()
    second.extend(1, whole[40:], last=True)
    second.drain()
    assert second.tokens[1] == solo_tokens(1, 50, 5)


def test_a_request_that_was_swapped_out_leaves_its_host_blocks_behind() -> None:
    first, second = pair(limit=limits(64, host_blocks=16), recovery_policy="swap")
    first.add(1, 40, 30)
    for _ in range(4):
        first.step()
    first.preempt(1)
    first.step()
    move(first, second)
    assert not first.core.suspension.check()
    second.drain()
    assert second.tokens[1] == solo_tokens(1, 40, 30)


def test_who_was_in_flight_when_two_runners_died_is_kept_apart_by_the_third_scheduler() -> None:
    first, second = pair()
    third = Isolated(64)
    third.tokens = first.tokens
    first.add(1, 20, 30)
    first.add(2, 20, 30)
    first.core.schedule()  # in flight, and the runner dies of it
    assert [one.deaths for one in move(first, second)] == [1, 1]
    assert not any(request.quarantined for request in second.core.requests.values())
    second.core.schedule()
    assert [one.deaths for one in move(second, third)] == [2, 2]
    assert all(third.request(request_id).quarantined for request_id in (1, 2))
    scheduled = third.step()
    assert len(scheduled) == 1, "each suspect runs alone"
    third.drain()
    assert third.tokens == {1: solo_tokens(1, 20, 30), 2: solo_tokens(2, 20, 30)}
    assert {third.status(request_id) for request_id in (1, 2)} == {RequestStatus.LENGTH}


def test_who_was_not_in_flight_is_not_suspected() -> None:
    first, second = pair(max_num_seqs=1)
    first.add(1, 20, 30)
    first.add(2, 20, 30)
    first.core.schedule()
    assert {one.submit.id: one.deaths for one in move(first, second)} == {1: 1, 2: 0}


def test_how_much_of_a_prompt_is_cached_is_told_in_tokens() -> None:
    first, second = pair()
    first.add(1, 100, 3)
    first.drain()
    first.add(2, [default_sample(1, position) for position in range(100)], 3)
    [one] = first.core.hand_over(EVERYTHING)
    assert first.core.cached_tokens(one.submit) == 96
    assert second.core.cached_tokens(one.submit) == 0
