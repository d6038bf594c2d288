"""Pressure: who leaves, what is undone, and that a return repeats and drops nothing."""

from __future__ import annotations

import pytest

from protocol.messages import RequestStatus
from tests.scheduler.isolated import Isolated, solo_tokens


def force_preemption(isolated: Isolated, request_id: int) -> None:
    """Preempt as a pass would, between two passes."""
    request = isolated.core.requests[request_id]
    if request.status == RequestStatus.RUNNING:
        isolated.core.preempt(request)


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("budget", [7, 4096])
@pytest.mark.parametrize("after", [0, 1, 11, 12, 13, 28, 29])
def test_a_preempted_request_goes_on_exactly_where_it_was(after: int, budget: int, delay: int) -> None:
    isolated = Isolated(64, delay=delay, max_num_batched_tokens=budget)
    isolated.add(1, 20, max_tokens=40)
    while len(isolated.tokens.get(1, [])) < after:
        isolated.step()
    force_preemption(isolated, 1)
    isolated.step()
    force_preemption(isolated, 1)  # also during the replay
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 40)
    assert isolated.finished[1].num_output_tokens == 40


def test_the_newest_request_is_the_victim_and_keeps_its_place() -> None:
    isolated = Isolated(6)
    for request_id in (1, 2, 3):
        isolated.add(request_id, 32, max_tokens=40)
    isolated.step()
    assert [request.id for request in isolated.core.table.requests()] == [1, 2, 3]
    isolated.add(4, 16, max_tokens=2)
    isolated.step()
    assert [request.id for request in isolated.core.table.requests()] == [1, 2]
    assert [request.id for request in isolated.core.strategies.queue] == [3, 4]
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 32, 40) for i in (1, 2, 3)} | {4: solo_tokens(4, 16, 2)}


def test_nothing_is_admitted_in_a_pass_that_preempts() -> None:
    isolated = Isolated(6)
    isolated.add(1, 48, max_tokens=20)
    isolated.add(2, 48, max_tokens=20)
    isolated.step()
    isolated.add(3, 8, max_tokens=2)
    assert isolated.step() == {1: 1}


@pytest.mark.parametrize("victim", [1, 2, 3, 4])
@pytest.mark.parametrize("preset", ["vllm", "triptych"])
def test_a_victim_is_undone_wherever_it_stands_in_the_step_being_built(victim: int, preset: str) -> None:
    isolated = Isolated(8, queue_policy="priority", preset=preset)
    for request_id in (1, 2, 3, 4):
        isolated.add(request_id, 32, max_tokens=12, priority=9 if request_id == victim else 1)
    isolated.step()
    scheduled = isolated.step()
    assert victim not in scheduled
    assert victim in {request.id for request in isolated.core.strategies.queue}
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 32, 12) for i in (1, 2, 3, 4)}


def test_equal_priorities_never_push_each_other_out_for_ever() -> None:
    isolated = Isolated(6, queue_policy="priority")
    for request_id in range(1, 7):
        isolated.add(request_id, 20, max_tokens=40, priority=3)
    isolated.drain(2000)
    assert isolated.tokens == {i: solo_tokens(i, 20, 40) for i in range(1, 7)}


def test_a_storm_makes_net_progress() -> None:
    isolated = Isolated(12, max_num_batched_tokens=32)
    shared = list(range(100, 132))
    for request_id in range(1, 7):
        own = [request_id * 50 + j for j in range(40)]
        prompt = (shared + own[:8]) if request_id <= 2 else own
        isolated.add(request_id, prompt, max_tokens=60)
    idle = 0
    while isolated.core.has_requests:
        idle = 0 if isolated.step() else idle + 1
        assert idle < 2, "work is pending and two steps in a row were empty"
    isolated.drain()
    assert all(len(isolated.tokens[i]) == 60 for i in range(1, 7))
    unique = 6 * (40 + 59) - 32
    assert isolated.core.stats.scheduled_tokens <= 3 * unique


def test_replayed_tokens_are_counted_apart() -> None:
    isolated = Isolated(64, enable_prefix_caching=False)
    isolated.add(1, 20, max_tokens=20)
    for _ in range(6):
        isolated.step()
    force_preemption(isolated, 1)
    isolated.drain()
    assert isolated.core.stats.replayed_tokens == 25
    assert isolated.finished[1].num_preemptions == 1


@pytest.mark.parametrize("state", ["waiting", "chunked", "running", "preempted"])
def test_an_abort_ends_a_request_in_any_state_and_disturbs_nobody(state: str) -> None:
    isolated = Isolated(64, max_num_seqs=2, max_num_batched_tokens=16, delay=1)
    isolated.add(1, 12, max_tokens=20)
    isolated.step()
    isolated.add(2, 60, max_tokens=20)
    if state == "chunked":
        isolated.step()
        isolated.step()
    elif state in ("running", "preempted"):
        while not isolated.tokens.get(2):
            isolated.step()
        if state == "preempted":
            force_preemption(isolated, 2)
    isolated.abort(2)
    assert isolated.status(2) == RequestStatus.ABORTED
    isolated.abort(2)
    isolated.abort(12345)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 12, 20)


def test_an_api_can_not_abort_the_request_of_another() -> None:
    isolated = Isolated(64)
    isolated.add(1, 8, max_tokens=5, peer=1)
    isolated.abort(1, peer=2)
    isolated.drain()
    assert isolated.status(1) == RequestStatus.LENGTH


def test_a_lost_api_takes_only_its_own_requests_along() -> None:
    isolated = Isolated(64)
    isolated.add(1, 8, max_tokens=9, peer=1)
    isolated.add(2, 8, max_tokens=9, peer=2)
    isolated.step()
    assert isolated.core.drop_peer(1) == 1
    isolated.tokens.pop(1)
    while isolated.core.has_requests:
        isolated.step()
    assert list(isolated.finished) == [2] and isolated.tokens[2] == solo_tokens(2, 8, 9)
    assert isolated.core.pool.num_free == 64
