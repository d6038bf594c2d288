"""Server-sent events over raw ASGI `send`: headers late, pings while silent, one end.

It knows nothing about what the events say. Headers go out with `start`, so until then an error can still be a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from services.errors import ApiError
from services.journal import Call

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DIRECT = "triptych.direct"
"""The extension in an ASGI scope in which a server offers its `DirectBody`, as "body"."""
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class Framing(Protocol):
    """What a stream carries beside the answer: sent in silence, at the end, and if it fails."""

    ping: bytes
    done: bytes

    def failure(self, error: ApiError) -> bytes:
        """The events that end a started stream with an error; `done` follows."""
        ...


class DirectBody(Protocol):
    """The way to a client without any `await`, for the middle of a body that is under way."""

    def writable(self) -> bool:
        """Whether `write` may be called now: the client keeps up, and is there."""
        ...

    def write(self, body: bytes) -> None:
        """What a body message with `more_body` does, at once."""
        ...


class Outlet:
    """An ASGI `send` with the server's direct way beside it. Who wraps it loses that way: then nothing goes past it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self.direct: DirectBody | None = scope.get("extensions", {}).get(DIRECT, {}).get("body")

    async def __call__(self, message: Message) -> None:
        """Send a message."""
        await self._send(message)


class EventStream:
    """One stream of events to one client. While the client lags behind, writes wait and tokens stay in the journal."""

    def __init__(self, send: Send, call: Call, framing: Framing) -> None:
        self._send = send
        self._direct = send.direct if isinstance(send, Outlet) else None
        self._call = call
        self._framing = framing
        self.started = False

    async def start(self) -> None:
        """Send status 200 and the headers."""
        self.started = self._call.streaming = True
        await self._write({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def events(self, events: Iterable[bytes]) -> None:
        """Send complete events in one piece."""
        body = b"".join(events)
        if body:
            await self._write({"type": "http.response.body", "body": body, "more_body": True})

    def writable(self) -> bool:
        """Whether `write` may be called now."""
        return self._direct is not None and self._direct.writable()

    def write(self, events: Iterable[bytes]) -> None:
        """Send complete events in one piece, at once."""
        body = b"".join(events)
        if body and self._direct is not None:
            self._direct.write(body)
            self._written()

    async def ping(self) -> None:
        """Send a ping if one is due: proxies close connections that are silent."""
        if self._call.ping_due:
            await self.events((self._framing.ping,))

    async def finish(self, last: bytes = b"") -> None:
        """Send what is left and the end marker, and end the body."""
        await self._write({"type": "http.response.body", "body": last + self._framing.done, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """End a started stream with an error."""
        await self.finish(self._framing.failure(error))

    async def _write(self, message: dict[str, object]) -> None:
        await self._send(message)
        self._written()

    def _written(self) -> None:
        self._call.last_write = self._call.clock()
        self._call.ping_due = False


async def watch_disconnect(receive: Receive, call: Call) -> None:
    """Tell the call when its client goes away. Runs as a task beside the handler, after the body was read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            call.disconnect()
            return


class DisconnectWatch:
    """Context manager around a handler that runs `watch_disconnect` meanwhile."""

    def __init__(self, receive: Receive, call: Call) -> None:
        self._receive = receive
        self._call = call

    def __enter__(self) -> None:
        self._task = asyncio.get_running_loop().create_task(watch_disconnect(self._receive, self._call))

    def __exit__(self, *_: object) -> None:
        self._task.cancel()
