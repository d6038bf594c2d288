"""Starts a whole Triptych for a measurement and reads what its processes cost. Linux: it reads /proc."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ops.bench.http_client import HttpClient, HttpError
from protocol.settings import ENV_PREFIX

ROLES = ("api", "scheduler", "runner")
STOP_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class SystemFailed(Exception):
    """The system did not become ready or lost a process; the message carries the end of its log."""


@dataclass(frozen=True, slots=True)
class System:
    """A running Triptych: where it answers, which process is which, and its private directory."""

    base_url: str
    supervisor: int
    pids: dict[str, int]
    runtime_dir: str

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time (user and system, all threads) that each process has used since its start, by role."""
        return {role: cpu_seconds(pid) for role, pid in self.pids.items()}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process since its start. ProcessLookupError if it is gone."""
    return sum(cpu_times(pid))


def cpu_times(pid: int) -> tuple[float, float]:
    """The parts of it: in the program itself, and in the system's kernel for it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it went before, or while its file was read
        raise ProcessLookupError(f"process {pid} is gone") from None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S


def child_roles(supervisor: int) -> dict[str, int]:
    """Pid by role of a supervisor's children, from the last word of their command lines."""
    found = {}
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        if (role := words[-1].decode("utf-8", "replace")) in ROLES:
            found[role] = int(pid)
    return found


@contextmanager
def system(arguments: Sequence[str], *, start_timeout_s: float = 60.0) -> Iterator[System]:
    """Runs `triptych serve` with `arguments` on a free port until the block ends.

    Raises SystemFailed if it doesn't become ready, or if the block found one of its processes gone.
    Settings of the surrounding shell don't reach it, so that a measurement is what its arguments say.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as scratch, open(f"{scratch}/log", "w+b") as log:
        runtime = f"{scratch}/run"
        command = [sys.executable, "-m", "ops.cli", "serve", "--port", str(port), "--runtime-dir", runtime, *arguments]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            base_url = f"http://127.0.0.1:{port}"
            _wait_ready(process, base_url, start_timeout_s, Path(log.name))
            try:
                yield System(base_url, process.pid, child_roles(process.pid), runtime)
            except ProcessLookupError as error:
                raise SystemFailed(f"{error}; the end of the log:\n{log_tail(Path(log.name))}") from error
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], base_url: str, timeout_s: float, log: Path) -> None:
    async def ready() -> bool:
        client = HttpClient(base_url)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return (await client.request("GET", "/ready")).status == 200
        except (HttpError, TimeoutError):
            return False
        finally:
            client.close()

    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if asyncio.run(ready()):
            return
        time.sleep(0.1)
    why = "ended" if process.poll() is not None else f"was not ready in {timeout_s:g} s"
    raise SystemFailed(f"`triptych serve` {why}; the end of its log:\n{log_tail(log)}")


def log_tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children die with it
        process.wait()
