"""The private directory that holds one instance's sockets: made at start, locked by its owner, removed at the end.

The lock is on the directory itself: the kernel drops it however the owner dies, and systemd-tmpfiles leaves locked
directories alone. Directories of dead owners are swept at the next start.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from protocol.channels import MAX_IPC_PATH
from protocol.places import LOCK_SUFFIX
from protocol.process import PrivateDirError, ensure_private_dir
from protocol.settings import SettingError

LONGEST_SOCKET = "scheduler.metrics.sock"
_SWEEP_LOCK = ".lock"
_PREFIX = "run-"
_CLEANER = """
import fcntl, glob, os, shutil, signal, sys, time
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
sys.stdin.buffer.read()
path, made = sys.argv[1:]
for attempt in range(20):
    try:
        fcntl.flock(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        time.sleep(0.1)
    except OSError:
        sys.exit()
else:
    sys.exit()
if made:
    shutil.rmtree(path, ignore_errors=True)
else:
    for entry in glob.glob(path + "/*.sock") + glob.glob(path + "/*.sock.lock"):
        os.unlink(entry)
"""
"""Waits for the end of the process that started it, however that ends, and removes what it could not. Not if another
instance has the directory by then: one that keeps the lock, as a child does not that was forked in the last instant."""


class RuntimeDir:
    """A locked runtime directory; a context manager that removes what it made."""

    def __init__(self, path: str, descriptor: int, made: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        self._made = made
        self._cleaner = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CLEANER, path, "made" if made else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @classmethod
    def create(cls, environ: Mapping[str, str]) -> Self:
        """A new directory under `$XDG_RUNTIME_DIR/triptych` or `/tmp/triptych-<uid>`; stale ones there are swept."""
        for base in _bases(environ):
            if len(os.fsencode(os.path.join(base, f"{_PREFIX}00000000", LONGEST_SOCKET))) > MAX_IPC_PATH:
                continue
            try:
                base = ensure_private_dir(base)
                with open(os.path.join(base, _SWEEP_LOCK), "w") as lock:
                    # Held from mkdir to flock, so that a neighbour doesn't sweep what isn't locked yet.
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    sweep(base)
                    path = os.path.join(base, _PREFIX + secrets.token_hex(4))
                    os.mkdir(path, 0o700)
                    return cls(path, _lock(path), made=True)
            except PrivateDirError:
                raise
            except OSError:
                continue  # read-only or missing: the next base may do
        raise SettingError("--runtime-dir: found no place for sockets (tried $XDG_RUNTIME_DIR and /tmp); name one")

    @classmethod
    def use(cls, path: str) -> Self:
        """A directory that the user named. SettingError if it is too long, not private, or another instance's."""
        path = os.path.abspath(path)
        if len(os.fsencode(os.path.join(path, LONGEST_SOCKET))) > MAX_IPC_PATH:
            room = MAX_IPC_PATH - len(LONGEST_SOCKET) - 1
            raise SettingError(f"--runtime-dir: {path} has {len(os.fsencode(path))} bytes, at most {room} fit")
        made = not os.path.exists(path)
        try:
            ensure_private_dir(path)
            return cls(path, _lock(path), made)
        except BlockingIOError:
            raise SettingError(f"--runtime-dir: {path} is in use by another live instance") from None
        except OSError as error:
            raise SettingError(f"--runtime-dir: {error}") from error

    def close(self) -> None:
        """Remove the directory if this instance made it, else only the sockets in it and their locks. Idempotent."""
        if self._descriptor < 0:
            return
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            for pattern in ("*.sock", "*.sock" + LOCK_SUFFIX):
                for entry in Path(self.path).glob(pattern):
                    entry.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()
        self._cleaner.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def sweep(base: str) -> list[str]:
    """Remove the instance directories in `base` whose owner is dead; their paths."""
    swept = []
    for entry in sorted(Path(base).glob(_PREFIX + "*")):
        try:
            descriptor = _lock(str(entry))
        except OSError:
            continue  # its owner lives, or a neighbour was faster
        try:
            shutil.rmtree(entry, ignore_errors=True)
            swept.append(str(entry))
        finally:
            os.close(descriptor)
    return swept


def live(environ: Mapping[str, str]) -> list[str]:
    """The directories that `create` made and whose owner lives, newest first."""
    found: list[tuple[int, str]] = []
    for base in _bases(environ):
        try:
            with open(os.path.join(base, _SWEEP_LOCK)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # so that looking doesn't get in the way of a start
                for entry in Path(base).glob(_PREFIX + "*"):
                    if _is_locked(str(entry)):
                        found.append((entry.stat().st_mtime_ns, str(entry)))
        except OSError:
            continue  # nobody has ever started anything there
    return [path for _, path in sorted(found, reverse=True)]


def _is_locked(path: str) -> bool:
    try:
        os.close(_lock(path))
    except BlockingIOError:
        return True
    except OSError:
        pass  # removed meanwhile, or not ours
    return False


def _bases(environ: Mapping[str, str]) -> list[str]:
    bases = [f"/tmp/triptych-{os.getuid()}"]
    if environ.get("XDG_RUNTIME_DIR"):
        bases.insert(0, os.path.join(environ["XDG_RUNTIME_DIR"], "triptych"))
    return bases


def _lock(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
