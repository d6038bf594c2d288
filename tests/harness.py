"""Runs Triptych's real commands as subprocesses for tests: waits until ready, keeps their logs, kills all of it.

Not a test module. Every wait has a deadline; nothing sleeps for a fixed time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
START_DEADLINE_S = 150.0
STOP_DEADLINE_S = 60.0
MARK_ENV = "TEST_INSTANCE"
NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients that speak no TLS: by default each of them reads all of the system's certificates when it is made."""


def wait_until(predicate: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """The predicate's first truthy value; AssertionError naming `what` when `deadline_s` seconds pass without one."""
    pause = threading.Event()
    begun = time.monotonic()
    while True:
        value = predicate()
        if value:
            return value
        waited = time.monotonic() - begun
        if waited >= deadline_s:
            raise AssertionError(f"waited {deadline_s:g} s for {what}")
        pause.wait(min(max(waited / 10, 0.005), 0.1))  # what takes long is not asked often: that would slow it down


def examples(count: int) -> int:
    """How many examples a property is tried on: `count`, or as many times that as the environment's EXAMPLES says."""
    return count * int(os.environ.get("EXAMPLES", "1"))


def free_port() -> int:
    """A TCP port on the loopback interface that nobody uses now, and that the kernel gives to nobody who asks for any:
    until it is listened on, another process's connection would have it."""
    for _ in range(100):
        port = 12_000 + secrets.randbelow(20_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port was found")


@dataclass(frozen=True)
class Response:
    """An HTTP answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body decoded."""
        return json.loads(self.body)


def request(
    port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout: float = 60.0
) -> Response:
    """One HTTP request to 127.0.0.1; `body` is sent as JSON unless it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, {**kind, **(headers or {})})
        answer = connection.getresponse()
        return Response(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


class Command:
    """A `triptych …` process of a test. `log()` is all that it and its children have printed."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], log_path: Path, mark: str) -> None:
        self.arguments = list(arguments)
        self.mark = mark
        self._log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ops.cli", *arguments],
                cwd=ROOT,
                env={**_clean_environment(), **env, MARK_ENV: mark, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    def log(self) -> str:
        """Everything printed so far."""
        return self._log_path.read_text("utf-8", "replace")

    def wait_for_log(self, text: str, deadline_s: float = START_DEADLINE_S) -> None:
        """Wait until `text` has been printed; AssertionError with the log if the process ends or the time does."""

        def seen() -> bool:
            if text in self.log():
                return True
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {text!r}:\n{self.log()}"
            return False

        try:
            wait_until(seen, deadline_s, f"{text!r} in the log")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def children(self) -> dict[str, psutil.Process]:
        """The running `triptych` processes below this one, by role."""
        found = {}
        for child in _quietly(lambda: psutil.Process(self.pid).children()) or []:
            command = _quietly(child.cmdline) or []
            if "ops.cli" in command:
                found[command[command.index("ops.cli") + 1]] = child
        return found

    def stop(self, signum: signal.Signals = signal.SIGTERM, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Send a signal and wait for the end; the exit status. AssertionError with the log if it doesn't end."""
        self.process.send_signal(signum)
        return self.wait(deadline_s)

    def wait(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """The exit status; AssertionError with the log if the process doesn't end by itself."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.arguments} did not end in {deadline_s:g} s:\n{self.log()}") from None

    def orphans(self) -> list[psutil.Process]:
        """Live processes of this test's instance, wherever they hang in the process tree."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def assert_no_orphans(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Wait until nothing that this command started is alive."""
        wait_until(lambda: not self.orphans(), deadline_s, f"the end of all processes of {self.arguments}")

    def kill(self) -> None:
        """End everything that this command started, now."""
        for process in self.orphans():
            _quietly(process.kill)
        self.process.wait()

    def _is_ours(self, process: psutil.Process) -> bool:
        environment = _quietly(process.environ) or {}
        return environment.get(MARK_ENV) == self.mark and _quietly(process.status) != psutil.STATUS_ZOMBIE


class Server(Command):
    """A running `triptych serve` (or `triptych api`) that answers on `port`."""

    port: int = 0

    @property
    def url(self) -> str:
        """`http://127.0.0.1:<port>`."""
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """One HTTP request to this server."""
        return request(self.port, method, path, body, headers)

    def is_ready(self) -> bool:
        """Whether `GET /ready` answers 200; AssertionError with the log if the process has ended."""
        assert self.process.poll() is None, f"ended with {self.process.returncode} at start:\n{self.log()}"
        try:
            return request(self.port, "GET", "/ready", timeout=10.0).status == 200
        except (OSError, http.client.HTTPException):
            return False


@contextlib.contextmanager
def running_command(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Command]:
    """A `triptych` command that is running; everything it started is dead when the block ends."""
    with _temporary() as place:
        command = Command(arguments, env or {}, place / "log", place.name)
        try:
            yield command
        finally:
            command.kill()


@contextlib.contextmanager
def running_server(
    *flags: str,
    env: Mapping[str, str] | None = None,
    ready: bool = True,
    deadline_s: float = START_DEADLINE_S,
) -> Iterator[Server]:
    """`triptych serve` on a free port with its own runtime directory, ready to answer (unless `ready` is false).

    Give `--backend sim` for a simulated model. When the block ends it is stopped with SIGTERM, and it is an
    AssertionError if anything that it started survives that.
    """
    with _temporary() as place:
        port = free_port()
        own = {"TRIPTYCH_RUNTIME_DIR": str(place / "run"), "TRIPTYCH_SHUTDOWN_GRACE_S": "3", **(env or {})}
        server = Server(["serve", "--port", str(port), *flags], own, place / "log", place.name)
        server.port = port
        try:
            if ready:
                try:
                    wait_until(server.is_ready, deadline_s, f"{server.url}/ready")
                except AssertionError as error:
                    raise AssertionError(f"{error}\n{server.log()}") from None
            yield server
            if server.process.poll() is None:
                server.stop()
            server.assert_no_orphans()
        finally:
            server.kill()


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    """A private directory with a short path: socket paths hold 107 bytes, and pytest's own are long."""
    path = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}


def _quietly(call: Callable[[], Any]) -> Any:
    """The call's value, or None for a process that has gone meanwhile."""
    try:
        return call()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
