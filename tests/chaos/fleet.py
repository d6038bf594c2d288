"""The processes of a storm: who has which role now, how each is killed, stopped and replaced, and what it holds open.

`triptych serve` starts them and starts them again; a scheduler that took over by hand is our child instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from harness import ROOT, Server

from ops.unix_http import UnixConnection
from protocol.process import PARENT_ENV, WATCHDOG_ENV

ROLES = ("api", "scheduler", "runner")


class Fleet:
    """All processes of one `triptych serve`, and the schedulers that were started by hand beside it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pids: set[int] = {server.pid}
        """Every process that was ever seen."""
        self.runtime_dir = Path(psutil.Process(server.pid).environ()["TRIPTYCH_RUNTIME_DIR"])
        self._own: list[subprocess.Popen[bytes]] = []
        private = (PARENT_ENV, WATCHDOG_ENV)
        first = self.members("scheduler")[0].environ()
        self._environment = {name: value for name, value in first.items() if name not in private}

    def members(self, role: str) -> list[psutil.Process]:
        """The live processes of a role, oldest first."""
        found = []
        for pid in (*_children(self.server.pid), *(process.pid for process in self._own if process.poll() is None)):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and _role(process.cmdline()) == role:
                    found.append(process)
        self.pids.update(process.pid for process in found)
        return found

    def kill(self, process: psutil.Process) -> None:
        """SIGKILL. Whoever it was, the supervisor finds that the place is empty."""
        process.kill()
        own = next((own for own in self._own if own.pid == process.pid), None)
        if own is not None:
            own.wait()
            self._own.remove(own)

    def is_own(self, process: psutil.Process) -> bool:
        """Whether it was started by hand, so that no supervisor watches it."""
        return any(own.pid == process.pid for own in self._own)

    def take_over(self) -> None:
        """Start a scheduler that dismisses the present one, with its settings, but not as the supervisor's child."""
        with (self.runtime_dir.parent / "scheduler.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ops.cli", "scheduler", "--takeover"],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._own.append(process)
        self.pids.add(process.pid)

    def log_of_own(self) -> str:
        """What the schedulers that were started by hand have printed."""
        path = self.runtime_dir.parent / "scheduler.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def stop(self) -> int:
        """End all of it as an operator would; the exit status of `triptych serve`."""
        status = self.server.stop()
        for process in self._own:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
        return status

    def metrics_of(self, socket_name: str) -> str:
        """A process's own metrics, from its private socket; empty when it doesn't answer just now."""
        connection = UnixConnection(str(self.runtime_dir / socket_name), 2.0)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        except (OSError, ValueError):
            return ""
        finally:
            connection.close()

    def http_ports(self, process: psutil.Process) -> set[int]:
        """The clients' ends of a process's HTTP connections."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return {connection.raddr.port for connection in process.net_connections("tcp") if connection.raddr}
        return set()

    def descriptors(self) -> dict[str, list[int]]:
        """How many descriptors each process holds, by role (`serve` is the supervisor)."""
        found = {"serve": [psutil.Process(self.server.pid).num_fds()]}
        for role in ROLES:
            found[role] = sorted(process.num_fds() for process in self.members(role))
        return found

    def shared_memory(self) -> set[str]:
        """Files in /dev/shm that some process of ours maps or has named after itself."""
        names = {f"_{pid}_" for pid in self.pids}
        found = {path for path in _shm() if any(name in f"{path}_" for name in names)}
        for role in ROLES:
            for process in self.members(role):
                with contextlib.suppress(psutil.NoSuchProcess):
                    maps = process.memory_maps()
                    found.update(entry.path for entry in maps if entry.path.startswith("/dev/shm/"))
        return found


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _role(command: list[str]) -> str:
    return command[command.index("ops.cli") + 1] if "ops.cli" in command else ""


def _shm() -> list[str]:
    return [entry.path for entry in os.scandir("/dev/shm")]
