"""Drives the serving scheduler with a workload: its own class and messages, an in-memory transport, a virtual clock.

What the three processes do between their sockets, in one loop: arrivals reach the scheduler when they come, a pass
makes a step, the simulated runner executes it, its result is applied when the step ends. Nothing here decides.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ops.replay.clock import VirtualClock
from ops.replay.workload import Workload
from protocol.columns import u64
from protocol.messages import Limits, Outputs, Step, StepResult
from runner.config import RunnerConfig
from runner.sim import SimulatedExecutor, Span
from runner.step_costs import StepCost
from scheduler.coasting import Coasting
from scheduler.config import SchedulerConfig
from scheduler.interface import Scheduler

PEER = 0
SCHEDULER_EPOCH = 1
HASH_KEY = b"triptych replay!"
IDLE_POLL_NS = 10_000_000
"""How soon a scheduler that has requests but nothing in flight is asked again, as its process would."""
NEVER_NS = 1 << 62
STUCK_NS = 3_600_000_000_000


@dataclass(frozen=True, slots=True)
class Coast:
    """Steps one behind the other in which the same rows each decode a token: `ids` [R] in step order, ends [k]."""

    ids: npt.NDArray[np.uint64]
    begin_ns: int
    ends_ns: npt.NDArray[np.int64]


class Observer(Protocol):
    """Who watches a run. Times are virtual nanoseconds."""

    def arrived(self, request: int, now_ns: int) -> None:
        """The request's message has reached the scheduler."""

    def cancelled(self, request: int, now_ns: int, *, live: bool) -> None:
        """Its client left; `live` is false where it had ended before."""

    def stepped(self, step: Step, sent_ns: int, begin_ns: int, end_ns: int) -> None:
        """A step was sent, and runs from `begin_ns` to `end_ns`."""

    def told(self, outputs: Outputs, now_ns: int) -> None:
        """What the API would have been sent."""

    def passed(self, scheduler: Scheduler, now_ns: int) -> None:
        """The scheduler has made a pass; a step that it made is reported after this."""

    def looks_ns(self) -> int:
        """The steps sent before this time may be reported together, by `coasted`; the others are reported singly."""
        return 0

    def coasted(self, run: Coast) -> None:
        """Steps have been sent, have run and are back, and this tells their outputs; who has ended is told after it."""
        raise TypeError(f"{type(self).__name__} looks at single steps")


class Observers(Observer):
    """Several who watch one run, in this order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def arrived(self, request: int, now_ns: int) -> None:
        for observer in self._observers:
            observer.arrived(request, now_ns)

    def cancelled(self, request: int, now_ns: int, *, live: bool) -> None:
        for observer in self._observers:
            observer.cancelled(request, now_ns, live=live)

    def stepped(self, step: Step, sent_ns: int, begin_ns: int, end_ns: int) -> None:
        for observer in self._observers:
            observer.stepped(step, sent_ns, begin_ns, end_ns)

    def told(self, outputs: Outputs, now_ns: int) -> None:
        for observer in self._observers:
            observer.told(outputs, now_ns)

    def passed(self, scheduler: Scheduler, now_ns: int) -> None:
        for observer in self._observers:
            observer.passed(scheduler, now_ns)

    def looks_ns(self) -> int:
        return min(observer.looks_ns() for observer in self._observers)

    def coasted(self, run: Coast) -> None:
        for observer in self._observers:
            observer.coasted(run)


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run a workload: who schedules, on what, at which cost."""

    name: str
    config: SchedulerConfig
    runner: RunnerConfig
    cost: StepCost
    scheduler_cls: type[Scheduler]


class Stuck(RuntimeError):
    """Requests are live, nothing is in flight or to come, and the scheduler schedules nothing: it would hang."""


class Engine:
    """One run. `run()` goes to the end; `boundaries()` yields at each boundary, for those who look inside."""

    def __init__(self, setup: Setup, workload: Workload, observer: Observer, *, coasts: bool = True) -> None:
        """`coasts`: make steps in which nothing happens many at a time, where scheduler and observer allow it."""
        self.clock = VirtualClock()
        self._send_clock = VirtualClock()
        self.executor = SimulatedExecutor(
            setup.runner,
            clock_ns=self._send_clock,
            sleep_until_ns=self._send_clock.sleep_until,
            cost=setup.cost,
            ends=workload.ends,
        )
        self.limits: Limits = self.executor.limits
        self.scheduler = setup.scheduler_cls(setup.config, self.limits, HASH_KEY, clock=self.clock)
        self.scheduler.epoch = SCHEDULER_EPOCH
        self._coasting = Coasting.of(self.scheduler) if coasts else None
        self._depth = setup.config.pipeline_depth
        self._workload = workload
        self._observer = observer
        self._next = 0
        self._live: set[int] = set()
        self._cancels: list[tuple[int, int]] = []
        self._flights: deque[tuple[int, StepResult]] = deque()
        self._runner_free_ns = 0

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Replay everything. `progress` is called with the number of requests that have ended."""
        ended = 0
        for _ in self.boundaries():
            if progress is not None:
                now_ended = self._next - len(self._live)
                if now_ended > ended:
                    ended = now_ended
                    progress(ended)

    def boundaries(self) -> Iterator[int]:
        """Replay, yielding the time after each event; several steps made at once are one. A result that is due comes
        first, then arrivals, then those who leave, then the pass: all of one instant before the next. Whoever came or
        left before a result was due has been heard before it."""
        scheduler, clock = self.scheduler, self.clock
        while True:
            if self._flights and self._flights[0][0] <= clock.now_ns:
                due = self._flights[0][0]
                self._arrivals(due - 1)
                clock.now_ns = due
                scheduler.update(self._flights.popleft()[1])
                self._tell()
            self._arrivals(clock.now_ns)
            if self._coast():
                yield clock.now_ns
                continue
            while len(self._flights) < self._depth:
                step = scheduler.schedule()
                self._tell()
                self._observer.passed(scheduler, clock.now_ns)
                if step is None:
                    break
                self._send(step)
            yield clock.now_ns
            if not self._wait():
                return

    def _coast(self) -> bool:
        """Make the steps up to the next event at once; false where the next step is none of them."""
        steady = self._coasting.steady() if self._coasting is not None else None
        if steady is None:
            return False
        begin = self.clock.now_ns
        span = Span(begin, self._observer.looks_ns(), self._next_outside_ns())
        seen = self.executor.foresee(steady.ids, steady.first.context, steady.most, span)
        if seen is None:
            return False
        ends = np.array(seen.ends_ns, np.int64)
        self.clock.now_ns = self._runner_free_ns = seen.ends_ns[-1]
        assert self._coasting is not None
        step = self._coasting.coast(steady, seen.tokens, np.diff(ends, prepend=begin).tolist())
        self.executor.coast(step, seen)
        self._observer.coasted(Coast(u64(steady.ids), begin, ends))
        self._tell()
        return True

    def _next_outside_ns(self) -> int:
        """When the next one comes or leaves."""
        times = [self._cancels[0][0]] if self._cancels else []
        if self._next < len(self._workload.order):
            times.append(self._workload.rows[self._workload.order[self._next]].at_ns)
        return min(times, default=NEVER_NS)

    def _wait(self) -> bool:
        """Move on to the next event; false when there is none."""
        times = []
        if self._flights:
            times.append(self._flights[0][0])
        if self._next < len(self._workload.order) and (not self._flights or len(self._flights) < self._depth):
            times.append(self._workload.rows[self._workload.order[self._next]].at_ns)
        if self._cancels and not self._flights:
            times.append(self._cancels[0][0])
        wakes = self.scheduler.wakes_ns
        if wakes is not None and not self._flights:
            times.append(wakes)
        elif self._live and not self._flights:
            times.append(self.clock.now_ns + IDLE_POLL_NS)
            if self.clock.now_ns - self._runner_free_ns > STUCK_NS and self._next == len(self._workload.order):
                raise Stuck(f"{len(self._live)} requests are live and nothing is scheduled: {sorted(self._live)[:8]}")
        if not times:
            return False
        self.clock.sleep_until(min(times))
        return True

    def _send(self, step: Step) -> None:
        orders = self.scheduler.take_orders()
        assert not orders, "a trace has neither grammars nor KV transfers"
        sent = self.clock.now_ns
        begin = max(sent, self._runner_free_ns)
        result = self.executor.execute(step, begin)
        end = self._runner_free_ns = self._send_clock.now_ns
        self._flights.append((end, msgspec.structs.replace(result, queue_ns=begin - sent, execute_ns=end - begin)))
        self._observer.stepped(step, sent, begin, end)

    def _arrivals(self, upto_ns: int) -> None:
        """Deliver, at their own times, those who have come or left up to a boundary; arrivals first where they tie."""
        rows, order, clock = self._workload.rows, self._workload.order, self.clock
        while True:
            arrival = rows[order[self._next]].at_ns if self._next < len(order) else upto_ns + 1
            cancel = self._cancels[0][0] if self._cancels else upto_ns + 1
            if min(arrival, cancel) > upto_ns:
                break
            clock.now_ns = min(arrival, cancel)
            if arrival <= cancel:
                self._arrive(order[self._next])
                self._next += 1
            else:
                self._leave(heapq.heappop(self._cancels)[1])
        clock.now_ns = upto_ns

    def _arrive(self, index: int) -> None:
        row = self._workload.rows[index]
        self._live.add(index)
        self._observer.arrived(index, row.at_ns)
        if row.cancel_ns:
            heapq.heappush(self._cancels, (row.cancel_ns, index))
        self.scheduler.add(PEER, self._workload.submit(index))
        self._tell()

    def _leave(self, index: int) -> None:
        self._observer.cancelled(index, self.clock.now_ns, live=index in self._live)
        self.scheduler.abort(PEER, (index,))
        self._tell()

    def _tell(self) -> None:
        for _, outputs in self.scheduler.take_outputs():
            for end in outputs.finished:
                self._live.discard(end.id)
            for rejection in outputs.rejected:
                self._live.discard(rejection.id)
            self._observer.told(outputs, self.clock.now_ns)
