"""What an experiment is: a question, replays that differ in what it asks about, figures and plots. Only data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ops.replay.engine import Observer
from ops.replay.workload import Workload
from protocol.trace import TraceLine

ROOT = Path(__file__).resolve().parents[3]
TRACES = ROOT / "tests" / "data" / "traces"
VLLM = ROOT / "tests" / "data" / "golden" / "vllm_replay.json.gz"
"""What vLLM's own scheduler did on the recorded traces."""


class Watcher(Observer, Protocol):
    """An observer of one run with something to tell at its end."""

    def figures(self) -> dict[str, float]:
        """Figures for the table, by their names in `figures.FIGURES`."""

    def pairs(self) -> list[tuple[float, float]]:
        """Pairs for a plot of `kind` "pairs"."""


@dataclass(frozen=True, slots=True)
class Made:
    """A trace that is made up. `lines(n)` makes it with about n requests; the same every time."""

    name: str
    requests: int
    lines: Callable[[int], Sequence[TraceLine]]


@dataclass(frozen=True, slots=True)
class Run:
    """One replay. `options` are those of `triptych replay` behind the experiment's own.

    `line` and `x` place it in a plot against x. `anchor` names the recorded run of vLLM's that it is compared with.
    """

    label: str
    options: str = ""
    trace: Made | str | None = None
    line: str = ""
    x: float = 0.0
    anchor: str = ""
    watch: Callable[[Workload], Watcher] | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture. `figures` of the runs against their x (or beside each other), or `figures` of the report's series
    over time; "pairs" shows what watchers saw, predicted against real."""

    kind: Literal["against", "bars", "time", "pairs"]
    title: str
    figures: tuple[str, ...] = ()
    x: str = ""
    y: str = ""


@dataclass(frozen=True, slots=True)
class Experiment:
    """`trace` and `options` are those of all runs; `columns` are the table's figures.

    A short form shows the direction: of the runs only those labelled in `quick_runs` (all if it is empty), the options
    `quick` added, made traces of about `quick_requests`.
    """

    name: str
    title: str
    asks: str
    runs: tuple[Run, ...]
    columns: tuple[str, ...]
    plots: tuple[Plot, ...]
    teaches: str
    trace: Made | str = ""
    options: str = ""
    quick: str = ""
    quick_requests: int = 100
    quick_runs: tuple[str, ...] = ()
