"""Small worlds in every order of events and with every disturbance at each point: nothing lost, repeated or left over.

The counts are least numbers of states: an exploration that has shrunk shows nothing. `make explore` goes further.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.core import CoreScheduler
from services import journal
from services.engine import Engine
from tests.exploration.explorer import Bounds, Explored, explore, play, replay, sample, shortest
from tests.exploration.processes import Violation
from tests.exploration.scenarios import SCENARIOS

ALL_KINDS = {"abort", "again", "break", "freeze", "full", "kill", "takeover", "twice"}
long = pytest.mark.skipif(not os.environ.get("EXPLORE"), reason="takes long: make explore")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What the processes log of thousands of deaths is not worth keeping."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def report(name: str, found: Explored) -> None:
    print(f"{name}: {found}")


def test_every_order_of_events_serves_both_requests() -> None:
    found = explore(SCENARIOS["one step in flight"], Bounds())
    report("one step in flight, any order", found)
    assert found.states >= 350
    assert found.transitions >= 750
    assert found.ends >= 10


@pytest.mark.parametrize(
    ("name", "least_states"),
    [("preemption", 3200), ("chunks", 1900), ("a stopped text", 2900), ("full reservation", 4000)],
)
def test_one_disturbance_at_any_point_loses_nothing(name: str, least_states: int) -> None:
    found = explore(SCENARIOS[name], Bounds(disturbances=1, before=0))
    report(f"{name}, one disturbance", found)
    assert found.states >= least_states
    assert set(found.disturbances) == ALL_KINDS
    assert found.disturbances["kill"] >= 90


def test_the_scenarios_are_what_their_names_say() -> None:
    stats = {}
    for name, scenario in SCENARIOS.items():
        world = replay(scenario, ())
        while not world.over:
            world.do(world.choices()[0])
        assert world.scheduler is not None
        assert world.scheduler.process.core is not None
        stats[name] = world.scheduler.process.core.stats
    assert stats["preemption"].preemptions
    assert not stats["full reservation"].preemptions
    assert stats["a shared prefix"].prefix_hit_tokens == 4


@pytest.mark.parametrize("name", SCENARIOS)
def test_random_courses_with_two_disturbances_lose_nothing(name: str) -> None:
    found = sample(SCENARIOS[name], seed=1, runs=20, disturbances=2)
    report(f"{name}, two disturbances at random", found)
    assert found.ends == 20
    assert found.states >= 300
    assert sum(found.disturbances.values()) >= 20


COURSES = {
    "frames lost by a connection that broke and was made again behind the API's back": (
        "full reservation",
        *("submit first", "submit second", "freeze api", "up api1 all", "up scheduler1 all", "compute", "compute"),
        *("down scheduler1", "break api1", "reconnect api1", "down scheduler1", "up scheduler1", "compute"),
        *("down scheduler1", *["tick"] * 8, "thaw api", "down api1"),
    ),
    "a welcome lost with the connection": (
        "preemption",
        *("kill scheduler kept", "start scheduler", "notice scheduler2", "up scheduler2", "compute"),
        "break scheduler2",
    ),
    "a runner's welcome lost with the connection": (
        "full reservation",
        *("submit first", "up api1", "kill runner kept", "start runner", "notice scheduler1", "up scheduler1 all"),
        *("compute", "break scheduler1"),
    ),
    "two hellos of one API read at once": (
        "our preset",
        *("submit first", "kill scheduler kept", "start scheduler", "up api1", "down api1", "notice api1"),
        "up api1 all",
    ),
    "two hellos of a scheduler read at once by a runner that another one wants": (
        "full reservation",
        *("submit first", "takeover", "submit second", "up api1 all", "kill runner kept", "start runner"),
        *("up scheduler1", "notice scheduler2", "tick", "up scheduler2 all", "notice scheduler1", "up scheduler1 all"),
    ),
    "an heir that says hello again when the one it replaces is dead": (
        "a shared prefix",
        *("takeover", "notice scheduler2", "up scheduler2", "break scheduler2", "kill scheduler lost"),
    ),
    "an heir whose welcome finds no room": (
        "a stopped text",
        *("takeover", "notice scheduler2", "full scheduler2", "up scheduler2", "tick", "compute", "up scheduler2"),
        "down scheduler2",
    ),
}


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_a_course_that_once_ended_badly_ends_well(course: tuple[str, ...]) -> None:
    made, why = play(SCENARIOS[course[0]], course[1:])
    assert not why
    wrong = ("kill", "break", "freeze", "takeover")
    assert [c for c in made if c.startswith(wrong)] == [c for c in course[1:] if c.startswith(wrong)]


def test_the_same_choices_lead_to_the_same_state() -> None:
    course = ("submit first", "up api1", "kill scheduler kept", "start scheduler", "tick", "tick", "compute")
    made, why = play(SCENARIOS["preemption"], course)
    assert not why
    assert replay(SCENARIOS["preemption"], made).fingerprint() == replay(SCENARIOS["preemption"], made).fingerprint()


def never_resubmit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_on_welcome", lambda engine, welcome: engine.chain.update(None, welcome.limits))


def forget_what_was_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "pack_i32", lambda tokens: b"")


def go_on_as_if_the_runner_were_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoreScheduler, "reset_runner", lambda core, limits, hash_key: None)


@pytest.mark.parametrize(
    ("plant", "symptom"),
    [
        (never_resubmit, "stuck"),
        (forget_what_was_emitted, "repeated"),
        (go_on_as_if_the_runner_were_the_same, "steps in flight"),
    ],
)
def test_a_planted_fault_is_found_and_its_course_shortened(
    plant: Any, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation) as caught:
        explore(SCENARIOS["together"], Bounds(disturbances=1, before=0, kinds=("kill",)))
    course, why = shortest(SCENARIOS["together"], caught.value.course)
    assert symptom in why
    assert sum(choice.startswith("kill") for choice in course) == 1
    assert len(course) <= len(caught.value.course)


@long
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_order_of_events_in_every_scenario(name: str) -> None:
    report(f"{name}, any order", found := explore(SCENARIOS[name], Bounds()))
    assert found.states >= 350


@long
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("bounds", [Bounds(1, before=1), Bounds(1, before=0, after=1), Bounds(1, 0, early_ticks=1)])
def test_one_disturbance_in_courses_that_leave_the_calm_order(name: str, bounds: Bounds) -> None:
    report(f"{name}, one disturbance, {bounds}", found := explore(SCENARIOS[name], bounds))
    assert found.states >= 5000
    assert set(found.disturbances) == ALL_KINDS


@long
@pytest.mark.parametrize("disturbances", [2, 3])  # a request in flight at the death of four runners is given up
@pytest.mark.parametrize("name", SCENARIOS)
def test_many_random_courses(name: str, disturbances: int) -> None:
    report(f"{name}, {disturbances} at random", found := sample(SCENARIOS[name], 2, 1000, disturbances))
    assert found.ends == 1000
