"""Who leaves under pressure, and who is spared."""

from __future__ import annotations

import pytest

from protocol.messages import SamplingParams
from scheduler.blocks import BlockPool
from scheduler.policies.victim import VICTIM_POLICIES
from scheduler.request import Request
from tests.scheduler.isolated import Isolated, limits, solo_tokens


def candidate(
    request_id: int, *, priority: int = 0, outputs: int = 0, prompt: int = 4, blocks: list[int] | None = None
) -> Request:
    data = bytearray(4 * (prompt + outputs))
    return Request(
        request_id, 0, SamplingParams(99), data, prompt, 999, priority, arrival=request_id, blocks=blocks or []
    )


@pytest.mark.parametrize(
    ("policy", "victim"),
    [("last-admitted", 3), ("priority", 2), ("least-progress", 1), ("most-recoverable", 2)],
)
def test_each_policy_takes_its_own_victim(policy: str, victim: int) -> None:
    pool = BlockPool(20)
    candidates = [
        candidate(1, outputs=1, priority=1, blocks=pool.take(2)),
        candidate(2, outputs=9, priority=5, blocks=pool.take(4)),
        candidate(3, outputs=3, priority=2, blocks=pool.take(3)),
    ]
    assert VICTIM_POLICIES[policy]().choose(candidates, pool).id == victim


@pytest.mark.parametrize("policy", ["last-admitted", "priority", "least-progress", "most-recoverable"])
def test_among_equals_the_newest_leaves(policy: str) -> None:
    pool = BlockPool(20)
    candidates = [candidate(n, blocks=pool.take(2)) for n in (1, 2, 3)]
    assert VICTIM_POLICIES[policy]().choose(candidates, pool).id == 3


def test_least_progress_takes_the_longer_prompt_among_those_with_as_few_outputs() -> None:
    chosen = VICTIM_POLICIES["least-progress"]().choose(
        [candidate(1, outputs=2, prompt=9), candidate(2, outputs=2, prompt=5)], BlockPool(2)
    )
    assert chosen.id == 1


def test_most_recoverable_counts_only_blocks_without_another_holder() -> None:
    pool = BlockPool(20)
    shared = pool.take(5)
    pool.hold(shared)
    candidates = [candidate(1, blocks=shared), candidate(2, blocks=[*shared, *pool.take(1)])]
    assert VICTIM_POLICIES["most-recoverable"]().choose(candidates, pool).id == 2


def twins(preset: str) -> Isolated:
    """Two requests that share both their blocks entirely, and a third that has its own."""
    isolated = Isolated(7, preset=preset)
    shared = list(range(100, 132))
    isolated.add(1, 40, max_tokens=20)
    isolated.add(2, [*shared], max_tokens=30)
    isolated.add(3, [*shared, 5], max_tokens=30)
    isolated.step()
    return isolated


def test_nobody_is_evicted_who_would_free_nothing_while_another_would_free_something() -> None:
    isolated = twins("triptych")
    core = isolated.core
    last = isolated.request(3)
    for block in last.blocks:  # somebody else holds all it has
        core.pool.refs[block] += 1
    assert core.choose_victim().id == 1, "the second shares all its blocks with the third"
    for block in last.blocks:
        core.pool.refs[block] -= 1
    assert core.choose_victim().id == 3
    isolated.drain()
    assert isolated.tokens[3] == solo_tokens(3, 33, 30)


def test_where_nobody_would_free_anything_somebody_leaves_all_the_same() -> None:
    isolated = twins("triptych")
    for request in isolated.core.table.requests():
        isolated.core.pool.hold(request.blocks)
    assert isolated.core.choose_victim().id == 3
    for request in isolated.core.table.requests():
        isolated.core.pool.release(request.blocks)
    isolated.drain()


@pytest.mark.parametrize(("preset", "victim"), [("triptych", 2), ("vllm", 3)])
def test_who_has_been_a_victim_often_enough_is_spared_by_guarded_presets(preset: str, victim: int) -> None:
    isolated = Isolated(32, preset=preset, max_preemptions=2)
    for request_id in (1, 2, 3):
        isolated.add(request_id, 20, max_tokens=9)
    isolated.step()
    isolated.request(3).num_preemptions = 2
    assert isolated.core.choose_victim().id == victim
    isolated.drain()


def test_when_all_have_been_victims_often_enough_the_policy_chooses_among_all() -> None:
    isolated = Isolated(32, max_preemptions=2)
    for request_id in (1, 2, 3):
        isolated.add(request_id, 20, max_tokens=9)
    isolated.step()
    for request_id in (1, 2, 3):
        isolated.request(request_id).num_preemptions = 2
    assert isolated.core.choose_victim().id == 3
    isolated.drain()


def test_a_queue_by_priority_evicts_by_priority_unless_told_otherwise() -> None:
    for config, victim in (({}, 1), ({"victim_policy": "last-admitted"}, 2)):
        isolated = Isolated(32, queue_policy="priority", **config)
        isolated.add(1, 20, max_tokens=9, priority=5)
        isolated.step()
        isolated.add(2, 20, max_tokens=9, priority=1)
        isolated.step()
        assert isolated.core.choose_victim().id == victim
        isolated.drain()


def test_least_progress_counts_outputs_that_only_the_table_holds() -> None:
    isolated = Isolated(64, victim_policy="least-progress")
    isolated.add(1, 20, max_tokens=30)
    for _ in range(10):
        isolated.step()
    isolated.add(2, 4, max_tokens=30)
    isolated.step()
    isolated.step()
    assert {i: len(stream) for i, stream in isolated.tokens.items()} == {1: 12, 2: 2}
    assert isolated.core.choose_victim().id == 2
    isolated.drain()


@pytest.mark.parametrize("recovery", ["recompute", "swap"])
def test_spared_requests_that_could_not_all_stay_to_their_ends_enter_one_after_the_other(recovery: str) -> None:
    isolated = Isolated(10, recovery_policy=recovery, max_preemptions=1, limit=limits(10, host_blocks=20))
    for request_id in (1, 2):
        isolated.add(request_id, 20, max_tokens=100)
    isolated.step()
    isolated.preempt(1)
    isolated.preempt(2)
    while not isolated.finished:
        isolated.step()
        assert len(isolated.running()) <= 1, "there are blocks for the other now, but not for both to the end"
    isolated.drain()
    assert isolated.core.stats.preemptions == 2
    assert isolated.tokens == {i: solo_tokens(i, 20, 100) for i in (1, 2)}


def test_a_plan_leaves_the_room_of_a_spared_waiter_that_may_not_enter_yet_to_others() -> None:
    isolated = Isolated(
        10, max_preemptions=1, max_num_batched_tokens=16, enable_prefix_caching=False, slo_ttft_s=10.0, slo_tpot_s=1.0
    )
    for request_id in (1, 2):
        isolated.add(request_id, 20, max_tokens=100)
    while len(isolated.tokens) < 2:
        isolated.step()
    isolated.request(1).num_preemptions = 1
    isolated.preempt(2)
    isolated.add(3, 8, max_tokens=2)
    assert isolated.step() == {1: 1, 3: 8}
    isolated.drain()
    assert isolated.tokens[2] == solo_tokens(2, 20, 100)
