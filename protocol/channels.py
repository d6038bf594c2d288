"""Typed channels over ZeroMQ: the one place that handles frames, sessions, sequence numbers and handshakes.

`ServerChannel` (ROUTER) binds and talks to many peers, `ClientChannel` (DEALER) connects and talks to one. Neither
blocks: `receive()` returns what has arrived, `send()` succeeds or raises. Both work from a poll loop (`.socket`)
and from asyncio (`attach`). They don't decide anything: who is welcome is the owner's business.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from protocol import wire
from protocol.links import (
    MAX_IPC_PATH,
    AddressError,
    Attached,
    ChannelError,
    ChannelFull,
    LinkStats,
    PeerGone,
    check_address,
    check_hello,
    claim_ipc_path,
    new_instance,
    new_socket,
)
from protocol.messages import Goodbye, Heartbeat, Hello, Refused, Welcome

__all__ = [
    "HEARTBEAT_INTERVAL_S",
    "MAX_IPC_PATH",
    "AddressError",
    "ChannelError",
    "ChannelFull",
    "ClientChannel",
    "LinkStats",
    "PeerGone",
    "ServerChannel",
    "new_instance",
]

log = logging.getLogger("triptych.link")

HELLO_INTERVAL_S = 0.2
HEARTBEAT_INTERVAL_S = 0.5

R = TypeVar("R", bound=msgspec.Struct)


@dataclass
class _Session:
    number: int
    peer: Hello
    sent: int = 0
    expected: int = 0
    last_seen: float = field(default_factory=time.monotonic)


class ServerChannel(Generic[R]):
    """The binding side. `receives` is the union of messages that peers may send.

    A peer exists from `welcome()` until `drop()`. Messages of peers without a session are answered with
    Refused(no_session), so that a peer which outlived its session shakes hands again.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, receives: Any, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_address(address)
        if address.startswith("ipc://"):
            claim_ipc_path(address)
        self.address = address
        self.stats = LinkStats()
        self._clock = clock
        self._codec: wire.Codec[R] = wire.Codec(receives)
        self._sessions: dict[bytes, _Session] = {}
        self._hellos: dict[bytes, tuple[int, Hello]] = {}
        self._attached: Attached | None = None
        self.socket = new_socket(context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise AddressError(f"{address}: can't bind: {error}") from error
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)

    @property
    def bound_address(self) -> str:
        """The address with a wildcard port resolved."""
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    @property
    def peers(self) -> list[bytes]:
        """Identities with a session."""
        return list(self._sessions)

    def peer(self, identity: bytes) -> Hello | None:
        """The Hello of a welcomed peer."""
        session = self._sessions.get(identity)
        return session.peer if session else None

    def silent_for(self, identity: bytes) -> float:
        """Seconds since the peer's last frame."""
        return self._clock() - self._sessions[identity].last_seen

    def receive(self, limit: int = 1000) -> list[tuple[bytes, R]]:
        """All messages that have arrived, at most `limit`, in order per peer. Hellos come through as messages."""
        messages: list[tuple[bytes, R]] = []
        while len(messages) < limit:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            identity = frames[0]
            if len(frames) != 2:
                self._bad(identity, f"{len(frames) - 1} frames instead of 1")
                continue
            try:
                number, sequence, message = self._codec.decode(frames[1])
            except wire.FrameError as error:
                self._bad(identity, str(error))
                continue
            if self._take(identity, number, sequence, message):
                messages.append((identity, message))
        return messages

    def _take(self, identity: bytes, number: int, sequence: int, message: R) -> bool:
        """Session bookkeeping for one decoded frame; True if the owner should see it."""
        session = self._sessions.get(identity)
        if isinstance(message, Hello):
            if session is not None and session.number == number:
                return False  # a repeated Hello that our Welcome has already answered
            refusal = check_hello(message)
            if refusal is not None:
                self._refuse(identity, number, refusal)
                return False
            if self._hellos.get(identity, (None, None))[0] == number:
                return False  # repeated while the owner still ponders
            self._hellos[identity] = (number, message)
            return True
        if session is None or session.number != number:
            self.stats.stale_frames += 1
            if session is None:
                self._refuse(identity, number, Refused(wire.NO_SESSION, "say hello first"))
            return False
        session.last_seen = self._clock()
        if sequence != session.expected:
            lost = (sequence - session.expected) & 0xFFFFFFFF
            if lost >= 0x80000000:
                self.stats.stale_frames += 1  # a replayed frame
                return False
            self.stats.lost_frames += lost
            log.error("lost %d frames from %s %s", lost, session.peer.role, session.peer.instance)
        session.expected = (sequence + 1) & 0xFFFFFFFF
        self.stats.received += 1
        return True

    def _bad(self, identity: bytes, why: str) -> None:
        self.stats.bad_frames += 1
        if self.stats.bad_frames == 1 or self.stats.bad_frames % 1000 == 0:
            log.warning("%s: bad frame (%d so far): %s", self.address, self.stats.bad_frames, why)
        session = self._sessions.get(identity)
        self._raw_send(identity, session.number if session else 0, 0, Refused(wire.BAD_FRAME, why[:200]))

    def _refuse(self, identity: bytes, number: int, refusal: Refused) -> None:
        self.stats.refused_hellos += 1
        self._raw_send(identity, number, 0, refusal)

    def _raw_send(self, identity: bytes, number: int, sequence: int, message: msgspec.Struct) -> bool:
        frame = self._codec.encode(message, number, sequence)
        try:
            self.socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.stats.send_failures += 1
            return False
        if self._attached:
            self._attached.recheck()
        return True

    def welcome(self, identity: bytes, welcome: Welcome) -> None:
        """Open a session for the peer whose Hello came through `receive`. Raises PeerGone if it has left."""
        number, hello = self._hellos.pop(identity)
        self._sessions[identity] = _Session(number, hello, last_seen=self._clock())
        self.send(identity, welcome)

    def refuse(self, identity: bytes, refusal: Refused) -> None:
        """Turn down the peer whose Hello came through `receive`."""
        number, _ = self._hellos.pop(identity)
        self._refuse(identity, number, refusal)

    def send(self, identity: bytes, message: msgspec.Struct) -> None:
        """Send to a welcomed peer. Raises PeerGone or ChannelFull; encoding errors reach the caller unsent."""
        session = self._sessions.get(identity)
        if session is None:
            raise PeerGone("no session with this peer")
        frame = self._codec.encode(message, session.number, session.sent)
        try:
            self.socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.Again as error:
            self.stats.send_failures += 1
            raise ChannelFull(f"{session.peer.role} {session.peer.instance} doesn't read") from error
        except zmq.ZMQError as error:
            self.stats.send_failures += 1
            raise PeerGone(f"{session.peer.role} {session.peer.instance}: {error}") from error
        session.sent = (session.sent + 1) & 0xFFFFFFFF
        self.stats.sent += 1
        if self._attached:
            self._attached.recheck()

    def drop(self, identity: bytes, goodbye: Goodbye | None = None) -> None:
        """End a peer's session, telling it why if it still listens. Idempotent."""
        session = self._sessions.pop(identity, None)
        if session is not None and goodbye is not None:
            self._raw_send(identity, session.number, session.sent, goodbye)

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` from the running asyncio loop when messages wait; it must call `receive` until empty."""
        self._attached = Attached(self.socket, on_ready)

    def close(self) -> None:
        """Close the socket and remove its file. Idempotent."""
        if self.socket.closed:
            return
        if self._attached:
            self._attached.close()
        self.socket.close()
        if self.address.startswith("ipc://"):
            try:
                os.unlink(self.address.removeprefix("ipc://"))
            except OSError:
                pass


class ClientChannel(Generic[R]):
    """The connecting side: one peer, a session that `tick` opens and, after `NO_SESSION` or silence, opens again.

    `hello` is called for each attempt, so it can carry the newest epoch. The owner sees the peer's Welcome, and a
    Refused or Goodbye that ends the session, among the messages of `receive`; `connected` says whether one is open.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        receives: Any,
        hello: Callable[[], Hello],
        *,
        silence_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_address(address)
        self.address = address
        self.stats = LinkStats()
        self.connected = False
        self.busy_since_ns = 0
        self._silence_s = silence_s
        self._clock = clock
        self._hello = hello
        self._codec: wire.Codec[R] = wire.Codec(receives)
        self._session = secrets.randbits(31)
        self._sent = 0
        self._expected = 0
        self._last_seen = clock()
        self._last_hello = -1e9
        self._last_beat = -1e9
        self._attached: Attached | None = None
        self.socket = new_socket(context, zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(12))
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self.socket.connect(address)

    @property
    def silent_for(self) -> float:
        """Seconds since the peer's last frame (or since the channel was made)."""
        return self._clock() - self._last_seen

    def tick(self) -> bool:
        """Do what time asks for: a Hello while not connected, a heartbeat while connected. Call ≥ 4 times a second.

        Returns True if the session was just given up because the peer has been silent too long.
        """
        now = self._clock()
        lost = False
        if self.connected and now - self._last_seen > self._silence_s:
            self._disconnect()
            lost = True
            log.warning("%s: silent for %.1f s, shaking hands again", self.address, now - self._last_seen)
        if not self.connected and now - self._last_hello >= HELLO_INTERVAL_S:
            self._last_hello = now
            try:
                self._raw_send(self._hello(), 0)
            except ChannelFull:
                pass  # nobody is there yet; the queue keeps the earlier ones
        if self.connected and now - self._last_beat >= HEARTBEAT_INTERVAL_S:
            self._last_beat = now
            try:
                self.send(Heartbeat(time.time_ns(), self.busy_since_ns))
            except ChannelError:
                pass  # the peer's silence is what counts
        return lost

    def _disconnect(self) -> None:
        """Give up the session; the next Hello opens another, and frames of this one are stale from now on."""
        self.connected = False
        self._session = (self._session + 1) & 0x7FFFFFFF
        self._last_hello = -1e9

    def _raw_send(self, message: msgspec.Struct, sequence: int) -> None:
        try:
            self.socket.send(self._codec.encode(message, self._session, sequence), zmq.NOBLOCK)
        except zmq.Again as error:
            self.stats.send_failures += 1
            raise ChannelFull(f"{self.address}: the queue to the peer is full") from error
        self.stats.sent += 1
        if self._attached:
            self._attached.recheck()

    def send(self, message: msgspec.Struct) -> None:
        """Send within the session. Raises PeerGone, ChannelFull, or the encoding error (then nothing was sent)."""
        if not self.connected:
            raise PeerGone(f"{self.address}: no session")
        self._raw_send(message, self._sent)
        self._sent = (self._sent + 1) & 0xFFFFFFFF

    def receive(self, limit: int = 1000) -> list[R]:
        """All messages that have arrived, at most `limit`, in order."""
        messages: list[R] = []
        while len(messages) < limit:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                session, sequence, message = self._codec.decode(frame)
            except wire.FrameError as error:
                self.stats.bad_frames += 1
                log.warning("%s: bad frame: %s", self.address, error)
                continue
            if self._take(session, sequence, message):
                messages.append(message)
        return messages

    def _take(self, session: int, sequence: int, message: R) -> bool:
        if session != self._session:
            self.stats.stale_frames += 1
            return False
        self._last_seen = self._clock()
        if isinstance(message, Welcome) and not self.connected:
            self.connected = True
            self._sent = 0
            self._expected = 1
            self._last_beat = self._clock()
            return True
        if isinstance(message, Refused):
            if message.code == wire.NO_SESSION:
                if self.connected:
                    self._disconnect()
                return False
            if message.code != wire.BAD_FRAME:
                asked = self._last_hello
                self._disconnect()
                self._last_hello = asked  # the next Hello in its time: at once would ask as fast as the peer refuses
            return True
        if not self.connected:
            self.stats.stale_frames += 1
            return False
        if sequence != self._expected:
            lost = (sequence - self._expected) & 0xFFFFFFFF
            if lost >= 0x80000000:
                self.stats.stale_frames += 1
                return False
            self.stats.lost_frames += lost
            log.error("%s: lost %d frames", self.address, lost)
        self._expected = (sequence + 1) & 0xFFFFFFFF
        self.stats.received += 1
        if isinstance(message, Goodbye):
            self._disconnect()
        return True

    def leave(self, goodbye: Goodbye) -> None:
        """Say goodbye, if there is anyone to say it to."""
        if self.connected:
            try:
                self.send(goodbye)
            except ChannelError:
                pass
            self._disconnect()

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` from the running asyncio loop when messages wait; it must call `receive` until empty."""
        self._attached = Attached(self.socket, on_ready)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self.socket.closed:
            return
        if self._attached:
            self._attached.close()
        self.socket.close()
