"""An HTTP/1.1 client whose cost per streamed chunk is a few microseconds: httptools on an asyncio transport.

It does what a load generator needs (keep-alive, any body framing, bodies handed out as they arrive, each with its
arrival time) and nothing else: no redirects, cookies, compression or proxies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

Clock = Callable[[], float]
BodySink = Callable[[bytes, float], None]

MAX_ERROR_BODY = 64 * 1024


class HttpError(Exception):
    """A request that got no complete HTTP answer. `kind` is what a report counts by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ConnectFailed(HttpError):
    """No connection: refused, unreachable, unknown host, failed TLS."""

    def __init__(self, message: str) -> None:
        super().__init__("connect", message)


class ConnectionDropped(HttpError):
    """The peer closed in the middle. `answered` tells whether any byte of this answer had come."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__("dropped", message)
        self.answered = answered


class BadResponse(HttpError):
    """Bytes that are not HTTP/1.1."""

    def __init__(self, message: str) -> None:
        super().__init__("protocol", message)


@dataclass(slots=True)
class Response:
    """An answer. `body` is empty when it went to a sink; else whole, or cut at 64 KiB for a failed streaming call."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class _Connection(asyncio.Protocol):
    """One keep-alive connection carrying one exchange at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[Response] | None = None
        self._sink: BodySink | None = None
        self._response = Response()
        self._parts: list[bytes] = []
        self._answered = False
        self._to_sink = False
        self._arrival = 0.0
        self.reusable = False

    async def exchange(self, request: bytes, sink: BodySink | None) -> Response:
        """Sends one request and returns its answer once the body has ended. A 200 body goes to `sink` if given."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionDropped("connection closed before the request was sent", answered=False)
        # llhttp keeps state between messages, but not across an aborted one: a new parser costs about a microsecond.
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._parts, self._sink = Response(), [], sink
        self._answered = self._to_sink = self.reusable = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done = self._sink = None

    def abort(self) -> None:
        """Closes now, dropping what was not sent."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own type doesn't derive from it

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done() or self._parser is None:
            self.abort()  # bytes that nobody asked for: the connection can't be trusted any more
            return
        self._answered = True
        self._arrival = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # A sink's own error reaches the caller as it is.
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(BadResponse(f"invalid HTTP from the server: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is None or self._done.done():
            return
        headers = self._response.headers
        if self._response.status and "content-length" not in headers and "transfer-encoding" not in headers:
            self._finish()  # without a length the body ends where the connection does
        else:
            self._fail(ConnectionDropped(f"connection closed: {exc or 'end of stream'}", answered=self._answered))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._response.status = self._parser.get_status_code()
        self._to_sink = self._sink is not None and self._response.status == 200

    def on_body(self, body: bytes) -> None:
        if self._to_sink and self._sink is not None:
            self._sink(body, self._arrival)
        elif self._sink is None or sum(map(len, self._parts)) < MAX_ERROR_BODY:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._response.status < 200:
            self._response = Response()  # an interim answer; the real one follows
            return
        self.reusable = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._response.body = b"".join(self._parts)
            self._done.set_result(self._response)

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.abort()


class HttpClient:
    """Requests to one origin over a pool of keep-alive connections that grows as needed."""

    def __init__(
        self, base_url: str, headers: Mapping[str, str] | None = None, *, clock: Clock = time.perf_counter
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) address: {base_url!r}")
        self._tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._clock = clock
        lines = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        for name, value in lines.items():
            if any(c in name + value for c in "\r\n\0"):
                raise ValueError(f"header {name!r} holds a line break")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, sink: BodySink | None = None
    ) -> Response:
        """One exchange. Raises HttpError when no complete answer came; any status is an answer.

        A pooled connection that the server closed meanwhile is replaced once, if nothing of the answer had come.
        """
        data = self._encode(method, path, body)
        while True:
            connection, reused = await self._acquire()
            try:
                response = await connection.exchange(data, sink)
            except ConnectionDropped as error:
                if reused and not error.answered:
                    continue
                raise
            except BaseException:  # cancellation too: the rest of this answer must not reach the next request
                connection.abort()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.abort()
            return response

    def close(self) -> None:
        """Closes the pooled connections."""
        while self._idle:
            self._idle.pop().abort()

    def _encode(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode("ascii") + self._head
        if body is None:
            return head + b"\r\n"
        return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def _acquire(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._clock), self._host, self._port, ssl=self._tls or None
            )
        except OSError as error:
            raise ConnectFailed(f"can't connect to {self._host}:{self._port}: {error}") from error
        return connection, False
