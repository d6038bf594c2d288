"""The computing thread: takes what the link hands over, in order, runs the steps, and counts them.

`PipelinedLoop` is for a device that computes beside the host: the next step is launched while this one runs.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from protocol.messages import StepResult
from runner.executor import Executor, Launched, PipelinedExecutor
from runner.link import Grant, Item, SchedulerLink, Transfer, Work
from runner.metrics import RunnerMetrics
from runner.step_log import StepLog
from runner.watch import StepWatch

log = logging.getLogger("triptych.runner")

POLL_S = 0.0001
"""How long to wait for the next step before asking again whether the one that runs has ended."""


class Loop:
    """Takes what the link hands over, in order: steps are executed, a new scheduler gets a clean batch."""

    def __init__(
        self,
        link: SchedulerLink,
        executor: Executor,
        metrics: RunnerMetrics,
        log_interval_s: float,
        steps: StepLog | None = None,
        *,
        watch: StepWatch | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._link = link
        self._executor = executor
        self._metrics = metrics
        self._steps = steps
        self._watch = watch
        self._log_interval_s = log_interval_s
        self._clock_ns = clock_ns
        self._last_log_ns = self._idle_since_ns = clock_ns()

    def run(self) -> None:
        """Until the link ends."""
        while (item := self._link.next()) is not None:
            self.do(item)

    def do(self, item: Item) -> None:
        """One thing, unless the scheduler that sent it holds the runner no more."""
        if not self._link.is_current(item):
            return
        if isinstance(item, Grant):
            self._executor.clear()
            self._link.grant(item, self._executor.inventory.export())
        elif isinstance(item, Transfer):
            self._executor.transfer(item.order, item.status)
        else:
            self._execute(item)

    def _execute(self, work: Work) -> None:
        started = self._clock_ns()
        self._link.busy_since_ns = time.time_ns()
        result = self._executor.execute(work.step, work.received_ns)
        self._link.busy_since_ns = 0
        self._report(work, result, started)

    def _report(self, work: Work, result: StepResult, started: int) -> None:
        """The step, which the computing thread took up at `started`, is over: say so, and count it."""
        ended = self._clock_ns()
        began = max(started, self._idle_since_ns)
        if self._watch is not None:
            self._watch.slowest_s = max(self._watch.slowest_s, (ended - began) / 1e9)
        result = msgspec.structs.replace(
            result,
            queue_ns=began - work.received_ns,
            execute_ns=ended - began,
            idle_ns=max(0, min(work.received_ns, started) - self._idle_since_ns),
        )
        self._link.reply(work, result)
        self._idle_since_ns = ended
        self._observe(work, result, ended)

    def _observe(self, work: Work, result: StepResult, ended_ns: int) -> None:
        try:
            if self._steps is not None and result.failure is None:
                self._steps.add(self._executor.step_size, result, ended_ns)
            self._metrics.step_done(work.step, result, self._executor.num_residents, len(self._executor.inventory))
            seconds = (ended_ns - self._last_log_ns) / 1e9
            if self._log_interval_s and seconds >= self._log_interval_s:
                self._metrics.log_line(seconds)
                self._last_log_ns = ended_ns
        except Exception:
            log.exception("metrics of step %d", work.step.step_id)  # counting must never end computing


@dataclass(frozen=True, slots=True)
class _UnderWay:
    work: Work
    launched: Launched
    started_ns: int


class PipelinedLoop(Loop):
    """`Loop` over a `PipelinedExecutor`. Results leave in the order of the steps, each as soon as it is there."""

    _executor: PipelinedExecutor

    def run(self) -> None:
        """Until the link ends or the device is lost; what is under way is finished."""
        self._under_way: deque[_UnderWay] = deque()
        while not self._executor.lost:
            try:
                item = self._link.next(POLL_S if self._under_way else None)
            except queue.Empty:
                self._collect(ready_only=True)
                continue
            if item is None:
                break
            self.do(item)
            self._collect(ready_only=True)
        self._collect()

    def do(self, item: Item) -> None:
        """One thing. What is not a step comes after all steps before it."""
        if not isinstance(item, Work):
            self._collect()
        while len(self._under_way) >= self._executor.depth:
            self._collect_one()
        super().do(item)

    def _execute(self, work: Work) -> None:
        started = self._clock_ns()
        if not self._under_way:
            self._link.busy_since_ns = time.time_ns()
        self._under_way.append(_UnderWay(work, self._executor.launch(work.step, work.received_ns), started))

    def _collect(self, *, ready_only: bool = False) -> None:
        while self._under_way and (self._under_way[0].launched.ready or not ready_only):
            self._collect_one()

    def _collect_one(self) -> None:
        oldest = self._under_way.popleft()
        result: StepResult = self._executor.collect(oldest.launched)
        self._link.busy_since_ns = time.time_ns() if self._under_way else 0
        self._report(oldest.work, result, oldest.started_ns)


def loop_for(executor: Executor) -> type[Loop]:
    """The loop that suits this executor."""
    return PipelinedLoop if isinstance(executor, PipelinedExecutor) else Loop
