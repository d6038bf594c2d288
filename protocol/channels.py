"""Typed channels over ZeroMQ: the one place that handles frames, sessions, sequence numbers and handshakes.

`ServerChannel` (ROUTER) binds and talks to many peers, `ClientChannel` (DEALER) connects and talks to one. Neither
blocks: `receive()` returns what has arrived, `send()` succeeds or raises. Both work from a poll loop (`.socket`)
and from asyncio (`attach`). They don't decide anything: who is welcome is the owner's business.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from protocol import wire
from protocol.client_channel import ClientChannel
from protocol.links import (
    HEARTBEAT_INTERVAL_S,
    MAX_IPC_PATH,
    AddressError,
    AddressTaken,
    Attached,
    ChannelError,
    ChannelFull,
    LinkStats,
    Monitor,
    PeerGone,
    SeldomLog,
    check_address,
    check_hello,
    new_instance,
    new_socket,
)
from protocol.messages import Goodbye, Hello, Refused, Welcome
from protocol.places import Place, PlaceTaken
from protocol.security import OPEN, LinkSecurity, SecurityError

__all__ = [
    "HEARTBEAT_INTERVAL_S",
    "MAX_IPC_PATH",
    "AddressError",
    "AddressTaken",
    "ChannelError",
    "ChannelFull",
    "ClientChannel",
    "LinkStats",
    "PeerGone",
    "ServerChannel",
    "new_instance",
]

log = logging.getLogger("triptych.link")

MAX_FIRST_FRAME_BYTES = 64 * 1024
"""A peer without a session has nothing to say but a Hello."""
FRAMES_LOST = Refused(wire.NO_SESSION, "frames were lost: say hello again")
HELLOS_KEPT = 4096
LOOK_INTERVAL_S = 0.5
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

R = TypeVar("R", bound=msgspec.Struct)


@dataclass
class _Session:
    number: int
    peer: Hello
    sent: int = 0
    expected: int = 0
    broken: bool = False
    last_seen: float = field(default_factory=time.monotonic)


class ServerChannel(Generic[R]):
    """The binding side. `receives` is the union of messages that peers may send.

    A peer exists from `welcome()` until `drop()`. Messages of peers without a session are answered with
    Refused(no_session), so that a peer which outlived its session shakes hands again; so are those that come after a
    lost one, since they may rest on what it said. A Hello that was captured and is sent again, by whomever, opens
    nothing.

    Without `bind` it serves nobody until `bind()` is called.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        receives: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        security: LinkSecurity = OPEN,
        bind: bool = True,
    ) -> None:
        check_address(address)
        self.address = address
        self.stats = LinkStats()
        self.bound = False
        self._place: Place | None = None
        self._clock = clock
        self._codec: wire.Codec[R] = wire.Codec(receives)
        self._sessions: dict[bytes, _Session] = {}
        self._hellos: dict[bytes, tuple[int, Hello]] = {}
        self._said: dict[tuple[str, int], None] = {}
        self._attached: Attached | None = None
        self._seldom = SeldomLog(clock)
        self._next_look = 0.0
        self.socket = new_socket(context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._monitor = Monitor(self.socket, address, FAILED_HANDSHAKES)
        try:
            security.guard_server(context, self.socket, address)
            if bind:
                self.bind()
        except (AddressError, SecurityError) as error:
            self._monitor.close()
            self.socket.close(linger=0)
            raise error if isinstance(error, AddressError) else AddressError(str(error)) from error

    def bind(self, *, by_force: bool = False) -> None:
        """Listen at the address. AddressTaken if another process does, unless `by_force` takes its socket file away."""
        try:
            if self.address.startswith("ipc://"):
                self._bind_in_place(self.address.removeprefix("ipc://"), by_force)
            else:
                self.socket.bind(self.address)
        except PlaceTaken as taken:
            raise AddressTaken(self.address, taken.pid) from taken
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressTaken(self.address) from error
            raise AddressError(f"{self.address}: can't bind: {error}") from error
        except OSError as error:
            raise AddressError(f"{self.address}: can't bind: {error}") from error
        self.bound = True

    def _bind_in_place(self, path: str, by_force: bool) -> None:
        place = Place.claim(path, by_force=by_force)
        try:
            self.socket.bind(self.address)
            os.chmod(path, 0o600)
            try:
                place.listening()
            except PlaceTaken:
                self.socket.unbind(self.address)
                raise
        except (OSError, zmq.ZMQError):
            place.release()
            raise
        self._place = place

    @property
    def bound_address(self) -> str:
        """The address with a wildcard port resolved."""
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    @property
    def displaced(self) -> bool:
        """Whether another process has taken the address by force, so that who connects from now on gets there."""
        return self._place is not None and self._place.taken

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
        self._look()
        while len(messages) < limit:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            identity = frames[0]
            if len(frames) != 2:
                self._bad(identity, f"{len(frames) - 1} frames instead of 1")
                continue
            if len(frames[1]) > MAX_FIRST_FRAME_BYTES and identity not in self._sessions:
                self._bad(identity, f"{len(frames[1])} bytes from a peer without a session")
                continue
            try:
                number, sequence, message = self._codec.decode(frames[1])
            except wire.FrameError as error:
                self._bad(identity, str(error))
                continue
            if self._take(identity, number, sequence, message):
                if isinstance(message, Hello):  # an earlier one that nobody has answered yet counts no more
                    messages = [one for one in messages if one[0] != identity or not isinstance(one[1], Hello)]
                messages.append((identity, message))
        return messages

    def _look(self) -> None:
        """Count the connections that never got as far as a frame."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_INTERVAL_S
        failed = len(self._monitor.events())
        if failed:
            self.stats.failed_handshakes += failed
            plural = "" if failed == 1 else "s"
            self._seldom.warning(f"{self.address}: {failed} connection{plural} spoke no ZeroMQ, or without our key")

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
            if self._is_replayed(number, message):
                self.stats.stale_frames += 1
                self._refuse(identity, number, Refused(wire.REPLAYED, "this hello was said before"))
                return False
            self._hellos[identity] = (number, message)
            return True
        if session is None or session.number != number:
            self.stats.stale_frames += 1
            if session is None:
                self._refuse(identity, number, Refused(wire.NO_SESSION, "say hello first"))
            return False
        session.last_seen = self._clock()
        if session.broken:
            self._refuse(identity, number, FRAMES_LOST)
            return False
        if sequence != session.expected:
            lost = (sequence - session.expected) & 0xFFFFFFFF
            if lost >= 0x80000000:
                self.stats.stale_frames += 1  # a replayed frame
                return False
            self.stats.lost_frames += lost
            self._seldom.warning(f"lost {lost} frames from {session.peer.role} {session.peer.instance}")
            if not isinstance(message, Goodbye):
                session.broken = True
                self._refuse(identity, number, FRAMES_LOST)
                return False
        session.expected = (sequence + 1) & 0xFFFFFFFF
        self.stats.received += 1
        return True

    def _is_replayed(self, number: int, hello: Hello) -> bool:
        """Whether this Hello was said before: an instance gives each of its sessions a number of its own."""
        said = (hello.instance, number)
        if said in self._said:
            self._seldom.warning(f"{self.address}: a hello of {hello.role} {hello.instance} was said before")
            return True
        self._said[said] = None
        if len(self._said) > HELLOS_KEPT:
            del self._said[next(iter(self._said))]
        return False

    def _bad(self, identity: bytes, why: str) -> None:
        self.stats.bad_frames += 1
        self._seldom.warning(f"{self.address}: bad frame ({self.stats.bad_frames} so far): {why}")
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
        if identity not in self._hellos:
            raise PeerGone("it has said no hello since the last answer")
        number, hello = self._hellos.pop(identity)
        self._sessions[identity] = _Session(number, hello, last_seen=self._clock())
        self.send(identity, welcome)

    def refuse(self, identity: bytes, refusal: Refused) -> None:
        """Turn down the peer whose Hello came through `receive`, if it hasn't been answered."""
        if identity in self._hellos:
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
        self._monitor.close()
        self.socket.close()
        if self._place is not None:
            self._place.release()
