"""Who has a place: the path of a unix socket, held through a lock beside it that the kernel drops when its holder ends.

ZeroMQ silently takes a path over from whoever listens there. With the lock, of two that start in one instant one wins.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import time

LOCK_SUFFIX = ".lock"
WRITE_LOOKS, WRITE_LOOK_S = 50, 0.002
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


class PlaceTaken(OSError):
    """Another live process has the place: `pid`, or 0 for one that can't be seen from here."""

    def __init__(self, pid: int) -> None:
        holder = describe_process(pid)
        super().__init__(f"another live process listens there{holder and f': {holder}'}")
        self.pid = pid


class Place:
    """A path that this process may listen at until `release`, or until another one takes it by force."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._lock = path + LOCK_SUFFIX
        self._descriptor = descriptor
        self._file: tuple[int, int] | None = None

    @classmethod
    def claim(cls, path: str, *, by_force: bool = False) -> Place:
        """Take the place, and sweep the socket file of a dead process. Raises PlaceTaken, FileExistsError, OSError.

        `by_force` takes it from one that hangs, which goes on listening where nobody finds it.
        """
        lock = path + LOCK_SUFFIX
        while True:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                mine = _try_lock(descriptor)
                if file_identity(lock) != _identity(os.fstat(descriptor)):
                    continue  # its former holder has just removed it
                if mine:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()} {_pid_namespace()}".encode())
                    place, descriptor = cls(path, descriptor), -1
                    place._sweep(by_force)
                    return place
                if not by_force:
                    raise PlaceTaken(_written_pid(descriptor))
                os.unlink(lock)
            except FileNotFoundError:
                continue  # its holder was faster
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def _sweep(self, by_force: bool) -> None:
        try:
            if os.path.lexists(self.path):
                if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                    raise FileExistsError("a file that is not a socket is in the way")
                pid = None if by_force else listener_pid(self.path)
                if pid is not None:  # by somebody who knows of no lock
                    raise PlaceTaken(pid)
                _remove(self.path)
        except BaseException:
            self.release()
            raise

    def listening(self) -> None:
        """The socket is bound. Raises PlaceTaken if the place has been taken by force meanwhile."""
        self._file = file_identity(self.path)
        if file_identity(self._lock) != _identity(os.fstat(self._descriptor)):
            raise PlaceTaken(holder_pid(self.path) or 0)

    @property
    def taken(self) -> bool:
        """Whether another process has taken it by force. A directory that somebody has cleared is nobody's."""
        found = file_identity(self._lock)
        return self._descriptor >= 0 and found is not None and found != _identity(os.fstat(self._descriptor))

    def release(self) -> None:
        """Remove the socket's file and the lock, unless another process has the place by now. Idempotent."""
        if self._descriptor < 0:
            return
        if self._file is not None and file_identity(self.path) == self._file:
            _remove(self.path)
        if file_identity(self._lock) == _identity(os.fstat(self._descriptor)):
            _remove(self._lock)
        os.close(self._descriptor)
        self._descriptor = -1


def holder_pid(path: str) -> int | None:
    """The process that has the place (0: one that can't be seen from here), None if nobody has. Nobody notices."""
    try:
        descriptor = os.open(path + LOCK_SUFFIX, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return listener_pid(path)
    try:
        if _is_locked(descriptor):
            return _written_pid(descriptor)
    finally:
        os.close(descriptor)
    return listener_pid(path)


def listener_pid(path: str) -> int | None:
    """The process that listens on a unix socket (0: one that can't be seen from here), None if nobody does.

    A listener sees a connection that says nothing.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(0.5)
            probe.connect(path)
            return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        except (BlockingIOError, TimeoutError):
            return 0  # it listens, and takes nobody in
        except OSError:
            return None


def listener_at(address: str) -> int | None:
    """Like `holder_pid`, for an ipc or tcp address; who listens on the latter can't be told (0)."""
    if address.startswith("ipc://"):
        return holder_pid(address.removeprefix("ipc://"))
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        return None
    return 0


def is_abandoned(address: str) -> bool:
    """Whether nobody has an ipc address because its holder was killed: one that ends by itself takes its lock along.

    Of other addresses that can't be told: True.
    """
    path = address.removeprefix("ipc://")
    return path == address or (os.path.exists(path + LOCK_SUFFIX) and holder_pid(path) is None)


def file_identity(path: str) -> tuple[int, int] | None:
    """What tells a file from another one that has come to lie in its place; None if there is none."""
    try:
        return _identity(os.stat(path))
    except OSError:
        return None


def describe_process(pid: int) -> str:
    """A process in words: its number and since when it runs; "" if it can't be seen from here."""
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.stat(f"/proc/{pid}").st_mtime))
        with open(f"/proc/{pid}/stat", "rb") as file:
            stopped = file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return ""
    return f"pid {pid}, since {since}{', which is stopped' if stopped else ''}"


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _try_lock(descriptor: int) -> bool:
    """The lock belongs to the open file, not to the process: who claims twice is refused as well."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_locked(descriptor: int) -> bool:
    """Asks without taking it: who claims the place in this instant isn't disturbed."""
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return bool(struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))[0] != fcntl.F_UNLCK)


def _written_pid(descriptor: int) -> int:
    """Who says in the lock's file that it holds it; 0 if that number means nothing here.

    Who has just got the lock writes in the next instant; until then there is nothing, or the name of a dead process.
    """
    for _ in range(WRITE_LOOKS):
        pid, _, namespace = os.pread(descriptor, 100, 0).decode("ascii", "replace").partition(" ")
        if namespace and namespace != _pid_namespace():
            break
        if pid.isdigit() and os.path.exists(f"/proc/{pid}"):
            return int(pid)
        time.sleep(WRITE_LOOK_S)
    return 0


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # the runtime directory may have been cleared before us
