"""A runner whose device computes beside the host, over real sockets: steps overlap, results keep their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.messages import Step, StepFailure, StepResult
from runner.steps import DEVICE_ERROR, StepSize
from tests.runner.kit import sim, step, tokens_of
from tests.runner.link_kit import DEADLINE_S, Connect, arrival, connecting, running


@pytest.fixture
def connect() -> Iterator[Connect]:
    with connecting() as make:
        yield make


class OnItsWay:
    """A launched step whose end the test decides."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self.ended = threading.Event()

    @property
    def ready(self) -> bool:
        return self.ended.is_set()


class Conveyor:
    """A `PipelinedExecutor` that notes what is launched and collected."""

    depth = 2

    def __init__(self) -> None:
        self._inner = sim()
        self.limits, self.inventory = self._inner.limits, self._inner.inventory
        self.weight_bytes = self.num_residents = 0
        self.step_size = StepSize()
        self.lost = False
        self.fails = -1
        self.log: list[str] = []
        self.launched: list[OnItsWay] = []
        self.launches = threading.Semaphore(0)

    def execute(self, one: Step, received_ns: int) -> StepResult:
        raise AssertionError("a pipelined executor is launched")

    def launch(self, one: Step, received_ns: int) -> OnItsWay:
        self.log.append(f"launch {one.step_id}")
        self.launched.append(OnItsWay(self._inner.execute(one, received_ns)))
        self.launches.release()
        return self.launched[-1]

    def collect(self, launched: OnItsWay) -> StepResult:
        assert launched.ended.wait(DEADLINE_S)
        self.log.append(f"collect {launched.result.step_id}")
        if launched.result.step_id == self.fails:
            self.lost = True
            return StepResult(launched.result.epoch, self.fails, failure=StepFailure(DEVICE_ERROR, "gone"))
        return launched.result

    def wait(self, count: int) -> None:
        """Until so many more steps have been launched."""
        for _ in range(count):
            assert self.launches.acquire(timeout=DEADLINE_S)

    def answer(self, errand: object) -> None: ...

    def transfer(self, order: object, status: object) -> None: ...

    def clear(self) -> None:
        self.log.append("clear")
        self._inner.clear()


def test_the_next_step_is_launched_while_one_runs_and_no_more_than_that(runtime_dir: Path, connect: Connect) -> None:
    belt = Conveyor()
    with running(belt, runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        for one in (arrival(1, epoch), step(2, {1: 1}, epoch=epoch), step(3, {1: 1}, epoch=epoch)):
            scheduler.channel.send(one)
        belt.wait(2)
        while runner.link.pending:
            scheduler.pump()
        assert belt.log == ["clear", "launch 1", "launch 2"]
        belt.launched[0].ended.set()
        assert tokens_of(scheduler.result()).keys() == {1}
        belt.wait(1)
        for launched in belt.launched[1:]:
            launched.ended.set()
        assert [scheduler.result().step_id for _ in range(2)] == [2, 3]
    assert belt.log[3:] == ["collect 1", "launch 3", "collect 2", "collect 3"]


def test_a_result_leaves_as_soon_as_it_is_there_without_a_further_step(runtime_dir: Path, connect: Connect) -> None:
    belt = Conveyor()
    with running(belt, runtime_dir) as runner:
        scheduler = connect(runner)
        scheduler.channel.send(arrival(1, scheduler.welcome().epoch))
        belt.wait(1)
        belt.launched[0].ended.set()
        assert scheduler.result().step_id == 1


def test_a_takeover_waits_for_what_is_under_way(runtime_dir: Path, connect: Connect) -> None:
    belt = Conveyor()
    with running(belt, runtime_dir) as runner:
        old = connect(runner)
        epoch = old.welcome().epoch
        old.channel.send(arrival(1, epoch))
        old.channel.send(step(2, {1: 1}, epoch=epoch))
        belt.wait(2)
        taker = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            taker.pump()
        assert not taker.channel.connected and belt.log[-1] == "launch 2"
        for launched in belt.launched:
            launched.ended.set()
        taker.welcome()
        assert [old.result().step_id, old.result().step_id] == [1, 2]
        assert belt.log[-3:] == ["collect 1", "collect 2", "clear"]


def test_a_lost_device_is_reported_and_ends_the_loop(runtime_dir: Path, connect: Connect) -> None:
    belt = Conveyor()
    belt.fails = 1
    with running(belt, runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(arrival(1, epoch))
        belt.wait(1)
        belt.launched[0].ended.set()
        failure = scheduler.result().failure
        assert failure is not None and failure.code == DEVICE_ERROR
        runner._thread.join(DEADLINE_S)
        assert not runner._thread.is_alive()


def test_a_stop_finishes_what_is_under_way(runtime_dir: Path, connect: Connect) -> None:
    belt = Conveyor()
    with running(belt, runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(arrival(1, epoch))
        scheduler.channel.send(step(2, {1: 1}, epoch=epoch))
        belt.wait(2)
        for launched in belt.launched:
            launched.ended.set()
    assert belt.log[-2:] == ["collect 1", "collect 2"]
