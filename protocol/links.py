"""What both ends of a link need beneath a channel: addresses, sockets, counters, errors, and the check of a Hello.

Nothing here keeps a session: that is `protocol.channels`.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from protocol import wire
from protocol.messages import Hello, Refused

HIGH_WATER_MARK = 4096
LINGER_MS = 200
MAX_IPC_PATH = 107


class ChannelError(Exception):
    """A message could not be handed over. The owner decides what becomes of it; it is never dropped silently."""


class PeerGone(ChannelError):
    """There is no session with that peer (never welcomed, restarted, or disconnected)."""


class ChannelFull(ChannelError):
    """The peer doesn't read and the bounded queue to it is full."""


class AddressError(ValueError):
    """An address that can't be bound or connected to, with the reason."""


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


def claim_ipc_path(address: str) -> None:
    """Refuse an ipc path that a live process listens on (ZeroMQ would take it over) and sweep a dead one's file."""
    import socket

    path = address.removeprefix("ipc://")
    if not os.path.exists(path):
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise AddressError(f"{address}: a file that is not a socket is in the way")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(0.5)
        probe.connect(path)
    except OSError:
        os.unlink(path)
    else:
        raise AddressError(f"{address}: another live process listens there")
    finally:
        probe.close()


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IMMEDIATE, 0)
    return socket


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
