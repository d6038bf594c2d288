"""The watch over steps that never return, turned by hand."""

from __future__ import annotations

from protocol.links import HEARTBEAT_INTERVAL_S
from runner.watch import SLOWEST_TIMES, StepWatch


class Turns:
    """What a watch has said."""

    def __init__(self, deadline_s: float) -> None:
        self.alive = self.given_up = 0
        self.watch = StepWatch(deadline_s, self._alive, self._give_up)

    def _alive(self) -> None:
        self.alive += 1

    def _give_up(self) -> None:
        self.given_up += 1

    def turn(self, seconds: float, step: int) -> None:
        for _ in range(int(seconds / HEARTBEAT_INTERVAL_S)):
            self.watch.turn(step)


def test_an_idle_runner_and_one_with_short_steps_are_alive_for_ever() -> None:
    turns = Turns(5.0)
    turns.turn(100, 0)
    for step in range(1, 20):
        turns.turn(4, step)
    assert turns.given_up == 0 and turns.alive == 352


def test_a_step_over_the_deadline_gives_up_and_is_no_sign_of_life() -> None:
    turns = Turns(5.0)
    turns.turn(5.5, 1)
    assert (turns.alive, turns.given_up) == (11, 0)
    turns.turn(0.5, 1)
    assert (turns.alive, turns.given_up) == (11, 1)


def test_ten_times_the_slowest_step_is_allowed() -> None:
    turns = Turns(5.0)
    turns.watch.slowest_s = 3.0
    turns.turn(3.0 * SLOWEST_TIMES + 0.5, 1)
    assert turns.given_up == 0
    turns.turn(0.5, 1)
    assert turns.given_up == 1


def test_without_a_deadline_nothing_is_overdue() -> None:
    turns = Turns(0.0)
    turns.turn(10_000, 1)
    assert turns.given_up == 0
