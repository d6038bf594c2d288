"""What every Triptych process does about being a process: logging, signals, a parent that may die, private directories.

Not a supervisor (that is `ops.supervisor`), and nothing here knows what the process is for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

PARENT_ENV = "TRIPTYCH_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_LEVELS = ("debug", "info", "warning", "error")
FORCED_EXIT = 130
_supervised = False
EXIT_REPLACED = 4
"""Exit status of a process whose place another one has: a supervisor must not start it again while that one lives."""
EXIT_STUCK = 5
"""Exit status of a process that ended itself because what it did never came to an end."""
WATCHDOG_ENV = "TRIPTYCH_WATCHDOG_FD"


class PrivateDirError(OSError):
    """A runtime directory that others could read or write, or that belongs to somebody else."""


def setup_logging(role: str, level: str = "info") -> None:
    """Send this process's log to stderr, one line per record: `12:00:01 scheduler W triptych.link: …`.

    Under a supervisor, which puts the role before every line, the role is left out. ValueError for an unknown level.
    """
    if level.lower() not in _LEVELS:
        raise ValueError(f"log level {level!r}: expected one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    shown = "" if _supervised else f"{role} "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {shown}%(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent goes away, however that went and however stuck this one is.

    `parent_pid` (default: `TRIPTYCH_PARENT_PID`, which a supervisor sets) is who the parent should be: if it died
    before this call, no signal will come, so the process exits at once. Without either, nothing is tied to anything:
    a process started by hand lives on. Call it in the main thread, first thing. (Linux; elsewhere only the check.)
    """
    global _supervised
    if parent_pid is None:
        expected = os.environ.pop(PARENT_ENV, "")  # not for our own children, whose parent is this process
        if not expected.isdigit():
            return
        parent_pid = int(expected)
        _supervised = True
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        logging.getLogger("triptych.process").error("the parent (pid %d) is gone, exiting", parent_pid)
        os._exit(1)


class Watchdog:
    """Tells the supervisor, if there is one, that this process's loop turns: `beat()` at least once a second.

    The supervisor gives an eventfd, and kills a process that has begun to beat and then stops.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self._descriptor = descriptor

    @classmethod
    def from_environment(cls) -> Self:
        """The one that the supervisor gave, or one that tells nobody."""
        given = os.environ.pop(WATCHDOG_ENV, "")  # not for our own children
        return cls(int(given) if given.isdigit() else -1)

    def beat(self) -> None:
        """All is well."""
        if self._descriptor >= 0:
            try:
                os.eventfd_write(self._descriptor, 1)
            except OSError:
                self._descriptor = -1  # the supervisor is gone


class StopSignal:
    """SIGTERM and SIGINT as a flag and a descriptor that becomes readable, so that a poll loop wakes up.

    The first signal asks for an orderly end; the second calls `on_second` (default: nothing) and exits at once with
    status 130. A repetition within `echo_s` seconds is taken for the same signal: `timeout` and others send each one
    to a process and to its group. A SIGHUP that is ignored, as under `nohup`, stays so. Use as a context manager in the
    main thread (Python delivers signals there only); leaving it puts the former handlers back.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        on_second: Callable[[], None] | None = None,
        echo_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals = signals
        self._on_second = on_second
        self._echo_s = echo_s
        self._clock = clock
        self._first_at = 0.0
        self.requested = False
        self.signum: int | None = None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signum in self._signals:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                self._former[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)
        self._former.clear()
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """A descriptor that stays readable once a stop was requested."""
        return self._reader.fileno()

    def request(self) -> None:
        """Ask for the same orderly end from inside the process (also from another thread)."""
        if not self.requested:
            self.requested = True
            try:
                self._writer.send(b"\0")
            except OSError:
                pass  # already left the context: whoever polls is gone too

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            if self._clock() - self._first_at < self._echo_s:
                return
            try:
                if self._on_second is not None:
                    self._on_second()
            finally:
                os._exit(FORCED_EXIT)
        self.signum = signum
        self._first_at = self._clock()
        self.request()


def ensure_private_dir(path: str | os.PathLike[str]) -> str:
    """Create the directory (and its parents) with mode 0700, or check that it is ours and private; its path.

    PrivateDirError when it is a link, not a directory, someone else's, or open to group or others: a socket in it
    would let other users in.
    """
    path = os.path.abspath(os.fspath(path))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise PrivateDirError(f"{path} is not a directory")
    if found.st_uid != os.getuid():
        raise PrivateDirError(f"{path} belongs to uid {found.st_uid}, this process runs as uid {os.getuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise PrivateDirError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, expected 0700 (chmod 700 {path})")
    return path
