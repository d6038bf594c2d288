"""The on-time queue: which of those who wait can still be on time."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import RequestStatus, SamplingParams
from scheduler.policies.on_time import Job, OnTime, feasible
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
    assert [request.id for request in queue.overdue(now)] == [1]
    assert [request.id for request in queue.fresh(now)] == [2]
    assert [request.id for request in queue.overdue(int(7.5 * SECOND))] == [1, 2]


def test_without_an_objective_it_is_first_come_first_served() -> None:
    queue = queue_of(waiter(1, 0.0), waiter(2, 1.0), ttft_s=0.0)
    assert [request.id for request in queue.ordered(None)] == [1, 2]  # type: ignore[arg-type]
