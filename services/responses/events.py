"""The events of a response that runs in the background: kept by number, and followed by whoever asks for them.

A follower that left comes back for what it missed. Followers don't hold up the answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.types import Send

from services.bodies import ClientGone
from services.errors import ApiError, invalid
from services.journal import Call
from services.sse import PING, EventStream

MAX_BYTES = 8 * 2**20
"""Of one response's events: the first ones make room."""
MAX_NEWS = 1000


@dataclass(frozen=True, slots=True)
class News:
    """The next events, and whether there will be no more after them."""

    events: Sequence[bytes]
    over: bool


class EventLog:
    """Events by their sequence numbers, from 0. Use from one event loop only."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._first = 0
        self._closed = False
        self._followers: set[Call] = set()
        self.size = 0
        """Bytes of what is kept."""

    def append(self, event: bytes) -> None:
        """The next event."""
        self._events.append(event)
        self.size += len(event)
        while self.size > MAX_BYTES:
            self.size -= len(self._events.popleft())
            self._first += 1
        self._wake()

    def close(self) -> None:
        """There are no more. Idempotent."""
        self._closed = True
        self._wake()

    def news(self, after: int) -> News:
        """What comes after the event of this number; -1: all. ApiError 400 for what is no longer kept."""
        skipped = after + 1 - self._first
        if skipped < 0:
            raise invalid(f"starting_after: the events up to {self._first - 1} are no longer kept", "starting_after")
        places = range(skipped, min(skipped + MAX_NEWS, len(self._events)))
        events = tuple(self._events[place] for place in places)  # cheap near the end, where who follows is
        return News(events, self._closed and skipped + len(events) >= len(self._events))

    def follow(self, call: Call) -> None:
        """Wake this call when there is news."""
        self._followers.add(call)

    def leave(self, call: Call) -> None:
        """No longer."""
        self._followers.discard(call)

    def _wake(self) -> None:
        for call in self._followers:
            call.wake()


class _Framing:
    """What goes around the events."""

    ping = PING
    done = b""

    def failure(self, error: ApiError) -> bytes:
        """An event that is none of the response's: it may go on, but can't be followed."""
        body = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(body)


async def send_events(
    look: Callable[[int], Awaitable[News]], after: int, call: Call, send: Send, *, wait_s: float | None, ping_s: float
) -> None:
    """Stream the events after a number. Looks again when the call is woken, and after `wait_s`; None: only then.

    Raises ApiError while a status can still be sent, ClientGone if nobody is left.
    """
    news = await look(after)
    stream = EventStream(send, call, _Framing())
    await stream.start()
    try:
        while True:
            after += len(news.events)
            await stream.events(news.events)
            if news.over:
                break
            if not news.events:
                await _woken(call, wait_s, ping_s)
                await stream.ping()
            news = await look(after)
        await stream.finish()
    except ApiError as error:
        await stream.fail(error)


async def _woken(call: Call, wait_s: float | None, ping_s: float) -> None:
    silent_s = call.clock() - call.last_write
    until_ping = max(0.0, ping_s - silent_s) if ping_s else None
    waits = [one for one in (wait_s, until_ping) if one is not None]
    try:
        async with asyncio.timeout(min(waits, default=None)):
            await call.changed()
    except TimeoutError:
        call.ping_due = until_ping is not None and call.clock() - call.last_write >= ping_s
    if call.disconnected:
        raise ClientGone
