"""One supervised child process: its start, its exit (a pidfd), and its output with a prefix. No policy lives here.

What an exit status says is in `ops.deaths`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.process import PARENT_ENV, WATCHDOG_ENV

KEPT_LINES = 20


@dataclass(frozen=True, slots=True)
class Program:
    """What to run for a role. `restart_env` is added to the environment when it is started again after a failure.

    `stop_grace_s` is how long it may take to end after SIGTERM before it is killed; programs with the same `group`
    (not empty) are told to end together. `descriptors` are open in the child under the same numbers. `holder` says
    which process has the program's place when it was replaced (0: one that can't be told, None: nobody), and
    `abandoned` whether nobody will come to it: its holder was killed. `beats`: it gives signs of life
    (`protocol.process.Watchdog`), the first one when it is ready.
    """

    role: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    restart_env: Mapping[str, str] = field(default_factory=dict)
    stop_grace_s: float = 5.0
    group: str = ""
    descriptors: tuple[int, ...] = ()
    holder: Callable[[], int | None] = lambda: None
    abandoned: Callable[[], bool] = lambda: True
    beats: bool = False


class Child:
    """A running program, in a session of its own so that a terminal's Ctrl-C reaches only its supervisor.

    `watchdog` is readable when it has given a sign of life since the last look; `begun` once it has ever given one,
    `killed` once it was told to end at once. OSError when there can't be another process just now.
    """

    def __init__(self, program: Program, write: Callable[[str], None], started_at: float, *, again: bool) -> None:
        self.program = program
        self.started_at = started_at
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._write = write
        self._partial = b""
        self.watchdog = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.begun = self.killed = False
        self._silent_looks = 0
        ours = {PARENT_ENV: str(os.getpid()), WATCHDOG_ENV: str(self.watchdog)}
        environment = {**program.env, **(program.restart_env if again else {}), **ours}
        try:
            self._process = subprocess.Popen(
                list(program.argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(*program.descriptors, self.watchdog),
            )
        except OSError:
            os.close(self.watchdog)
            raise
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.pid = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self.kill_group()
            self._process.wait()
            self._process.stdout.close()
            os.close(self.watchdog)
            raise

    def pump(self) -> bool:
        """Pass on what the child has written. False once there will be no more."""
        while True:
            try:
                data = os.read(self.output, 65536)
            except BlockingIOError:
                return True
            if not data:
                self._emit(self._partial)
                self._partial = b""
                return False
            # A progress bar redraws its line after \r: what was overwritten is dropped, what stayed is a line.
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._emit(line)
            self._partial = self._partial.rsplit(b"\r", 1)[-1] if b"\r" in self._partial[:-1] else self._partial

    def silent_looks(self) -> int:
        """Look for a sign of life: how many looks in a row have found none. 0 for a child that never gave one."""
        try:
            os.eventfd_read(self.watchdog)
        except BlockingIOError:
            self._silent_looks += self.begun
        else:
            self.begun, self._silent_looks = True, 0
        return self._silent_looks

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the child alone; nothing if it has ended."""
        self._process.send_signal(signum)

    def kill_group(self) -> None:
        """End the child and everything it started, now."""
        self.killed = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of the group has ended

    def reap(self) -> int:
        """Collect the exit status (negative: the signal that ended it) of a child whose pidfd is readable.

        What it left in its process group is killed, and the descriptors are closed: forget it afterwards.
        """
        self.kill_group()  # before its number can be another's
        status = self._process.wait()
        self.pump()
        if self._partial:
            self._emit(self._partial)
        os.close(self.pidfd)
        os.close(self.watchdog)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def _emit(self, line: bytes) -> None:
        text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace").rstrip()
        if text:
            self.last_lines.append(text)
            self._write(f"{self.program.role:>9} | {text}")
