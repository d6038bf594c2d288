"""A scheduler's process between the two ends: started from a command line, known through its sockets and its exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from protocol.messages import Limits
from tests.conformance.ends import ApiEnd, RawPeer, RunnerEnd, World, socket_path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
LEASE_S = 1.5
CAPABILITIES = {
    "chunked-prefill": "computes a prompt in parts when it exceeds the token budget",
    "mixed-steps": "computes prompts and decodes in one step",
    "prefix-cache": "reuses pages whose content it knows",
    "priority": "lets a request with a smaller priority value go first",
    "control": "answers operators' questions",
}


@dataclass(frozen=True)
class Subject:
    """A scheduler to judge: how it is started, and what it says it can't do, with the reason."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)


OURS = (sys.executable, "-m", "ops.cli", "scheduler")

SUBJECTS = (
    Subject("triptych", OURS, {"TRIPTYCH_QUEUE_POLICY": "priority"}),
    Subject(
        "subclass",
        (*OURS, "--scheduler-cls", "tests.conformance.newest_first:NewestFirst"),
        lacks={"priority": "the subclass serves the newest first, whatever its priority"},
    ),
    Subject(
        "minimal",
        (sys.executable, "-m", "tests.conformance.minimal_scheduler"),
        lacks={
            "prefix-cache": "the minimal scheduler computes every prompt",
            "priority": "the minimal scheduler is first come, first served",
            "control": "the minimal scheduler has nothing to control",
        },
    ),
)


class Chain:
    """One process of a subject, one runner end, and as many API ends as a test makes."""

    def __init__(self, subject: Subject, directory: Path, log_name: str = "log") -> None:
        self.subject = subject
        self.directory = directory
        self.world = World()
        self.apis: list[ApiEnd] = []
        self.raw: list[RawPeer] = []
        self.runner: RunnerEnd | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._alive = True
        self._context: zmq.Context[Any] = zmq.Context()
        self._log = directory / log_name

    # --- parts come and go ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process."""
        own = {
            "TRIPTYCH_RUNTIME_DIR": str(self.directory),
            "TRIPTYCH_SCHEDULER_ADDRESS": socket_path(self.directory, "scheduler"),
            "TRIPTYCH_RUNNER_ADDRESS": socket_path(self.directory, "runner"),
            "TRIPTYCH_LEASE_S": str(LEASE_S),
            "TRIPTYCH_RUNNER_SILENCE_S": str(LEASE_S),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self.subject.argv,
                cwd=ROOT,
                env={**clean, **own, **self.subject.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start_runner(self, new_limits: Limits | None = None) -> RunnerEnd:
        """Bind the runner's address."""
        self.runner = RunnerEnd(self._context, socket_path(self.directory, "runner"), self.world)
        if new_limits is not None:
            self.runner.install(new_limits)
        return self.runner

    def api(self) -> ApiEnd:
        """Another API, which shakes hands as soon as it is pumped."""
        self.apis.append(ApiEnd(self._context, socket_path(self.directory, "scheduler"), self.world))
        return self.apis[-1]

    def stranger(self) -> RawPeer:
        """A raw socket at the scheduler's address."""
        self.raw.append(RawPeer(self._context, socket_path(self.directory, "scheduler")))
        return self.raw[-1]

    def begin(self, new_limits: Limits) -> tuple[RunnerEnd, ApiEnd]:
        """A ready chain with a fresh runner of these limits and one API, whatever was here before."""
        self._drop_apis()
        self.world.asked.clear()
        self.world.scripted.clear()
        if self.runner is None:
            self.start_runner(new_limits)
        else:
            self.runner.leave()
            self.runner.install(new_limits)
        if self.process is None:
            self.start()
        assert self.runner is not None
        self.runner.welcoming = False
        api = self.connected()
        self.runner.welcoming = True
        self.until_ready(api)
        return self.runner, api

    def connected(self) -> ApiEnd:
        """Another API with a session."""
        api = self.api()
        self.until(lambda: api.channel.connected, "the session of another API")
        return api

    def until_ready(self, api: ApiEnd) -> None:
        """Until the API is told that a runner is there, under the epoch granted last."""
        runner = self.runner
        assert runner is not None
        self.until(
            lambda: (
                runner.holder is not None
                and api.status is not None
                and (api.status.runner, api.status.epoch) == ("ready", runner.epoch)
            ),
            "a ready chain",
        )

    # --- waiting --------------------------------------------------------------------------------------------

    def until(self, done: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
        """Let everybody work until `done` is truthy; AssertionError with the scheduler's log when time is up."""
        end_at = time.monotonic() + deadline_s
        while True:
            ends = [*self.apis, *self.raw, *([self.runner] if self.runner else [])]
            for end in ends:
                end.pump()
            value = done()
            if value:
                return value
            if self._alive and self.process is not None and self.process.poll() is not None:
                code = self.process.returncode
                raise AssertionError(f"ended with {code} while the test waited for {what}:\n{self.log()}")
            if time.monotonic() > end_at:
                raise AssertionError(f"waited {deadline_s:g} s for {what}; the scheduler's log:\n{self.log()}")
            poller = zmq.Poller()
            for end in ends:
                poller.register(end.socket, zmq.POLLIN)
            poller.poll(20)

    def until_statuses(self, api: ApiEnd, count: int) -> None:
        """Until `count` more statuses have come: the scheduler's loop has turned and had time to do wrong."""
        seen = len(api.statuses)
        self.until(lambda: len(api.statuses) >= seen + count, f"{count} statuses")

    def until_steps_stop(self, api: ApiEnd) -> None:
        """Until a whole status period has brought no further step: the scheduler waits for a result."""
        assert self.runner is not None
        steps = -1
        while steps != len(self.runner.judge.steps):
            steps = len(self.runner.judge.steps)
            self.until_statuses(api, 1)

    def until_exit(self) -> int:
        """The process's exit status, once it has ended by itself."""
        process = self.process
        assert process is not None
        self._alive = False
        self.until(lambda: process.poll() is not None, "the scheduler's end")
        return process.returncode

    def terminate(self) -> None:
        """Ask the process to end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def log(self) -> str:
        """What the process has printed."""
        return self._log.read_text("utf-8", "replace")

    # --- the end --------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Nothing is left of the requests: the next step leaves one resident, and the status says that all is free."""
        runner = self.runner
        if self.process is None or self.process.poll() is not None or runner is None or runner.holder is None:
            return
        runner.holding = False
        runner.release()
        probe = self.connected()
        probe_id = 2**63 + len(self.world.asked)
        probe.submit(probe_id, 1, 1)
        self.until(lambda: probe.has(probe_id), "the end of one more request")
        probe.assert_complete(probe_id)
        assert set(runner.judge.residents) == {probe_id}, "requests that have ended did not leave the runner"
        runner.welcoming = False
        runner.leave()
        self.until(lambda: probe.status is not None and probe.status.runner == "absent", "the loss to be reported")
        status = probe.status
        assert status is not None
        assert (status.running, status.waiting, status.kv_usage) == (0, 0, 0.0), status

    def _drop_apis(self) -> None:
        for end in (*self.apis, *self.raw):
            end.socket.close(linger=0)
        self.apis.clear()
        self.raw.clear()

    def close(self) -> None:
        """End the process and close all sockets."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
        self._drop_apis()
        if self.runner is not None:
            self.runner.channel.close()
        self._context.destroy(linger=0)
