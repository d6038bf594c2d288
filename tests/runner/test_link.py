"""The scheduler link over real sockets: who is welcome, what is fenced, in which order steps run, what a fault does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from protocol import wire
from protocol.channels import AddressError, ClientChannel, new_instance
from protocol.columns import i32
from protocol.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Refused,
    RunnerToScheduler,
    Step,
    StepFailure,
    StepResult,
    Welcome,
)
from runner.executor import Executor
from runner.inventory import Inventory
from runner.link import SchedulerLink
from runner.main import Loop
from runner.metrics import RunnerMetrics
from tests.runner.kit import new, random_hash, sim, step, tokens_of

DEADLINE_S = 20.0
KEY = b"k" * 32


class Scheduler:
    """A bare scheduler's end of the link."""

    def __init__(self, address: str, *, takeover: bool = False, epoch: int = 0, role: str = "scheduler") -> None:
        self.instance = new_instance()
        self._context: zmq.Context[Any] = zmq.Context()
        self.channel: ClientChannel[Any] = ClientChannel(
            self._context,
            address,
            RunnerToScheduler,
            lambda: Hello(role, wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, self.instance, epoch, takeover),
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
        self._thread = threading.Thread(target=Loop(self.link, executor, self.metrics, 0.0).run)
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


@pytest.fixture
def connect() -> Iterator[Callable[..., Scheduler]]:
    made: list[Scheduler] = []

    def make(runner: Running, **options: Any) -> Scheduler:
        made.append(Scheduler(runner.link.address, **options))
        return made[-1]

    yield make
    for scheduler in made:
        if not scheduler.channel.socket.closed:
            scheduler.close()


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


def test_a_scheduler_is_welcomed_with_limits_key_and_a_growing_epoch(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir, wall_ms=lambda: 1000) as runner:
        first = connect(runner)
        welcome = first.welcome()
        assert welcome.limits == runner.executor.limits and welcome.hash_key == KEY and welcome.epoch == 1000
        first.channel.leave(Goodbye("shutdown"))
        second = connect(runner).welcome()
        assert second.epoch == 1001 and second.hash_key == KEY and second.instance == welcome.instance
        first.close()


def test_an_epoch_is_larger_than_any_the_scheduler_has_seen(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir, wall_ms=lambda: 1000) as runner:
        assert connect(runner, epoch=10**15).welcome().epoch == 10**15 + 1


def test_steps_run_in_order_and_results_carry_timings(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(arrival(1, epoch))
        for number in range(2, 6):
            scheduler.channel.send(step(number, {1: 1}, epoch=epoch))
        results = [scheduler.result() for _ in range(5)]
        assert [result.step_id for result in results] == [1, 2, 3, 4, 5]
        assert [i32(result.positions).tolist() for result in results] == [[3], [4], [5], [6], [7]]
        assert all(result.execute_ns > 0 and result.queue_ns >= 0 for result in results)
        assert results[0].idle_ns > 0


def test_a_rival_is_refused_while_the_holder_lives_and_welcomed_when_it_has_gone(
    runtime_dir: Path, connect: Connect
) -> None:
    with running(sim(), runtime_dir) as runner:
        holder = connect(runner)
        epoch = holder.welcome().epoch
        rival = connect(runner)
        refusal = rival.wait_for(Refused)
        assert refusal.code == wire.OCCUPIED and holder.instance in refusal.message
        holder.channel.send(arrival(1, epoch))
        assert tokens_of(holder.result())
        holder.close()
        assert rival.welcome().epoch > epoch


def test_a_holder_that_is_silent_past_its_lease_may_be_replaced(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir, lease_s=0.5) as runner:
        holder = connect(runner)
        holder.welcome()
        rival = connect(runner)
        assert rival.welcome().epoch > 0  # the holder isn't pumped: it is silent, yet connected
        assert holder.wait_for(Goodbye).code == "fenced"


def test_a_takeover_fences_the_holder_and_its_steps_no_longer_count(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        old = connect(runner)
        epoch = old.welcome().epoch
        taker = connect(runner, takeover=True)
        newer = taker.welcome().epoch
        assert newer > epoch
        goodbye = old.wait_for(Goodbye)
        assert goodbye.code == "fenced" and taker.instance in goodbye.message
        taker.channel.send(arrival(1, epoch))  # right sender, old epoch
        taker.channel.send(arrival(2, newer))
        assert taker.result().step_id == 2
        assert runner.link.stats.stale_steps == 1 and runner.link.stats.fenced == 1


def test_a_takeover_waits_for_the_steps_that_were_sent_and_their_results_reach_their_sender(
    runtime_dir: Path, connect: Connect
) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        old = connect(runner)
        epoch = old.welcome().epoch
        old.channel.send(arrival(1, epoch))
        old.channel.send(step(2, {1: 1}, epoch=epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        taker = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            taker.pump()
        old.channel.send(step(3, {1: 1}, epoch=epoch))
        while runner.link.stats.stale_steps == 0:
            old.pump()
        assert not taker.channel.connected  # no Welcome while a step of the old epoch runs
        gate.open.release(2)
        welcome = taker.welcome()
        assert [old.result().step_id, old.result().step_id] == [1, 2]
        assert old.wait_for(Goodbye).code == "fenced"
        taker.channel.send(arrival(7, welcome.epoch, request=9))
        gate.open.release()
        assert tokens_of(taker.result()).keys() == {9}
        assert gate.log == ["clear", 1, 2, "clear", 7]
        assert runner.link.stats.unsent_results == 0


def test_a_holder_that_dies_while_a_takeover_waits_makes_way_at_once(runtime_dir: Path, connect: Connect) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        old = connect(runner)
        epoch = old.welcome().epoch
        old.channel.send(arrival(1, epoch))
        old.channel.send(step(2, {1: 1}, epoch=epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        taker = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            taker.pump()
        before = runner.link.generation
        old.close()
        while runner.link.generation == before:
            taker.pump()
        gate.open.release()
        taker.welcome()
        assert gate.log == ["clear", 1, "clear"], "the queued step of a dead scheduler is not run"


def test_the_same_process_may_shake_hands_again_without_a_takeover(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(arrival(1, epoch))
        scheduler.result()
        scheduler.channel._disconnect()  # it believes that the runner fell silent
        again = scheduler.welcome()
        assert again.epoch > epoch and runner.executor.num_residents == 0
        assert runner.link.stats.fenced == 0


def test_a_hello_repeated_while_a_long_step_runs_gets_one_welcome(runtime_dir: Path, connect: Connect) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        old = connect(runner)
        old.channel.send(arrival(1, old.welcome().epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        taker = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            taker.pump()
        for _ in range(3):
            taker.channel._disconnect()
            taker.pump()
        gate.open.release()
        welcome = taker.welcome()
        taker.channel.send(arrival(2, welcome.epoch))
        gate.open.release()
        assert taker.result().step_id == 2 and runner.link.stats.grants == 2


def test_a_scheduler_waiting_for_its_welcome_is_turned_away_by_a_takeover(runtime_dir: Path, connect: Connect) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        old = connect(runner)
        old.channel.send(arrival(1, old.welcome().epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        waiting = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            waiting.pump()
        last = connect(runner, takeover=True)
        while runner.link.stats.fenced == 1:
            last.pump()
        assert waiting.wait_for(Refused).code == wire.OCCUPIED
        waiting.close()
        gate.open.release()
        assert last.welcome().epoch > 0


def test_only_schedulers_are_served(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        refusal = connect(runner, role="api").wait_for(Refused)
        assert "schedulers" in refusal.message


def test_a_new_scheduler_gets_the_inventory_and_an_empty_batch(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        first = connect(runner)
        epoch = first.welcome().epoch
        filled = {1: random_hash(1)}
        first.channel.send(step(1, {1: 6}, epoch=epoch, arrivals=[new(1, range(6), [1, 2])], filled=filled))
        first.result()
        first.close()
        second = connect(runner)
        welcome = second.welcome()
        assert i32(welcome.inventory_blocks).tolist() == [1] and welcome.inventory_hashes == filled[1]
        second.channel.send(step(1, {5: 2}, epoch=welcome.epoch, arrivals=[new(5, range(6), [1, 9], num_computed=4)]))
        assert tokens_of(second.result()).keys() == {5}


def test_a_failed_step_is_reported_and_the_next_one_runs(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(step(1, {404: 1}, epoch=epoch))
        failure = scheduler.result().failure
        assert failure is not None and failure.code == "unknown_request" and "404" in failure.message
        scheduler.channel.send(arrival(2, epoch))
        assert tokens_of(scheduler.result())


def test_an_exception_in_computing_is_a_failure_with_its_cause(
    runtime_dir: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = sim()

    def explode(*_: object) -> None:
        raise RuntimeError("the kernel gave up")

    with running(executor, runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        with monkeypatch.context() as patch:
            patch.setattr(executor, "_compute", explode)
            scheduler.channel.send(arrival(1, epoch))
            failure = scheduler.result().failure
        assert failure == StepFailure("internal_error", "RuntimeError: the kernel gave up")
        scheduler.channel.send(arrival(2, epoch))
        assert tokens_of(scheduler.result())


@pytest.mark.parametrize("junk", [b"", b"\x00", b"\xff" * 40, b"\x00" * 8 + b"\x93\xa4step\x01\x02"])
def test_bad_frames_are_counted_and_end_nothing(runtime_dir: Path, connect: Connect, junk: bytes) -> None:
    with running(sim(), runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        scheduler.channel.socket.send(junk)
        assert scheduler.wait_for(Refused).code == wire.BAD_FRAME
        scheduler.channel.send(arrival(1, epoch))
        assert tokens_of(scheduler.result())
        assert runner.metrics.registry.get_sample_value("triptych_runner_bad_frames_total") == 1


def test_heartbeats_go_on_through_a_long_step_and_say_since_when_it_runs(runtime_dir: Path, connect: Connect) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        while not scheduler.heartbeats:
            scheduler.pump()
        assert scheduler.heartbeats[-1].busy_since_ns == 0
        scheduler.channel.send(arrival(1, epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        scheduler.heartbeats.clear()
        while len(scheduler.heartbeats) < 3:
            scheduler.pump()
        since = {beat.busy_since_ns for beat in scheduler.heartbeats}
        assert len(since) == 1 and 0 < since.pop() <= scheduler.heartbeats[0].sent_ns
        gate.open.release()
        scheduler.result()


def test_a_result_that_cannot_be_encoded_becomes_a_failure(
    runtime_dir: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = sim()
    with running(executor, runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        unsendable = msgspec.structs.replace(StepResult(epoch, 1), tokens=object())
        with monkeypatch.context() as patch:
            patch.setattr(executor, "execute", lambda one, received: unsendable)
            scheduler.channel.send(arrival(1, epoch))
            failure = scheduler.result().failure
        assert failure is not None and failure.code == "unsendable_result"


def test_stopping_says_goodbye_and_frees_the_address(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        scheduler = connect(runner)
        scheduler.welcome()
        with pytest.raises(AddressError, match="another live process"):
            SchedulerLink(runner.context, runner.link.channel.address, runner.executor.limits, hash_key=KEY)
    assert scheduler.wait_for(Goodbye).code == "shutdown"
    assert not (runtime_dir / "runner.sock").exists()
    with running(sim(), runtime_dir) as runner:
        assert connect(runner).welcome().epoch


def test_metrics_count_what_was_done(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(arrival(1, epoch))
        scheduler.channel.send(step(2, {1: 1}, epoch=epoch))
        scheduler.channel.send(step(3, {404: 1}, epoch=epoch))
        for _ in range(3):
            scheduler.result()

        def value(name: str, **labels: str) -> float | None:
            return runner.metrics.registry.get_sample_value(f"triptych_runner_{name}", labels or None)

        # The third step's numbers are entered after its result was sent.
        end = time.monotonic() + DEADLINE_S
        while value("steps_total") != 3 and time.monotonic() < end:
            scheduler.pump()
        assert value("steps_total") == 3 and value("step_seconds_count") == 3
        assert value("failed_steps_total", code="unknown_request") == 1
        assert value("tokens_computed_total") == 4 and value("tokens_sampled_total") == 2
        assert value("kv_blocks") == 63 and value("scheduler_grants_total") == 1
