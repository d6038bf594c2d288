"""A supervisor process over small real child processes that a test names, and the programs that several tests use."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from harness import ROOT, wait_until

# One supervisor over programs that the test names: `role=code` pairs, in start order; `api_1` and `api_2` are a group.
# Programs that speak of a Watchdog are taken to beat.
HOST = """
import os, sys, threading
from ops.child import Program
from ops.supervisor import RestartPolicy, Supervisor
place = sys.argv[1]
programs = []
for pair in sys.argv[2:]:
    role, code = pair.split("=", 1)
    environment = {**os.environ, "PLACE": place, "PYTHONUNBUFFERED": "1"}
    grace = float(os.environ["GRACE"])
    group = role.partition("_")[0] if "_" in role else ""
    command = [os.environ["PYTHON"], "-c", code]
    programs.append(Program(role, command, environment, {"AGAIN": "1"}, grace, group, beats="Watchdog" in code))
supervisor = Supervisor(
    programs,
    write=lambda text: print(text, flush=True),
    probe=lambda: os.path.exists(place + "/ready"),
    on_ready=lambda seconds: print("READY", flush=True),
    policy=RestartPolicy(
        limit=int(os.environ["LIMIT"]),
        backoff_s=0.05,
        stable_after_s=float(os.environ["STABLE"]),
        start_timeout_s=float(os.environ["START"]),
        hang_timeout_s=float(os.environ["HANG"]),
    ),
    cleanup=lambda: open(place + "/cleaned", "w").close(),
)
sys.exit(supervisor.run())
"""

UP = """
import os, select, signal, sys
from protocol.process import StopSignal, die_with_parent
die_with_parent()
with StopSignal() as stop:
    print("up", os.getpid(), os.environ.get("AGAIN", ""))
    open(os.environ["PLACE"] + "/ready", "w").close()
    select.select([stop], [], [])
    print("bye")
"""
DRAINS = """
import os, select, threading
from protocol.process import StopSignal
with StopSignal() as stop:
    print("up", os.getpid())
    open(os.environ["PLACE"] + "/ready", "w").close()
    select.select([stop], [], [])
    print("draining")
    while not os.path.exists(os.environ["PLACE"] + "/drained"):
        threading.Event().wait(0.01)
    print("bye")
"""
STUBBORN = """
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
print("up", os.getpid(), child.pid)
open(os.environ["PLACE"] + "/ready", "w").close()
threading.Event().wait()
"""


class Host:
    """A supervisor process of a test and what it prints."""

    def __init__(self, place: Path, programs: dict[str, str], python: str, **limits: float) -> None:
        self.place = place
        limits = {"start": 60.0, "grace": 20.0, "hang": 30.0, "stable": 60.0, "limit": 3} | limits
        settings = {"PYTHON": python, "HOST_MARK": place.name, **{key.upper(): str(s) for key, s in limits.items()}}
        self._log = place / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HOST, str(place), *(f"{role}={code}" for role, code in programs.items())],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **settings},
            )

    def log(self) -> str:
        return self._log.read_text()

    def lines(self, role: str) -> list[str]:
        return [line.partition("| ")[2] for line in self.log().splitlines() if line.strip().startswith(role + " |")]

    def until(self, text: str, count: int = 1) -> None:
        wait_until(lambda: self.log().count(text) >= count, 60, f"{text!r} in:\n{self.log()}")

    def pid_of(self, role: str) -> int:
        return int([line for line in self.lines(role) if line.startswith("up")][-1].split()[1])

    def alive(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOST_MARK") == self.place.name and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def end(self) -> int:
        code = self.process.wait(60)
        wait_until(lambda: not self.alive(), 60, "the end of all children")
        return code


@contextlib.contextmanager
def hosts_in(place: Path) -> Iterator[Callable[..., Host]]:
    """Starts hosts: `limits` (by name), which `python` runs the programs, and these by role. Everything is dead when
    the block ends."""
    hosts = []

    def start(limits: dict[str, float] | None = None, python: str = sys.executable, **programs: str) -> Host:
        dedented = {role: textwrap.dedent(code) for role, code in programs.items()}
        hosts.append(Host(place, dedented, python, **(limits or {})))
        return hosts[-1]

    yield start
    for host in hosts:
        for pid in host.alive():
            os.kill(pid, signal.SIGKILL)
        host.process.wait(60)
