"""What a GPU check found: results by phase, the table for a terminal, the exit status. Standard library only.

A *check* is right or wrong; a *goal* is a measured number that was hoped for. Only wrong checks fail the command.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
MEASURED, MET, MISSED = "measured", "goal met", "goal missed"
OUTCOMES = (OK, FAILED, SKIPPED, MEASURED, MET, MISSED)
SCHEMA = "triptych.gpu_check/1"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report. `numbers` carry their unit in their name."""

    phase: str
    name: str
    outcome: str
    detail: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"{self.outcome!r} is no outcome")


class Skipped(Exception):
    """This check can't be made here; the message says why."""


class Wrong(Exception):
    """What a check found wrong."""


@dataclass(slots=True)
class Attempt:
    """One check under way."""

    numbers: dict[str, float] = field(default_factory=dict)
    detail: str = ""

    def within(self, name: str, value: float, most: float) -> None:
        """Keep the largest `value` under this name. Wrong if it is above `most`, or no number."""
        self.numbers[name] = max(value, self.numbers.get(name, value))
        if not value <= most:
            raise Wrong(f"{name} is {value:.3g}, at most {most:.3g} was expected")

    def need(self, truth: bool, what: str) -> None:
        """Wrong, in these words, unless it is true."""
        if not truth:
            raise Wrong(what)


class Checks:
    """Where a phase puts its results, each at once. `budget_s` is what the phase may take."""

    def __init__(
        self,
        phase: str,
        emit: Callable[[Result], None],
        budget_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = phase
        self._emit = emit
        self._clock = clock
        self._ends = clock() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds that are left to this phase."""
        return self._ends - self._clock()

    @contextmanager
    def attempt(self, name: str) -> Iterator[Attempt]:
        """A check. Whatever is raised within fails it and ends there: the next one goes on."""
        attempt, began = Attempt(), self._clock()
        outcome, detail = OK, ""
        try:
            yield attempt
        except Skipped as reason:
            outcome, detail = SKIPPED, str(reason)
        except Wrong as fault:
            outcome, detail = FAILED, str(fault)
        except Exception as error:
            outcome, detail = FAILED, _where(error)
        detail = detail or attempt.detail
        self._emit(Result(self.phase, name, outcome, detail, attempt.numbers, self._clock() - began))

    def measured(self, name: str, detail: str = "", **numbers: float) -> None:
        """Numbers without a judgement."""
        self._emit(Result(self.phase, name, MEASURED, detail, numbers))

    def goal(self, name: str, value: float, wanted: float, *, most: bool = False, **numbers: float) -> None:
        """A fraction that should be at least `wanted`, or with `most` at most."""
        met = value <= wanted if most else value >= wanted
        detail = f"{value:.1%}, goal {'≤' if most else '≥'} {wanted:.0%}"
        self._emit(Result(self.phase, name, MET if met else MISSED, detail, {**numbers, "fraction": value}))


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    place = f" ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})" if last else ""
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}{place}"[:400]


def exit_status(results: Sequence[Result]) -> int:
    """1 if a check failed or nothing was checked; goals don't count."""
    return int(any(result.outcome == FAILED for result in results) or not results)


def as_json(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """The report as JSON-ready values."""
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in OUTCOMES}
    return {"schema": SCHEMA, "seconds": seconds, "counts": counts, "results": [asdict(result) for result in results]}


def table(results: Sequence[Result]) -> str:
    """The report for a terminal: a line for each result, phase by phase, then the counts."""
    lines, phase = [], ""
    width = max((len(result.name) for result in results), default=0)
    for result in results:
        if result.phase != phase:
            phase = result.phase
            lines += ["", phase]
        told = "; ".join(part for part in (result.detail, _numbers(result.numbers)) if part)
        lines.append(f"  {result.name:<{width}}  {result.outcome:<11}  {told}".rstrip())
    counts = as_json(results, 0.0)["counts"]
    lines += ["", ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing ran"]
    return "\n".join(lines).lstrip("\n")


def _numbers(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
