"""Urgent arrivals take slots or blocks from running requests: enough or nothing at all, and never among equals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.isolated import Isolated, limits, solo_tokens


def running(usable: int, *prompts: int, priority: int = 50, **config: Any) -> Isolated:
    """Requests 1, 2, … of one priority, all running."""
    isolated = Isolated(usable, queue_policy="priority", **config)
    for request_id, prompt in enumerate(prompts, start=1):
        isolated.add(request_id, prompt, max_tokens=100, priority=priority)
    isolated.step()
    assert isolated.running() == list(range(1, len(prompts) + 1))
    return isolated


def test_an_urgent_arrival_takes_a_slot_from_the_newest_of_the_least_urgent_in_the_next_pass() -> None:
    isolated = running(100, 20, 20, max_num_seqs=2)
    isolated.add(3, 20, max_tokens=3, priority=0)
    isolated.add(4, 20, max_tokens=3, priority=50)
    isolated.step()
    assert isolated.running() == [1, 3] and len(isolated.tokens[3]) == 1
    isolated.drain()
    assert isolated.core.stats.preemptions == 1, "the fourth, an equal, takes nobody's place"
    assert isolated.tokens[2] == solo_tokens(2, 20, 100)
    assert list(isolated.finished) == [3, 1, 2, 4]


def test_an_urgent_arrival_takes_as_many_blocks_as_its_whole_prompt_lacks() -> None:
    isolated = running(12, 60, 60, 60)
    isolated.add(4, 100, max_tokens=3, priority=0)
    isolated.step()
    assert isolated.running() == [1, 4], "one victim has four blocks; seven are needed"
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 60, 100) for i in (1, 2, 3)} | {4: solo_tokens(4, 100, 3)}


def test_if_all_that_may_leave_is_not_enough_nobody_leaves() -> None:
    isolated = Isolated(12, queue_policy="priority")
    isolated.add(1, 120, max_tokens=9, priority=0)
    isolated.add(2, 40, max_tokens=9, priority=50)
    isolated.step()
    isolated.add(3, 90, max_tokens=3, priority=0)
    isolated.step()
    assert isolated.running() == [1, 2] and isolated.core.stats.preemptions == 0
    isolated.drain()


def test_the_watermark_counts_among_what_is_needed() -> None:
    isolated = running(20, 100, 100, watermark=0.2)
    isolated.add(3, 90, max_tokens=3, priority=0)
    isolated.step()
    assert isolated.running() == [1, 3], "six blocks are free, six are needed, and four have to be left"
    isolated.drain()


def test_blocks_that_the_arrival_shares_with_its_victim_are_not_counted_twice() -> None:
    """The victim's blocks are what the arrival would hit: letting it go frees one block more, not five."""
    isolated = Isolated(8, queue_policy="priority")
    prefix = list(range(100, 164))
    isolated.add(1, [*prefix, 1], max_tokens=9, priority=50)
    isolated.add(2, 40, max_tokens=8, priority=0)
    isolated.step()
    isolated.add(3, [*prefix, *range(300, 364)], max_tokens=3, priority=0)
    isolated.step()
    assert isolated.running() == [2, 1] and isolated.core.stats.preemptions == 0
    isolated.drain()


def test_blocks_that_two_victims_share_come_free_when_both_leave() -> None:
    isolated = Isolated(8, queue_policy="priority")
    prefix = list(range(100, 164))
    isolated.add(1, [*prefix, 1], max_tokens=9, priority=50)
    isolated.add(2, [*prefix, 2], max_tokens=9, priority=50)
    isolated.step()
    isolated.add(3, 120, max_tokens=3, priority=0)
    isolated.step()
    assert isolated.running() == [3]
    isolated.drain()


@pytest.mark.parametrize(("difference", "preempts"), [(9, False), (10, False), (11, True)])
def test_the_threshold_is_strict(difference: int, preempts: bool) -> None:
    isolated = running(100, 20, max_num_seqs=1, priority=difference)
    isolated.add(2, 20, max_tokens=2, priority=0)
    isolated.step()
    assert isolated.running() == ([2] if preempts else [1])
    isolated.drain()
    assert isolated.core.stats.preemptions == preempts


def test_with_a_threshold_of_zero_equals_still_never_push_each_other_out() -> None:
    isolated = running(100, 20, 20, max_num_seqs=2, priority_preemption_threshold=0)
    for request_id in (3, 4):
        isolated.add(request_id, 20, max_tokens=5, priority=50)
    isolated.drain()
    assert isolated.core.stats.preemptions == 0


@pytest.mark.parametrize("config", [{"priority_preemption_threshold": -1}, {"queue_policy": "fcfs"}])
def test_it_can_be_switched_off_and_other_queues_know_no_urgency(config: dict[str, Any]) -> None:
    isolated = Isolated(100, max_num_seqs=1, **({"queue_policy": "priority"} | config))
    isolated.add(1, 20, max_tokens=9, priority=50)
    isolated.step()
    isolated.add(2, 20, max_tokens=2, priority=0)
    isolated.drain()
    assert isolated.core.stats.preemptions == 0


def test_a_victim_does_not_push_out_others_in_turn() -> None:
    """Three levels, each more urgent than the next by more than the threshold, and one slot."""
    isolated = running(100, 20, max_num_seqs=1, priority=60)
    isolated.add(2, 20, max_tokens=20, priority=40)
    isolated.step()
    isolated.add(3, 20, max_tokens=20, priority=20)
    isolated.drain()
    assert list(isolated.finished) == [3, 2, 1]
    assert [isolated.finished[i].num_preemptions for i in (1, 2, 3)] == [1, 1, 0]


def test_nobody_else_enters_in_the_pass_that_makes_way() -> None:
    isolated = running(100, 20, 20, max_num_seqs=2)
    for request_id in (3, 4):
        isolated.add(request_id, 20, max_tokens=5, priority=0)
    isolated.step()
    assert isolated.running() == [1, 3]
    isolated.step()
    assert sorted(isolated.running()) == [3, 4]
    isolated.drain()


def test_who_was_let_in_by_age_in_this_pass_is_not_pushed_out_in_it() -> None:
    isolated = Isolated(100, queue_policy="priority", max_num_seqs=2, max_queue_age_s=0.01)
    isolated.add(1, 20, max_tokens=50, priority=0)
    isolated.step()
    isolated.core.table.limit = 1
    isolated.add(2, 20, max_tokens=5, priority=90)
    isolated.now += 50_000_000
    isolated.step()
    isolated.add(3, 20, max_tokens=5, priority=0)
    isolated.core.table.limit = 2
    assert set(isolated.step()) == {1, 2}
    assert set(isolated.step()) == {1, 3}, "one pass later it is a running request like any other"
    isolated.drain()
    assert isolated.tokens[2] == solo_tokens(2, 20, 5)


def test_all_the_same_under_swap() -> None:
    limit = limits(12, host_blocks=12)
    isolated = running(12, 60, 60, 60, recovery_policy="swap", limit=limit)
    isolated.add(4, 100, max_tokens=3, priority=0)
    isolated.step()
    assert isolated.running() == [1, 4]
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 60, 100) for i in (1, 2, 3)} | {4: solo_tokens(4, 100, 3)}


@pytest.mark.parametrize("recovery", ["recompute", "swap"])
def test_urgent_arrivals_spare_who_has_been_a_victim_often_enough(recovery: str) -> None:
    isolated = Isolated(
        64,
        queue_policy="priority",
        max_num_seqs=1,
        max_preemptions=3,
        recovery_policy=recovery,
        limit=limits(64, host_blocks=64),
    )
    isolated.add(1, 20, max_tokens=60, priority=100)
    for urgent in range(2, 22):
        for _ in range(5):
            isolated.step()
        isolated.add(urgent, 8, max_tokens=2, priority=0)
    isolated.drain()
    assert isolated.finished[1].num_preemptions == 3
    assert isolated.tokens[1] == solo_tokens(1, 20, 60)


def test_a_spared_head_that_could_not_stay_to_its_end_pushes_nobody_out() -> None:
    isolated = Isolated(10, queue_policy="priority", max_num_seqs=2, max_preemptions=1)
    isolated.add(1, 20, max_tokens=100, priority=0)
    isolated.add(2, 20, max_tokens=60, priority=50)
    isolated.step()
    for request in isolated.core.table.requests():
        request.num_preemptions = 1
    isolated.preempt(1)
    isolated.add(3, 20, max_tokens=2, priority=50)
    isolated.step()
    assert isolated.running() == [2, 3] and isolated.core.stats.preemptions == 1
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 100)
    assert isolated.core.stats.preemptions == 1


def test_making_way_for_an_urgent_arrival_is_no_retraction() -> None:
    isolated = Isolated(64, queue_policy="priority", admission_policy="predictive", max_num_seqs=2)
    isolated.add(1, 20, max_tokens=100, priority=50)
    isolated.add(2, 20, max_tokens=100, priority=50)
    for _ in range(30):
        isolated.step()
    before = isolated.core.strategies.admission.ratio
    isolated.add(3, 20, max_tokens=2, priority=0)
    isolated.step()
    after = isolated.core.strategies.admission.ratio
    assert isolated.core.stats.preemptions == 1
    assert before is not None and after is not None and after <= before
    isolated.drain()
