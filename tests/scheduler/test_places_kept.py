"""Who waits for a grammar or for KV from elsewhere keeps the place that its arrival gives it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import FetchKv, GrammarStatus, SamplingParams
from scheduler.policies.queue import settle_by_arrival
from scheduler.request import Request
from tests.scheduler.isolated import Isolated, default_sample


def queued(isolated: Isolated) -> list[int]:
    return [request.id for request in isolated.core.strategies.queue.ordered(isolated.core.view)]


def busy(**config: Any) -> Isolated:
    """A scheduler whose only slot is taken by request 1."""
    isolated = Isolated(64, max_num_seqs=1, **config)
    isolated.add(1, 8, max_tokens=20)
    isolated.step()
    return isolated


def compiled(isolated: Isolated, request_id: int) -> None:
    isolated.core.on_grammar_status(GrammarStatus(request_id))


@pytest.mark.parametrize("queue", ["fcfs", "fair", "lpm"])
def test_a_request_whose_grammar_is_ready_goes_before_those_that_came_after_it(queue: str) -> None:
    isolated = busy(queue_policy=queue)
    isolated.add(2, 8)
    isolated.add(3, 8, grammar="regex:a+")
    isolated.add(4, 8)
    isolated.add(5, 8)
    isolated.step()
    compiled(isolated, 3)
    assert queued(isolated) == [2, 3, 4, 5]
    isolated.drain()
    assert list(isolated.finished) == [1, 2, 3, 4, 5]


def test_grammars_that_are_ready_in_another_order_change_nothing() -> None:
    isolated = busy()
    for request_id in (2, 3, 4, 5):
        isolated.add(request_id, 8, grammar="" if request_id == 4 else "regex:a+")
    for request_id in (5, 3, 2):
        compiled(isolated, request_id)
    assert queued(isolated) == [2, 3, 4, 5]
    isolated.drain()


def test_after_a_lost_runner_requests_with_grammars_stand_where_they_stood() -> None:
    isolated = busy()
    isolated.add(2, 8, grammar="regex:a+")
    compiled(isolated, 2)
    isolated.add(3, 8)
    isolated.lose_runner()
    assert queued(isolated) == [1, 3]
    compiled(isolated, 2)
    assert queued(isolated) == [1, 2, 3]
    isolated.drain()


def test_kv_that_has_arrived_puts_its_request_behind_a_suspended_one_that_came_before_it() -> None:
    isolated = Isolated(64, max_num_seqs=1, max_num_batched_tokens=64)
    tokens = [default_sample(2, j) for j in range(40)]
    isolated.add(2, tokens, kv_source="peer/1")
    isolated.step()
    (order,) = isolated.orders()
    assert isinstance(order, FetchKv)
    isolated.add(3, 8, max_tokens=9)
    isolated.add(4, 8)
    isolated.step()
    isolated.preempt(3)
    isolated.deliver_kv(order, tokens, 32)
    assert queued(isolated) == [2, 3, 4]
    isolated.drain()
    assert isolated.finished[2].num_cached_tokens == 32


def test_an_earlier_arrival_at_the_front_stays_before_one_whose_kv_has_arrived() -> None:
    isolated = Isolated(64, max_num_seqs=2)
    tokens = [default_sample(2, j) for j in range(40)]
    isolated.add(1, 8, max_tokens=9)
    isolated.add(2, tokens, kv_source="peer/1")
    isolated.step()
    (order,) = isolated.orders()
    isolated.preempt(1)
    isolated.deliver_kv(order, tokens, 32)
    assert queued(isolated) == [1, 2]
    isolated.drain()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99)), unique_by=lambda entry: entry[1]), st.integers(0, 99))
def test_newcomers_stay_in_order_of_arrival_and_nobody_else_is_moved_past_another(
    entries: list[tuple[bool, int]], arrival: int
) -> None:
    fresh = iter(sorted(number for ran, number in entries if not ran and number != arrival))
    queue: OrderedDict[int, Request] = OrderedDict()
    for ran, number in entries:  # who ran before stands anywhere, the others in order of arrival
        if number != arrival:
            number = number if ran else next(fresh)
            queue[number] = Request(
                number, 0, SamplingParams(1), bytearray(), 0, 0, arrival=number, first_admitted_ns=int(ran)
            )
    before = list(queue)
    queue[arrival] = Request(arrival, 0, SamplingParams(1), bytearray(), 0, 0, arrival=arrival)
    settle_by_arrival(queue, queue[arrival])
    assert [number for number in queue if number != arrival] == before
    newcomers = [request.arrival for request in queue.values() if not request.first_admitted_ns]
    assert newcomers == sorted(newcomers)
