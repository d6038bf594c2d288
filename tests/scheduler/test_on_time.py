"""The on-time queue: which of those who wait can still be on time, and what the late get."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import RequestStatus, SamplingParams
from scheduler.policies.on_time import Job, LateShare, OnTime, Turns, feasible
from scheduler.policies.queue import QueueOptions
from scheduler.request import Request

SECOND = 1_000_000_000


def waiter(number: int, at_s: float, prompt: int = 100) -> Request:
    return Request(
        id=number,
        peer=0,
        params=SamplingParams(8),
        data=bytearray(4 * prompt),
        num_prompt=prompt,
        max_total=prompt + 8,
        arrival=number,
        arrival_ns=int(at_s * SECOND),
    )


def queue_of(*waiters: Request, ttft_s: float = 2.0) -> OnTime:
    queue = OnTime(QueueOptions(slo_ttft_s=ttft_s))
    for request in waiters:
        queue.push(request)
    return queue


def all_in_time(jobs: list[Job], chosen: tuple[int, ...], start: int) -> bool:
    now = start
    for index in chosen:
        now += jobs[index].tokens
        if now > jobs[index].due_ns:
            return False
    return True


jobs_strategy = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=8)


@given(jobs_strategy, st.integers(0, 10))
def test_as_many_jobs_as_possible_are_kept_and_those_kept_end_in_time(pairs: list[tuple[int, int]], start: int) -> None:
    jobs = [Job(due, tokens) for due, tokens in sorted(pairs)]
    kept = feasible(jobs, start, 1.0)
    chosen = tuple(index for index, keep in enumerate(kept) if keep)
    assert all_in_time(jobs, chosen, start)
    for size in range(len(jobs), len(chosen), -1):
        assert not any(all_in_time(jobs, some, start) for some in combinations(range(len(jobs)), size))


def test_the_longest_is_left_out_when_not_all_can_be_on_time() -> None:
    jobs = [Job(100, 60), Job(110, 20), Job(120, 30), Job(130, 10)]
    assert feasible(jobs, 0.0, 1.0) == [True, True, True, True]
    assert feasible(jobs, 20.0, 1.0) == [False, True, True, True]


def test_late_fresh_and_resumed_are_told_apart_by_the_clock() -> None:
    old, young, back = waiter(1, 0.0), waiter(2, 5.0), waiter(3, 1.0)
    back.status = RequestStatus.PREEMPTED
    queue = queue_of(old, young)
    queue.restore(back)
    now = int(6.0 * SECOND)
    assert [request.id for request in queue.resumed()] == [3]
    assert [request.id for request in queue.late(now)] == [1]
    assert [request.id for request in queue.fresh(now)] == [2]
    assert [request.id for request in queue.late(int(7.5 * SECOND))] == [1, 2]


def test_the_share_of_the_late_grows_with_the_age_of_the_oldest_until_it_is_everything() -> None:
    share, oldest = LateShare(grace_ns=30 * SECOND, patience=1.5, most=0.9), waiter(1, 0.0)
    shares = [share.of(oldest, int(age * SECOND)) for age in (2, 10, 20, 29, 30, 100)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.05
    assert shares[3] == 0.9
    assert shares[4:] == [1.0, 1.0]


def test_the_more_urgent_the_later_and_the_steeper_the_share_grows() -> None:
    oldest = waiter(1, 0.0)
    even, late = (LateShare(grace_ns=30 * SECOND, patience=1.5, most=0.9, urgency=power) for power in (1.0, 8.0))
    ages = (5, 15, 25, 28)
    assert [even.of(oldest, age * SECOND) for age in ages] == [age / 30 for age in ages[:3]] + [0.9]
    assert late.of(oldest, 15 * SECOND) < 0.01
    assert late.of(oldest, 28 * SECOND) > 0.5
    assert late.of(oldest, 30 * SECOND) == 1.0


def test_a_share_of_each_step_is_given_as_whole_steps_of_the_same_number_of_tokens() -> None:
    turns = Turns()
    taken = []
    for _ in range(100):
        mine = turns.next(300.0, 1000)
        turns.took(1000 if mine else 0)
        taken.append(mine)
    assert sum(taken) == 30
    assert not any(first and second for first, second in pairwise(taken))


def test_what_the_late_get_beyond_their_share_counts_against_their_turn() -> None:
    turns = Turns()
    assert not turns.next(600.0, 1000)
    turns.took(400)  # nobody else wanted it
    assert not turns.next(600.0, 1000)
    assert turns.next(600.0, 1000)


def test_a_debt_lasts_no_longer_than_there_are_late_and_all_of_a_step_needs_no_debt() -> None:
    turns = Turns()
    turns.next(900.0, 1000)
    assert not turns.next(0.0, 1000)
    assert not turns.next(900.0, 1000)
    turns.took(5000)
    assert turns.next(1000.0, 1000)


def test_the_bound_is_stretched_by_the_wait_that_first_come_order_would_have_brought_and_forgets_it() -> None:
    share = LateShare(grace_ns=30 * SECOND, patience=1.5, most=0.9)
    first, second = waiter(1, 0.0, prompt=1000), waiter(2, 0.0)
    share.arrived(first)
    share.arrived(second)
    assert share.bound_ns == 30 * SECOND
    share.started(first)  # it took a hundred seconds until the second one's turn had come
    share.of(second, 100 * SECOND)
    assert share.bound_ns == 180 * SECOND
    share.of(second, 1900 * SECOND)
    assert share.bound_ns == 180 * SECOND
    share.of(second, 3900 * SECOND)
    assert share.bound_ns == 30 * SECOND


def test_without_an_objective_it_is_first_come_first_served() -> None:
    queue = queue_of(waiter(1, 0.0), waiter(2, 1.0), ttft_s=0.0)
    assert [request.id for request in queue.ordered(None)] == [1, 2]  # type: ignore[arg-type]
