"""What both ends of a link need beneath a channel: addresses, sockets, counters, errors, and the check of a Hello.

Nothing here keeps a session: that is `protocol.channels`.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from protocol import wire
from protocol.messages import Hello, Refused
from protocol.places import describe_process

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
    """Another live process listens at the address: `pid`, or 0 for one that can't be seen from here."""

    def __init__(self, address: str, pid: int = 0) -> None:
        holder = describe_process(pid)
        super().__init__(f"{address}: another live process listens there{holder and f': {holder}'}")
        self.pid = pid


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
