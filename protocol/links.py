"""What both ends of a link need beneath a channel: addresses, sockets, counters, errors, and the check of a Hello.

Nothing here keeps a session: that is `protocol.channels`.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from protocol import wire
from protocol.messages import Hello, Refused

log = logging.getLogger("triptych.link")

HELLO_INTERVAL_S = 0.2
HEARTBEAT_INTERVAL_S = 0.5
HIGH_WATER_MARK = 4096
LINGER_MS = 200
HANDSHAKE_MS = 3000
"""How long ZeroMQ may take to agree with a peer that accepts connections; a stopped process never does."""
MAX_IPC_PATH = 107
LOG_INTERVAL_S = 10.0


class ChannelError(Exception):
    """A message could not be handed over. The owner decides what becomes of it; it is never dropped silently."""


class PeerGone(ChannelError):
    """There is no session with that peer (never welcomed, restarted, or disconnected)."""


class ChannelFull(ChannelError):
    """The peer doesn't read and the bounded queue to it is full."""


class AddressError(ValueError):
    """An address that can't be bound or connected to, with the reason."""


class AddressTaken(AddressError):
    """Another live process listens at the address. `holder` says which, as far as the kernel knows."""

    def __init__(self, address: str, holder: str = "") -> None:
        super().__init__(f"{address}: another live process listens there{holder and f': {holder}'}")
        self.holder = holder


@dataclass
class LinkStats:
    """Counters of one channel, exported as metrics by its owner."""

    sent: int = 0
    received: int = 0
    bad_frames: int = 0
    stale_frames: int = 0
    lost_frames: int = 0
    refused_hellos: int = 0
    send_failures: int = 0
    failed_handshakes: int = 0


class SeldomLog:
    """Warnings that a hostile peer could cause without end: one each ten seconds, and how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = -1e9
        self._kept = 0

    def warning(self, text: str) -> None:
        """Log it, or count it."""
        now = self._clock()
        if now < self._next:
            self._kept += 1
            return
        more = f" ({self._kept} more like it before)" if self._kept else ""
        self._next, self._kept = now + LOG_INTERVAL_S, 0
        log.warning("%s%s", text, more)


def new_instance() -> str:
    """A process's instance id: 16 random hex digits."""
    return secrets.token_hex(8)


def check_address(address: str) -> None:
    """Raise AddressError for an address that ZeroMQ would misread, cut or silently take over."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            raise AddressError(f"{address}: an ipc address needs an absolute path")
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise AddressError(f"{address}: the path has {len(os.fsencode(path))} bytes, the limit is {MAX_IPC_PATH}")
    elif not address.startswith(("tcp://", "inproc://")):
        raise AddressError(f"{address}: expected ipc:///path, tcp://host:port or inproc://name")


def claim_ipc_path(address: str, *, by_force: bool = False) -> None:
    """Sweep a dead process's socket file. AddressTaken if a live one listens there (ZeroMQ would take it over).

    `by_force` takes the path away from it: it goes on listening where nobody finds it.
    """
    path = address.removeprefix("ipc://")
    if not os.path.exists(path):
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise AddressError(f"{address}: a file that is not a socket is in the way")
    pid = listener_pid(path)
    if pid is not None and not by_force:
        raise AddressTaken(address, describe_process(pid))
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # its owner was faster


def listener_pid(path: str) -> int | None:
    """The process that listens on a unix socket (0: one that can't be seen from here), None if nobody does."""
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
    """Like `listener_pid`, for an ipc or tcp address; who listens on the latter can't be told (0)."""
    if address.startswith("ipc://"):
        return listener_pid(address.removeprefix("ipc://"))
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        return None
    return 0


def file_identity(path: str) -> tuple[int, int] | None:
    """What tells a file from another one that has come to lie in its place; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def describe_process(pid: int) -> str:
    """A process in words: its number and since when it runs; "" if it can't be seen from here."""
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.stat(f"/proc/{pid}").st_mtime))
        with open(f"/proc/{pid}/stat", "rb") as file:
            stopped = file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return ""
    return f"pid {pid}, since {since}{', which is stopped' if stopped else ''}"


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A bounded socket that never holds up the end of its process."""
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, LINGER_MS)
    made.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    made.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    made.setsockopt(zmq.IMMEDIATE, 0)
    return made


_monitors = itertools.count()


class Monitor:
    """What ZeroMQ tells of a socket's connections: the `events` that have happened, when asked.

    It tells nothing of connections within the process; then there is no `socket` either.
    """

    def __init__(self, watched: zmq.Socket[bytes], address: str, events: int) -> None:
        self._watched = watched
        self.socket: zmq.Socket[bytes] | None = None
        if not address.startswith("inproc://"):
            # A name of its own: pyzmq's is made from the descriptor, which may be that of a socket just closed.
            self.socket = watched.get_monitor_socket(events, f"inproc://monitor-{next(_monitors)}")

    def events(self) -> list[int]:
        """What has happened since the last call."""
        found: list[int] = []
        while self.socket is not None:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            found.append(struct.unpack_from("=hi", frames[0])[0])
        return found

    def close(self) -> None:
        """Stop; call it before the watched socket is closed."""
        if self.socket is not None:
            self._watched.disable_monitor()
            self.socket.close(linger=0)


def check_hello(hello: Hello) -> Refused | None:
    """None if this build can speak with the sender, else the refusal to send back."""
    if hello.version != wire.PROTOCOL_VERSION:
        return Refused(
            wire.BAD_VERSION,
            f"{hello.role} {hello.instance} speaks protocol {hello.version}, this side {wire.PROTOCOL_VERSION}",
        )
    if hello.schema_digest != wire.SCHEMA_DIGEST:
        return Refused(
            wire.BAD_DIGEST,
            f"{hello.role} {hello.instance} has message schema {hello.schema_digest}, "
            f"this side {wire.SCHEMA_DIGEST}: both must run the same build",
        )
    return None


class Attached:
    """Runs `on_ready` from an asyncio loop whenever the (edge-triggered) ZeroMQ descriptor may have messages."""

    def __init__(self, socket: zmq.Socket[bytes], on_ready: Callable[[], None]) -> None:
        import asyncio

        self._socket = socket
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)
        self.pending = False

    def _readable(self) -> None:
        self.pending = False
        if self._socket.closed:
            return
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_ready()

    def recheck(self) -> None:
        """After a send the descriptor's edge may have been consumed: look again once control returns to the loop."""
        if not self.pending:
            self.pending = True
            self._loop.call_soon(self._readable)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
