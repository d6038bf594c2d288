"""When recorded steps ran on the device: a device that marks each replay, an executor that times each launch.

From both comes for how long the device waited between steps: the gap between two replays, less what the device does
there itself (sampling, and the copies that the next step needs).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from protocol.messages import FetchKv, KvStatus, Limits, Step, StepResult
from runner.cuda.device import CudaDevice, Device, Graph, HostDevice, Mark
from runner.cuda.executor import DeviceExecutor
from runner.errands import Answer, Errand, Promise
from runner.inventory import Inventory
from runner.steps import StepSize

SLEEP_CYCLES = 100_000_000  # about 50 ms: longer than the host takes to launch two steps


class MarkedGraph:
    """A graph whose replays leave marks on both sides."""

    def __init__(self, graph: Graph, device: Device, marks: list[tuple[Mark, Mark]]) -> None:
        self._graph, self._device, self._marks = graph, device, marks

    def replay(self) -> None:
        began = self._device.mark()
        self._graph.replay()
        self._marks.append((began, self._device.mark()))


class MarkedCuda(CudaDevice):
    """A GPU that knows when its graphs ran."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.marks: list[tuple[Mark, Mark]] = []

    def capture(self, run: Callable[[], object]) -> Graph:
        return MarkedGraph(super().capture(run), self, self.marks)

    def hold_up(self) -> None:
        """Make the device do nothing for a while, so that the host gets ahead of it."""
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]


class MarkedHost(HostDevice):
    """The CPU in a GPU's place."""

    def __init__(self) -> None:
        super().__init__(patience=0)
        self.marks: list[tuple[Mark, Mark]] = []

    def capture(self, run: Callable[[], object]) -> Graph:
        return MarkedGraph(super().capture(run), self, self.marks)

    def hold_up(self) -> None:
        """Nothing gets ahead of the CPU."""


MarkedDevice = MarkedCuda | MarkedHost


@dataclass(frozen=True, slots=True)
class Replayed:
    """A launched step that was replayed: the rows it was asked for, which mark, and the host's seconds to launch it."""

    rows: int
    mark: int
    launch_s: float


class TimedExecutor:
    """A `PipelinedExecutor` around another, on a marked device."""

    def __init__(
        self, inner: DeviceExecutor, device: MarkedDevice, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._inner, self._device, self._clock = inner, device, clock
        self.limits: Limits = inner.limits
        self.inventory: Inventory = inner.inventory
        self.weight_bytes = inner.weight_bytes
        self.depth = inner.depth
        self.steps: list[Replayed] = []

    @property
    def lost(self) -> bool:
        return self._inner.lost

    @property
    def num_residents(self) -> int:
        return self._inner.num_residents

    @property
    def step_size(self) -> StepSize:
        return self._inner.step_size

    def launch(self, step: Step, received_ns: int) -> Any:
        marks, began = len(self._device.marks), self._clock()
        launched = self._inner.launch(step, received_ns)
        if len(self._device.marks) > marks:
            self.steps.append(Replayed(len(step.ids) >> 3, marks, self._clock() - began))
        return launched

    def collect(self, launched: Any) -> StepResult:
        return self._inner.collect(launched)

    def execute(self, step: Step, received_ns: int) -> StepResult:
        return self.collect(self.launch(step, received_ns))

    def answer(self, errand: Errand) -> Answer | Promise | None:
        return self._inner.answer(errand)

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        self._inner.transfer(order, status)

    def clear(self) -> None:
        self._inner.clear()


@dataclass(frozen=True, slots=True)
class Steady:
    """Decode steps of one size, one after the other. All in seconds, means but for `launch`, which is the median."""

    steps: int
    period: float
    gap: float
    """From the end of a replay to the beginning of the next."""
    launch: float
    """The host's time to launch a step."""

    def idle(self, unavoidable: float) -> float:
        """The part of the period for which the device waited: the gap, less what it does itself in a gap."""
        return max(0.0, self.gap - unavoidable) / self.period if self.period else 0.0


def steady(steps: Sequence[Replayed], spans: Sequence[tuple[float, float]], rows: int, settle: int = 8) -> Steady:
    """From the replays' (began, ended) in seconds: those of `rows` rows that follow another such, less the first few.

    ValueError if there are none.
    """
    runs: list[list[Replayed]] = []
    for before, after in zip([None, *steps], steps, strict=False):
        if after.rows == rows:
            if before is None or before.rows != rows or after.mark != before.mark + 1:
                runs.append([])
            runs[-1].append(after)
    pairs = [pair for run in runs for pair in zip(run[settle:], run[settle + 1 :], strict=False)]
    if not pairs:
        raise ValueError(f"no two recorded steps of {rows} rows followed one another")
    gaps = [spans[after.mark][0] - spans[before.mark][1] for before, after in pairs]
    periods = [spans[after.mark][0] - spans[before.mark][0] for before, after in pairs]
    return Steady(len(pairs), fmean(periods), fmean(gaps), median(after.launch_s for _, after in pairs))


def spans_of(marks: Sequence[tuple[Mark, Mark]]) -> list[tuple[float, float]]:
    """(began, ended) of each replay, in seconds from the first one's beginning. Waits for the last."""
    if not marks:
        return []
    origin, last = marks[0][0], marks[-1][1]
    last.synchronize()
    return [(origin.elapsed_time(began) / 1e3, origin.elapsed_time(ended) / 1e3) for began, ended in marks]
