"""What the late are owed: how long they may wait, how much of a step is theirs, and who gives way to them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from protocol.messages import SamplingParams
from scheduler.policies.late import LEAST_LEFT_NS, Late, Owed, Turns
from scheduler.policies.pace import StepPace
from scheduler.request import Request

SECOND = 1_000_000_000
TOKENS_A_SECOND = 25_000
"""Of the device that a pace which has seen nothing takes for given."""
GRACE_S = 30
PATIENCE = 1.5
AHEAD = 0.1


def waiter(number: int, at_s: float, prompt: int) -> Request:
    return Request(
        id=number,
        peer=0,
        params=SamplingParams(8),
        data=bytearray(4),
        num_prompt=prompt,
        max_total=prompt + 8,
        arrival=number,
        arrival_ns=int(at_s * SECOND),
    )


class Queue:
    """Those who wait for the first time, and what is owed to the late of them."""

    def __init__(self, *, most: float = 0.9) -> None:
        self.late = Late(GRACE_S * SECOND, PATIENCE, AHEAD, most)
        self.waiting: list[Request] = []
        self._number = 0

    def add(self, at_s: float, prompt: int) -> Request:
        self._number += 1
        request = waiter(self._number, at_s, prompt)
        self.waiting.append(request)
        self.late.arrived(request)
        return request

    def take(self, request: Request) -> None:
        self.waiting.remove(request)
        self.late.left(request)

    def look(self, now_s: float) -> Owed:
        self.late.look(self.waiting, StepPace(), int(now_s * SECOND))
        return self.late.owed

    @property
    def bound_s(self) -> float:
        return self.late.bound_ns / SECOND


def test_the_bound_grows_with_the_backlog_and_forgets_it_after_half_an_hour() -> None:
    queue = Queue()
    queue.look(0)
    assert queue.bound_s == GRACE_S
    large = queue.add(1, 40 * TOKENS_A_SECOND)
    queue.look(2000)
    assert queue.bound_s == pytest.approx(GRACE_S + PATIENCE * 40, rel=0.01)
    queue.take(large)
    queue.look(2500)
    assert queue.bound_s == pytest.approx(GRACE_S + PATIENCE * 40, rel=0.01)
    queue.look(3500)
    queue.look(4500)
    assert queue.bound_s == GRACE_S


def test_while_the_backlog_grows_the_bound_is_what_it_will_be_when_those_looked_at_are_due() -> None:
    steady, growing = Queue(), Queue()
    for second in range(40):
        growing.add(second, TOKENS_A_SECOND)
        growing.look(second)
    steady.add(0, 40 * TOKENS_A_SECOND)
    steady.look(0)
    steady.look(41)  # what has been there for as long as growth is measured over doesn't grow
    growing.look(40)
    ahead_s = AHEAD * growing.bound_s
    assert growing.bound_s == pytest.approx(steady.bound_s + PATIENCE * ahead_s, rel=0.05)


def test_nothing_is_owed_to_those_who_may_wait_for_longer_than_is_looked_ahead() -> None:
    queue = Queue()
    queue.add(0, 1000)
    assert queue.look(0.8 * GRACE_S) == Owed()
    assert queue.look(GRACE_S - 0.5 * AHEAD * GRACE_S).tokens > 0


def test_the_late_are_served_evenly_up_to_when_they_are_due() -> None:
    """100,000 tokens are due in two seconds and a half; whoever is due with them is owed no more for it."""
    queue = Queue()
    for tenth in range(10):
        queue.add(tenth / 10, 10_000)
    now_s = GRACE_S - 2.5
    queue.look(now_s)
    oldest = queue.waiting[0]
    step_ns, room = 0.05 * SECOND, 2000
    bound_s = queue.bound_s
    queue.look(now_s := bound_s - 2.5)
    share = queue.late.share(oldest, int(now_s * SECOND), room, step_ns)
    fastest = max(10_000 * (tenth + 1) / (2.5 + tenth / 10) for tenth in range(10))
    assert share == pytest.approx(min(0.9, fastest * 0.05 / room), rel=0.02)


def test_the_share_is_bounded_until_the_oldest_has_waited_its_bound_and_then_it_is_everything() -> None:
    queue = Queue(most=0.5)
    oldest = queue.add(0, 1_000_000)
    queue.look(1)
    bound_s = queue.bound_s
    queue.look(bound_s - 1)
    assert queue.late.share(oldest, int((bound_s - 1) * SECOND), 2000, 0.05 * SECOND) == 0.5
    assert queue.late.share(oldest, queue.late.bound_ns, 2000, 0.05 * SECOND) == 1.0


def half_a_device_owed(queue: Queue) -> None:
    """What is due soon takes half of the device's time; what comes takes 0.4 of it in small requests, 0.4 in large."""
    queue.add(0, int(0.5 * TOKENS_A_SECOND * LEAST_LEFT_NS / SECOND))
    for second in range(60):
        queue.add(second, 12_000 if second % 2 else 8_000)
        for part in range(4):
            queue.add(second + part / 4, 2_500)
    for request in queue.waiting[1:]:
        queue.take(request)


def test_the_largest_of_those_who_come_give_way_so_that_what_is_due_fits_beside_the_rest() -> None:
    queue = Queue()
    half_a_device_owed(queue)
    queue.look(60)
    sizes = [2_500, 8_000, 12_000]
    assert queue.late.too_much(sizes, sizes, StepPace()) == [False, False, True]
    assert queue.late.too_much([12_000], [2_000], StepPace()) == [False], "most of it is in the cache"


def test_of_more_arrivals_than_are_kept_the_rate_is_told_from_those_that_are() -> None:
    """A hundred a second are half of the device, then all of it; kept are as many as come in 20 s, not in a minute."""
    queue = Queue()
    queue.add(0, int(0.5 * TOKENS_A_SECOND * LEAST_LEFT_NS / SECOND))
    for hundredth in range(6000):
        queue.take(queue.add(hundredth / 100, 150 if hundredth % 2 else 90))
    queue.look(60)
    assert queue.late.too_much([90, 150], [90, 150], StepPace()) == [False, False], "all fit beside what is owed"
    for hundredth in range(6000, 9000):
        queue.take(queue.add(hundredth / 100, 250 + 10 * (hundredth % 3)))
    queue.look(90)
    assert queue.late.too_much([250, 270], [250, 270], StepPace()) == [False, True]


def test_who_came_longer_than_a_minute_ago_says_nothing_about_who_comes() -> None:
    queue = Queue()
    half_a_device_owed(queue)
    queue.look(200)
    assert queue.late.owed.tokens > 0
    assert queue.late.too_much([12_000], [12_000], StepPace()) == [False]


def test_a_request_counts_once_however_often_it_comes_and_leaves() -> None:
    queue = Queue()
    request = queue.add(0, 40 * TOKENS_A_SECOND)
    queue.late.arrived(request)
    queue.take(request)
    queue.late.left(request)
    queue.add(1, 10 * TOKENS_A_SECOND)
    queue.look(2)
    assert queue.bound_s == pytest.approx(GRACE_S + PATIENCE * 10, rel=0.2)


def test_nobody_gives_way_where_nothing_is_owed() -> None:
    queue = Queue()
    for second in range(60):
        queue.add(second, 50_000)
    for request in list(queue.waiting):
        queue.take(request)
    queue.look(60)
    assert queue.late.too_much([1_000_000], [1_000_000], StepPace()) == [False]


def test_a_look_within_a_moment_of_the_last_changes_nothing() -> None:
    queue = Queue()
    queue.look(100)
    queue.add(0, 40 * TOKENS_A_SECOND)
    queue.look(100.1)
    assert queue.bound_s == GRACE_S
    queue.look(100.3)
    assert queue.bound_s > GRACE_S


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
