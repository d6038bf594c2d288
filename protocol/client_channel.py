"""The connecting end of a link: one peer, and a session that is opened again whenever it is lost.

The binding end is in `protocol.channels`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from protocol import wire
from protocol.links import (
    HANDSHAKE_MS,
    HEARTBEAT_INTERVAL_S,
    HELLO_INTERVAL_S,
    Attached,
    ChannelError,
    ChannelFull,
    LinkStats,
    Monitor,
    PeerGone,
    SeldomLog,
    check_address,
    new_socket,
)
from protocol.messages import Goodbye, Heartbeat, Hello, Refused, Welcome
from protocol.security import OPEN, LinkSecurity

log = logging.getLogger("triptych.link")

RECONNECT_MS, RECONNECT_MAX_MS = 10, 50
EAGER_S, EAGER_HELLO_INTERVAL_S = 2.0, 0.04
REACHED_S = HANDSHAKE_MS / 1000 + 1.5
"""A process that is stopped has its connections accepted by the kernel, again and again, and answers none."""
EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

R = TypeVar("R", bound=msgspec.Struct)


class ClientChannel(Generic[R]):
    """The connecting side: one peer, a session that `tick` opens and, when it is lost, opens again.

    `hello` is called for each attempt, so it can carry the newest epoch. The owner sees the peer's Welcome, and a
    Refused or Goodbye that ends the session, among the messages of `receive`; `connected` says whether one is open,
    and `lost` why the last one ended. A peer whose process ends is missed at once, one that hangs after `silence_s`.
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
        security: LinkSecurity = OPEN,
    ) -> None:
        check_address(address)
        self.address = address
        self.stats = LinkStats()
        self.connected = False
        self.lost = ""
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
        self._lost_at = -1e9
        self._quiet_until = -1e9
        self._linked = address.startswith("inproc://")  # of which ZeroMQ reports no events
        self._accepted_at = -1e9
        self._cut = False
        self._attached: list[Attached] = []
        self._seldom = SeldomLog(clock)
        self.socket = new_socket(context, zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(12))
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        security.guard_client(self.socket, address)
        self._monitor = Monitor(self.socket, address, EVENTS)
        self.socket.connect(address)

    @property
    def pollable(self) -> list[zmq.Socket[bytes]]:
        """What a poll loop waits for: messages, and news of the connection (which `tick` takes in)."""
        return [self.socket, self._monitor.socket] if self._monitor.socket is not None else [self.socket]

    @property
    def linked(self) -> bool:
        """Whether there is a connection, with a session or without."""
        return self._linked

    @property
    def unresponsive(self) -> bool:
        """True while something accepts connections at the address and hasn't said a word for `silence_s`."""
        reached = self._linked or self._clock() - self._accepted_at < REACHED_S
        return not self.connected and reached and self.silent_for > self._silence_s

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
        self._watch()
        if self.connected and now - self._last_seen > self._silence_s:
            lost = True
            self._disconnect(f"silent for {now - self._last_seen:.1f} s")
            log.warning("%s: %s, shaking hands again", self.address, self.lost)
            self._connect_anew()
        if not self.connected:
            self._greet()
        elif now - self._last_beat >= HEARTBEAT_INTERVAL_S:
            self._last_beat = now
            try:
                self.send(Heartbeat(time.time_ns(), self.busy_since_ns))
            except ChannelError:
                pass  # the peer's silence is what counts
        return lost

    def _watch(self) -> None:
        """Take in what has become of the connection. A session ends with the one that it was opened on."""
        for event in self._monitor.events():
            if event == zmq.EVENT_CONNECTED:
                self._accepted_at = self._clock()
            elif event == zmq.EVENT_DISCONNECTED:
                self._linked = False
                self._cut = self.connected
                if not self.connected:
                    self._disconnect()  # our Hello may have been answered, and the answer lost: it counts no more
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._linked = True
                self._last_hello = -1e9
        if self._cut and not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._end_cut()

    def _end_cut(self) -> None:
        """All that came before the connection broke has been received."""
        self._cut = False
        if self.connected:
            self._disconnect("the connection broke")

    def _watch_and_greet(self) -> None:
        self._watch()
        if not self.connected:
            self._greet()

    def _connect_anew(self) -> None:
        """Another process may listen at the address by now, while the one that hangs still holds the connection."""
        if self.address.startswith("inproc://"):
            return
        self._linked = self._cut = False
        self._accepted_at = self._clock()  # until the kernel says that nobody is there
        self.socket.disconnect(self.address)
        self.socket.connect(self.address)

    def _greet(self) -> None:
        """Say hello when it is time: often at first, for who replaces the peer is usually about to begin."""
        now = self._clock()
        interval = EAGER_HELLO_INTERVAL_S if now - self._lost_at < EAGER_S else HELLO_INTERVAL_S
        if not self._linked or now - self._last_hello < interval or now < self._quiet_until:
            return
        self._last_hello = now
        try:
            self._raw_send(self._hello(), 0)
        except ChannelFull:
            pass  # whoever is there doesn't read

    def _disconnect(self, why: str = "") -> None:
        """Give up the session; the next Hello opens another, and frames of this one are stale from now on."""
        if self.connected:
            self._lost_at = self._clock()
            self.lost = why
        self.connected = self._cut = False
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
            self._attached[0].recheck()

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
                if self._cut:
                    self._end_cut()
                break
            try:
                session, sequence, message = self._codec.decode(frame)
            except wire.FrameError as error:
                self.stats.bad_frames += 1
                self._seldom.warning(f"{self.address}: bad frame: {error}")
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
                    self._disconnect("the peer knows of no session")
                    self._watch()  # it may be another process: the end of the connection before is not this session's
                    self._greet()
                return False
            if message.code != wire.BAD_FRAME:
                asked = self._last_hello
                self._disconnect()
                self._last_hello = asked  # the next Hello in its time: at once would ask as fast as the peer refuses
            return message.code != wire.REPLAYED  # the answer to that Hello was lost: the next one says another number
        if not self.connected:
            self.stats.stale_frames += 1
            return False
        if sequence != self._expected:
            lost = (sequence - self._expected) & 0xFFFFFFFF
            if lost >= 0x80000000:
                self.stats.stale_frames += 1
                return False
            self.stats.lost_frames += lost
            self._seldom.warning(f"{self.address}: lost {lost} frames")
            if not isinstance(message, Goodbye):
                self._disconnect(f"{lost} frames were lost")
                self._greet()
                return False
        self._expected = (sequence + 1) & 0xFFFFFFFF
        self.stats.received += 1
        if isinstance(message, Goodbye):
            self._disconnect(f"goodbye ({message.code})")
        return True

    def abandon(self, why: str) -> None:
        """Give up a peer that hangs, as if it were silent: what it still says to this session is stale."""
        if self.connected:
            self._disconnect(why)

    def hold_off(self, seconds: float) -> None:
        """Say no Hello for so long."""
        self._quiet_until = self._clock() + seconds

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
        self._attached = [Attached(self.socket, on_ready)]
        if self._monitor.socket is not None:
            self._attached.append(Attached(self._monitor.socket, self._watch_and_greet))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self.socket.closed:
            return
        for attached in self._attached:
            attached.close()
        self._monitor.close()
        self.socket.close()
