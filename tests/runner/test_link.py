"""The scheduler link over real sockets: in which order steps run, what comes back, what a fault does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from protocol import wire
from protocol.channels import AddressError
from protocol.columns import i32
from protocol.messages import Goodbye, Refused, StepFailure, StepResult
from runner.link import SchedulerLink
from tests.runner.kit import sim, step, tokens_of
from tests.runner.link_kit import DEADLINE_S, KEY, Connect, Gate, arrival, connecting, running


@pytest.fixture
def connect() -> Iterator[Connect]:
    with connecting() as make:
        yield make


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
