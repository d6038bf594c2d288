"""What an API process concludes about the scheduler's queue from what it has sent and heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protocol.messages import SchedulerStatus
from services.chain import Chain
from services.door import NEWS_S, Door

LIMIT, SLOTS = 4, 2


class Told:
    """A door whose scheduler says what a test lets it say, at a time that the test sets."""

    def __init__(self, **levels: Any) -> None:
        self.now = 100.0
        self.chain = SimpleNamespace(connected=True, limits=SimpleNamespace(max_num_seqs=SLOTS), status=None)
        self.door = Door(cast(Chain, self.chain), lambda: self.now)
        self.say(**levels)

    def say(self, **levels: Any) -> None:
        self.chain.status = SchedulerStatus(1, "ready", 0, 0, 0.0, **{"queue_limit": LIMIT, **levels})
        self.door.hear(self.chain.status)

    def submit(self, *ids: int, priority: int = 0) -> None:
        for request_id in ids:
            self.door.enter(request_id, priority)

    @property
    def full(self) -> bool:
        return self.door.refusal() is not None


def test_nothing_is_known_before_the_first_report() -> None:
    told = Told()
    told.chain.status = None
    told.submit(*range(99))
    assert not told.full


def test_submissions_fill_a_batch_and_the_queue() -> None:
    told = Told()
    told.submit(*range(LIMIT + SLOTS - 1))
    assert not told.full
    told.submit(98)
    assert told.full
    told.door.leave(98)
    assert not told.full


def test_a_report_counts_what_others_have_sent() -> None:
    told = Told(queued=LIMIT - 1)
    told.submit(*range(SLOTS))
    assert not told.full
    told.submit(98)
    assert told.full


def test_a_request_that_left_the_queue_before_a_report_without_a_token_is_not_counted_after_it() -> None:
    """It may have been preempted, and wait again without a place in the bounded queue."""
    told = Told()
    told.submit(*range(LIMIT + SLOTS))
    assert told.full
    told.say(queued=LIMIT - 1)
    assert not told.full


@pytest.mark.parametrize("how", ["report", "refusal"])
def test_what_the_scheduler_said_last_counts_until_something_changes_or_it_is_old(how: str) -> None:
    told = Told()
    told.submit(1)

    def fill() -> None:
        if how == "report":
            told.say(queued=LIMIT)
        else:
            told.door.close(1)
        assert told.full

    fill()
    told.door.leave(1)
    assert not told.full, "a place may be free"
    fill()
    told.now += NEWS_S
    assert not told.full, "a scheduler that hangs refuses nobody by what it once said"
    fill()
    told.say(queued=LIMIT - 1)
    assert not told.full
    fill()
    told.chain.connected = False
    assert not told.full, "the next scheduler may have room"


def test_the_end_of_a_request_that_ran_makes_room_too() -> None:
    told = Told(queued=LIMIT)
    told.submit(1)
    told.door.leave(1)
    told.door.close(1)
    told.door.leave(1)
    assert not told.full


def test_urgency_counts_against_the_least_urgent_that_is_known_to_wait() -> None:
    told = Told(displaces=True, queued=LIMIT, least_urgent=3)

    def refuses(priority: int) -> bool:
        return told.door.refusal(priority) is not None

    assert not told.full, "an urgent one would get in"
    assert (refuses(2), refuses(3)) == (False, True)
    told.submit(1, 2, priority=7)
    assert (refuses(6), refuses(7)) == (False, True)
    told.door.leave(1)
    told.door.close(1)
    assert (refuses(6), refuses(7)) == (False, True), "another with that priority waits"
    told.door.leave(2)
    told.door.close(1)
    assert (refuses(2), refuses(6)) == (False, True)
    told.say(displaces=False, queued=LIMIT, least_urgent=3)
    assert refuses(-99) and told.full


def test_a_queue_without_a_limit_is_never_full() -> None:
    told = Told(queue_limit=0, queued=99)
    told.submit(*range(99))
    assert not told.full


def test_clients_are_told_to_wait_as_long_as_the_scheduler_said_last() -> None:
    told = Told(queued=LIMIT)

    def retry_after() -> str:
        refusal = told.door.refusal()
        assert refusal is not None
        return refusal.headers["Retry-After"]

    assert retry_after() == "1"
    told.door.close(7)
    assert retry_after() == "7"
    told.door.close(0)
    assert retry_after() == "1"


def test_several_replicas_take_a_batch_each_and_one_full_queue_is_not_all() -> None:
    told = Told(replicas=2, replicas_up=2)
    told.submit(*range(LIMIT + 2 * SLOTS - 1))
    told.door.close(3)
    assert not told.full
    told.submit(98)
    assert told.full
    told.say(replicas=2, replicas_up=2, queued=LIMIT)
    assert told.full, "what all of them report together counts"
