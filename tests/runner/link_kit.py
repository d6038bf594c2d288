"""Both ends of the scheduler link for tests: a runner as `runner.main` wires it, and a bare scheduler's end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from protocol import wire
from protocol.channels import ClientChannel, new_instance
from protocol.messages import Heartbeat, Hello, Limits, RunnerToScheduler, Step, StepResult, Welcome
from protocol.security import OPEN, LinkSecurity
from runner.executor import Executor
from runner.inventory import Inventory
from runner.link import SchedulerLink
from runner.loop import loop_for
from runner.metrics import RunnerMetrics
from tests.runner.kit import new, sim, step

DEADLINE_S = 60.0
KEY = b"k" * 32


class Scheduler:
    """A bare scheduler's end of the link."""

    def __init__(
        self,
        address: str,
        *,
        takeover: bool = False,
        epoch: int = 0,
        role: str = "scheduler",
        security: LinkSecurity = OPEN,
    ) -> None:
        self.instance = new_instance()
        self._context: zmq.Context[Any] = zmq.Context()
        self.channel: ClientChannel[Any] = ClientChannel(
            self._context,
            address,
            RunnerToScheduler,
            lambda: Hello(role, wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, self.instance, epoch, takeover),
            security=security,
        )
        self.heartbeats: list[Heartbeat] = []
        self._seen: list[Any] = []

    def wait_for(self, kind: type | tuple[type, ...], deadline_s: float = DEADLINE_S) -> Any:
        """The next message of that kind; others before it (refusals repeat, say) are passed over."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            while self._seen:
                message = self._seen.pop(0)
                if isinstance(message, kind):
                    return message
            self.pump()
        raise AssertionError(f"no {kind} within {deadline_s} s")

    def pump(self) -> None:
        """Tick and wait a moment for messages."""
        self.channel.tick()
        self.channel.socket.poll(50)
        for message in self.channel.receive():
            if isinstance(message, Heartbeat):
                self.heartbeats.append(message)
            self._seen.append(message)

    def welcome(self) -> Welcome:
        return self.wait_for(Welcome)  # type: ignore[no-any-return]

    def result(self) -> StepResult:
        return self.wait_for(StepResult)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Vanish, as a killed process does."""
        self.channel.socket.setsockopt(zmq.LINGER, 0)
        self.channel.close()
        self._context.term()


Connect = Callable[..., Scheduler]


class Running:
    """A runner's link and loop in this process, as `runner.main` wires them."""

    def __init__(self, executor: Executor, directory: Path, **link_options: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.executor = executor
        self._stop, self._stopped = os.pipe()
        self.link = SchedulerLink(
            self.context,
            f"ipc://{directory}/runner.sock",
            executor.limits,
            hash_key=KEY,
            stop_fd=self._stop,
            **link_options,
        )
        self.metrics = RunnerMetrics(executor.limits)
        self.metrics.watch(self.link)
        self._thread = threading.Thread(target=loop_for(executor)(self.link, executor, self.metrics, 0.0).run)
        self.link.start()
        self._thread.start()

    def stop(self) -> None:
        os.write(self._stopped, b"x")
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self.link.close()
        self.context.term()
        os.close(self._stop)
        os.close(self._stopped)


@contextmanager
def running(executor: Executor, directory: Path, **options: Any) -> Iterator[Running]:
    runner = Running(executor, directory, **options)
    try:
        yield runner
    finally:
        runner.stop()


class Gate:
    """An executor whose steps wait until they are let through; it notes what ran and what was cleared."""

    def __init__(self) -> None:
        self._inner = sim()
        self.limits: Limits = self._inner.limits
        self.inventory: Inventory = self._inner.inventory
        self.weight_bytes = 0
        self.num_residents = 0
        self.entered = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self.log: list[object] = []

    def execute(self, one: Step, received_ns: int) -> StepResult:
        self.entered.release()
        assert self.open.acquire(timeout=DEADLINE_S)
        self.log.append(one.step_id)
        return self._inner.execute(one, received_ns)

    def clear(self) -> None:
        self.log.append("clear")
        self._inner.clear()


def arrival(number: int, epoch: int, request: int = 1, page: int = 1) -> Step:
    return step(number, {request: 3}, epoch=epoch, arrivals=[new(request, [1, 2, 3], [page, page + 1])])


@contextmanager
def connecting() -> Iterator[Connect]:
    """Makes schedulers that connect to a runner; they are gone when the block ends."""
    made: list[Scheduler] = []

    def make(runner: Running, **options: Any) -> Scheduler:
        made.append(Scheduler(runner.link.address, **options))
        return made[-1]

    yield make
    for scheduler in made:
        if not scheduler.channel.socket.closed:
            scheduler.close()
