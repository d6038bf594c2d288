"""The two ends of a scheduler process, played over real sockets: a runner that executes by formula, and an API."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from prometheus_client import CollectorRegistry

from protocol import wire
from protocol.channels import ClientChannel, PeerGone, ServerChannel, new_instance
from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import (
    Abort,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Outputs,
    Refused,
    Rejected,
    SamplingParams,
    SchedulerStatus,
    SchedulerToApi,
    SchedulerToRunner,
    Step,
    Submit,
    Welcome,
)
from protocol.process import StopSignal
from scheduler.config import SchedulerConfig
from scheduler.metrics import Metrics
from scheduler.process import SchedulerProcess
from tests.scheduler.isolated import FakeRunner, default_sample, limits


class RunnerEnd:
    """Binds like a runner. `answering` False makes it take steps and say nothing."""

    def __init__(
        self,
        context: zmq.Context[Any],
        directory: Path,
        epoch: int = 1,
        limit: Limits | None = None,
        name: str = "runner",
    ) -> None:
        self.limits = limit or limits(64)
        self.epoch = epoch
        self.answering = True
        self.occupied_by = self.refuses = ""
        self.fake = FakeRunner(self.limits)
        self.hellos: list[Hello] = []
        self.goodbyes: list[Goodbye] = []
        self.steps = 0
        self.channel: ServerChannel[Any] = ServerChannel(context, f"ipc://{directory}/{name}.sock", SchedulerToRunner)

    def pump(self) -> None:
        for identity, message in self.channel.receive():
            if isinstance(message, Hello):
                self.hellos.append(message)
                if self.occupied_by and not message.takeover:
                    self.channel.refuse(identity, Refused(wire.OCCUPIED, f"held by {self.occupied_by}"))
                    continue
                if self.refuses:
                    self.channel.refuse(identity, Refused(self.refuses, "not this one"))
                    continue
                self.fake = FakeRunner(self.limits)
                welcome = Welcome("runner", 1, wire.SCHEMA_DIGEST, "r", self.epoch, self.limits, b"k" * 16)
                self.channel.welcome(identity, welcome)
            elif isinstance(message, Step):
                self.steps += 1
                if self.answering:
                    self.channel.send(identity, self.fake.execute(message))
            elif isinstance(message, Heartbeat):
                try:
                    self.channel.send(identity, Heartbeat(message.sent_ns))
                except PeerGone:
                    pass
            elif isinstance(message, Goodbye):
                self.goodbyes.append(message)
                self.channel.drop(identity)


class ApiEnd:
    """Connects like an API and keeps what it is told."""

    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.accepted: set[int] = set()
        self.rejected: dict[int, Rejected] = {}
        self.finished: dict[int, Finished] = {}
        self.status: SchedulerStatus | None = None
        self.welcomes: list[Welcome] = []
        self.goodbyes: list[Goodbye] = []
        hello = Hello("api", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, new_instance())
        self.channel: ClientChannel[Any] = ClientChannel(
            context, f"ipc://{directory}/scheduler.sock", SchedulerToApi, lambda: hello
        )

    def submit(self, request_id: int, prompt: int, max_tokens: int, **outer: Any) -> None:
        column = pack_i32([default_sample(request_id, j) for j in range(prompt)])
        self.channel.send(Submit(request_id, column, SamplingParams(max_tokens, ignore_eos=True), **outer))

    def abort(self, *ids: int) -> None:
        self.channel.send(Abort(pack_u64(list(ids))))

    def pump(self) -> None:
        self.channel.tick()
        for message in self.channel.receive():
            if isinstance(message, Outputs):
                self.accepted |= set(u64(message.accepted).tolist())
                self.rejected |= {rejection.id: rejection for rejection in message.rejected}
                columns = (u64(message.ids), i32(message.positions), i32(message.tokens))
                for request_id, position, token in zip(*(c.tolist() for c in columns), strict=True):
                    stream = self.tokens.setdefault(request_id, [])
                    assert position == len(stream), f"request {request_id}: position {position} after {len(stream)}"
                    stream.append(token)
                self.finished |= {end.id: end for end in message.finished}
            elif isinstance(message, SchedulerStatus):
                self.status = message
            elif isinstance(message, Welcome):
                self.welcomes.append(message)
            elif isinstance(message, Goodbye):
                self.goodbyes.append(message)


class Chain:
    """A scheduler process in a thread of its own between ends that a test holds in its hands."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.directory = directory
        self.registry = CollectorRegistry()
        addresses = {
            "scheduler_address": f"ipc://{directory}/scheduler.sock",
            "runner_address": f"ipc://{directory}/runner.sock",
        }
        self.config = SchedulerConfig(**(addresses | {"lease_s": 1.0, "runner_silence_s": 1.5} | config))
        self.runner: RunnerEnd | None = None
        self.apis: list[ApiEnd] = []
        self.code: int | None = None
        self.process: SchedulerProcess | None = None
        self._stop: StopSignal | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        metrics = Metrics.of_replicas(self.registry, len(self.config.runner_addresses))
        self.process = SchedulerProcess(self.config, self.context, metrics)
        self._stop = StopSignal(signals=())
        self._thread = threading.Thread(target=self._run, args=(self.process, self._stop))
        self._thread.start()

    def _run(self, process: SchedulerProcess, stop: StopSignal) -> None:
        with stop:
            try:
                self.code = process.run(stop)
            finally:
                process.close()  # else the context would wait for its sockets for ever

    def stop(self) -> int | None:
        if self._stop is not None and self._thread is not None:
            self._stop.request()
            self._thread.join(60)
            assert not self._thread.is_alive(), "the scheduler doesn't end"
            self._stop = self._thread = None
        return self.code

    def start_runner(self, epoch: int = 1, limit: Limits | None = None) -> RunnerEnd:
        self.runner = RunnerEnd(self.context, self.directory, epoch, limit)
        return self.runner

    def stop_runner(self) -> None:
        if self.runner is not None:
            self.runner.channel.close()
            self.runner = None

    def api(self) -> ApiEnd:
        self.apis.append(ApiEnd(self.context, self.directory))
        return self.apis[-1]

    def until(self, done: Callable[[], Any], what: str, deadline_s: float = 15) -> Any:
        end_at = time.monotonic() + deadline_s
        while True:
            ends = [*self.apis, *self.runner_ends()]
            for end in ends:
                end.pump()
            value = done()
            if value:
                return value
            assert time.monotonic() < end_at, f"waited {deadline_s:g} s for {what}"
            poller = zmq.Poller()
            for end in ends:
                poller.register(end.channel.socket, zmq.POLLIN)
            poller.poll(20)

    def runner_ends(self) -> list[RunnerEnd]:
        """The runners that are there."""
        return [self.runner] if self.runner else []

    def connected(self) -> ApiEnd:
        """Scheduler, runner and one API, all of them ready."""
        self.start_runner()
        self.start()
        api = self.api()
        self.until(lambda: api.status is not None and api.status.runner == "ready", "a ready chain")
        return api

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"triptych_scheduler_{name}", labels) or 0.0

    def close(self) -> None:
        self.stop()
        self.stop_runner()
        for api in self.apis:
            api.channel.close()
        self.context.term()
