"""Executors over several ranks: the first tells the others what it is about to do, then does it; the others follow.

Nothing is computed here. The order of the calls is the same on every rank, and so is all that follows from it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from protocol.messages import FetchKv, KvStatus, Step, StepResult
from runner.errands import Answer, Errand, Promise
from runner.executor import Executor, PipelinedExecutor
from runner.parallel.group import Group
from runner.parallel.messages import AnyOrder, Clear, End, Moved, Run, decode, encode
from runner.steps import StepSize


class Others(Protocol):
    """The other ranks' processes, as whoever started them knows them."""

    def expect_end(self) -> None:
        """From now on it is no loss when one ends."""
        ...

    def wait_ended(self) -> None:
        """Wait until those that the first rank has started have ended."""
        ...


class ParallelExecutor:
    """The first rank's `Executor`, around its own."""

    def __init__(self, executor: Executor, group: Group, others: Others) -> None:
        self.limits = executor.limits
        self.inventory = executor.inventory
        self.weight_bytes = executor.weight_bytes
        self._executor = executor
        self._group = group
        self._others = others
        self._collected = 0

    @property
    def num_residents(self) -> int:
        """Requests in the batch."""
        return self._executor.num_residents

    @property
    def step_size(self) -> StepSize:
        """Of the step that ran last."""
        return self._executor.step_size

    def execute(self, step: Step, received_ns: int) -> StepResult:
        """Run one step on all ranks."""
        self._tell(Run(step=step, collected=self._take_collected()))
        return self._executor.execute(step, received_ns)

    def answer(self, errand: Errand) -> Answer | Promise | None:
        """This rank's own answer; the others are not asked."""
        return self._executor.answer(errand)

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        """A KV transfer has begun or ended, for the pages of all ranks."""
        self._tell(Moved(order=order, status=status, collected=self._take_collected()))
        self._executor.transfer(order, status)

    def clear(self) -> None:
        """A new scheduler took over."""
        self._tell(Clear(collected=self._take_collected()))
        self._executor.clear()

    def close(self) -> None:
        """End all ranks in order. Nothing can be run afterwards."""
        self._tell(End(collected=self._take_collected()))
        self._others.expect_end()
        self._group.close()
        self._others.wait_ended()

    def _tell(self, order: AnyOrder) -> None:
        self._group.broadcast(encode(order))

    def _take_collected(self) -> int:
        collected, self._collected = self._collected, 0
        return collected


class PipelinedParallelExecutor(ParallelExecutor):
    """The same around a `PipelinedExecutor`. The others collect a step just before the next thing that they do."""

    _executor: PipelinedExecutor

    def __init__(self, executor: PipelinedExecutor, group: Group, others: Others) -> None:
        super().__init__(executor, group, others)
        self.depth = executor.depth

    @property
    def lost(self) -> bool:
        """Whether the device has failed for good."""
        return self._executor.lost

    def execute(self, step: Step, received_ns: int) -> StepResult:
        """Run one step to its end on all ranks."""
        return self.collect(self.launch(step, received_ns))

    def launch(self, step: Step, received_ns: int) -> Any:
        """Issue a step on all ranks."""
        self._tell(Run(step=step, collected=self._take_collected()))
        return self._executor.launch(step, received_ns)

    def collect(self, launched: Any) -> StepResult:
        """The result of a step, as this rank has it."""
        self._collected += 1
        return self._executor.collect(launched)


def lead(executor: Executor, group: Group, others: Others) -> ParallelExecutor:
    """The first rank's executor around its own `executor`, of the same kind."""
    if isinstance(executor, PipelinedExecutor):
        return PipelinedParallelExecutor(executor, group, others)
    return ParallelExecutor(executor, group, others)


def follow(executor: Executor, group: Group) -> None:
    """What every other rank does until it is told to end."""
    under_way: deque[Any] = deque()
    while True:
        order = decode(group.broadcast())
        if isinstance(executor, PipelinedExecutor):
            for _ in range(order.collected):
                executor.collect(under_way.popleft())
        if isinstance(order, Run):
            if isinstance(executor, PipelinedExecutor):
                under_way.append(executor.launch(order.step, 0))
            else:
                executor.execute(order.step, 0)
        elif isinstance(order, Moved):
            executor.transfer(order.order, order.status)
        elif isinstance(order, Clear):
            executor.clear()
        else:
            group.close()
            return
