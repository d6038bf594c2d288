"""Every course that a small world can take: depth first, from its beginning again for each branch, no state twice.

Processes can't be copied, but they are deterministic: a branch is reached by replaying the choices that lead to it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.exploration.processes import Violation
from tests.exploration.scenarios import Scenario
from tests.exploration.world import World


@dataclass(frozen=True)
class Bounds:
    """How far to go: disturbances in one course, departures from the calm order before and after the first of them.

    A departure is any choice but the first; -1 is no bound. `most_runs` ends the exploration early (0: it doesn't).
    """

    disturbances: int = 0
    before: int = -1
    after: int = 0
    early_ticks: int = 0
    kinds: tuple[str, ...] = ()
    most_runs: int = 0


@dataclass
class Explored:
    """What an exploration has seen. `states` are different ones, `ends` courses that came to an end."""

    states: int = 0
    transitions: int = 0
    runs: int = 0
    ends: int = 0
    longest: int = 0
    disturbances: dict[str, int] = field(default_factory=dict)

    def count(self, disturbance: str) -> None:
        """One more of its kind."""
        kind = disturbance.split()[0]
        self.disturbances[kind] = self.disturbances.get(kind, 0) + 1

    def __str__(self) -> str:
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(self.disturbances.items()))
        return (
            f"{self.states} states, {self.transitions} transitions, {self.ends} ends reached, "
            f"{self.runs} runs of at most {self.longest} choices" + (f"; {what}" if what else "")
        )


@dataclass(frozen=True)
class _Left:
    """What a course may still do."""

    disturbances: int
    before: int
    after: int
    early_ticks: int


def replay(scenario: Scenario, choices: Iterable[str]) -> World:
    """The world in which these choices were made, with its books checked after each."""
    world = World(scenario)
    for choice in choices:
        world.do(choice)
        world.check()
    return world


def explore(scenario: Scenario, bounds: Bounds) -> Explored:
    """All courses within the bounds. Violation, with the choices that lead to it, at the first that ends badly."""
    return _Exploration(scenario, bounds).run()


def sample(scenario: Scenario, seed: int, runs: int, disturbances: int) -> Explored:
    """Random courses, each with this many disturbances at most and the clock running ahead now and then."""
    found, states = Explored(), set()
    for number in range(runs):
        generator, world, course = random.Random(f"{scenario.name} {seed} {number}"), World(scenario), list[str]()
        left = disturbances
        found.runs += 1
        try:
            while not world.over:
                choice = generator.choice(world.choices())
                draw = generator.random()
                if draw < 0.02:
                    choice = "tick"
                elif draw < 0.12 and left and (wrong := world.disturbances()):
                    left -= 1
                    choice = generator.choice(wrong)
                    found.count(choice)
                course.append(choice)
                world.do(choice)
                world.check()
                found.transitions += 1
                states.add(world.fingerprint())
        except Exception as error:
            raise _told(error, scenario, course) from error
        found.ends += 1
        found.longest = max(found.longest, len(course))
    found.states = len(states)
    return found


def shortest(scenario: Scenario, course: Sequence[str]) -> tuple[list[str], str]:
    """A course that ends badly, without the choices that don't matter for that, and how it ends."""
    course, why = play(scenario, course)
    assert why, "this course ends well"
    length = len(course)
    while length:
        for first in range(0, len(course), length):
            kept, end = play(scenario, course[:first] + course[first + length :])
            if end and len(kept) < len(course):
                course, why = kept, end
                break
        else:
            length //= 2
    return course, why


def play(scenario: Scenario, course: Iterable[str]) -> tuple[list[str], str]:
    """Make what is possible of these choices, then stay calm to the end. Returns what was made, and the text of the
    violation that it leads to ("": none)."""
    world, made = World(scenario), list[str]()
    try:
        for choice in course:
            if choice == "tick" or choice in (*world.choices(), *world.disturbances()):
                made.append(choice)
                world.do(choice)
                world.check()
        while not world.over:
            world.do(world.choices()[0])
            world.check()
    except Exception as error:
        return made, str(error) or type(error).__name__
    return made, ""


def _told(error: Exception, scenario: Scenario, course: list[str]) -> Violation:
    what = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
    told = Violation(f"{what}\nto see it again: replay(SCENARIOS[{scenario.name!r}], {course})")
    told.course = course
    return told


class _Exploration:
    def __init__(self, scenario: Scenario, bounds: Bounds) -> None:
        self.scenario = scenario
        self.bounds = bounds
        self.seen: set[tuple[bytes, _Left]] = set()
        self.states: set[bytes] = set()
        self.found = Explored()
        left = _Left(bounds.disturbances, bounds.before, bounds.after, bounds.early_ticks)
        self.branches: list[tuple[tuple[str, ...], _Left]] = [((), left)]

    def run(self) -> Explored:
        while self.branches and not 0 < self.bounds.most_runs <= self.found.runs:
            self._follow(*self.branches.pop())
        self.found.states = len(self.states)
        return self.found

    def _follow(self, prefix: tuple[str, ...], left: _Left) -> None:
        """Replay the prefix, then go on in the calm order until an end or a state that was seen."""
        self.found.runs += 1
        world, course = World(self.scenario), list(prefix)
        try:
            for choice in prefix:
                world.do(choice)
            while self._is_new(world, left):
                world.check()
                if world.over:
                    self.found.ends += 1
                    break
                choices = world.choices()
                self._branch(world, tuple(course), choices, left)
                course.append(choices[0])
                world.do(choices[0])
                self.found.transitions += 1
        except Exception as error:
            raise _told(error, self.scenario, course) from error
        self.found.longest = max(self.found.longest, len(course))

    def _is_new(self, world: World, left: _Left) -> bool:
        state = world.fingerprint()
        self.states.add(state)
        new = (state, left) not in self.seen
        self.seen.add((state, left))
        return new

    def _branch(self, world: World, course: tuple[str, ...], choices: list[str], left: _Left) -> None:
        calm = left.disturbances == self.bounds.disturbances
        budget = left.before if calm else left.after
        if budget:
            spent = budget - (budget > 0)
            after = _Left(left.disturbances, *((spent, left.after) if calm else (left.before, spent)), left.early_ticks)
            for choice in choices[1:]:
                self._add(course, choice, after)
        if left.early_ticks and choices[0] != "tick":
            self._add(course, "tick", _Left(left.disturbances, left.before, left.after, left.early_ticks - 1))
        if left.disturbances:
            after = _Left(left.disturbances - 1, left.before, left.after, left.early_ticks)
            for choice in world.disturbances():
                if not self.bounds.kinds or choice.startswith(self.bounds.kinds):
                    self.found.count(choice)
                    self._add(course, choice, after)

    def _add(self, course: tuple[str, ...], choice: str, left: _Left) -> None:
        self.found.transitions += 1
        self.branches.append(((*course, choice), left))
