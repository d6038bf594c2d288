"""uvicorn's HTTP connection with what it lacks: one request at a time, and limits on unread data and on idling.

It knows nothing about what is asked and answered.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from services.errors import ApiError
from services.sse import DIRECT

MAX_HEAD = 256 * 1024


class Connection(HttpToolsProtocol):
    """One client's connection.

    - A request that comes before the answer to the one before it (pipelining) is not read: the connection closes after
      the answer under way, and the client asks again, as RFC 9112 wants it to. So no request waits unseen behind
      another, reading never pauses, and a client that leaves is noticed whatever it had sent.
    - A client that leaves more than the transport's high-water mark (64 KiB) unread for `write_timeout_s`, or any rest
      of an answer that is complete, is disconnected; `on_write_timeout` counts it. 0: never.
    - An answer's body can be written without `await`: it is the `DirectBody` of each request's scope.
    - A connection that asks for nothing is closed after the keep-alive time, the first time too, and so is one whose
      request line or headers stop coming. They may have 256 KiB.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        write_timeout_s: float = 0.0,
        on_write_timeout: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._write_timeout_s = write_timeout_s
        self._on_write_timeout = on_write_timeout
        self._overdue: asyncio.TimerHandle | None = None
        self._pipelined = False
        self._head: int | None = None  # bytes of a request line and headers that are not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request."""
        super().connection_made(transport)
        self._limit_idleness()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request, if one is under way."""
        self._stop_clock()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._withdraw()

    # --- one request at a time --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read on, unless what comes belongs to a request that won't be answered here."""
        if not self._pipelined:
            super().data_received(data)
            self._limit_head(len(data))
            self._limit_idleness()

    def _limit_idleness(self) -> None:
        """What comes while nothing is under way (the rest of a body that was answered unread, part of a request line)
        is not a request yet: the next byte has to come within the keep-alive time."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        """A request begins: the next one, or one too early."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._pipelined = True
            self.cycle.keep_alive = False
        else:
            self._head = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        if not self._pipelined:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if not self._pipelined:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request can be handed on."""
        if not self._pipelined:
            self._head = None
            self.scope["extensions"] = {DIRECT: {"body": self}}
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        if not self._pipelined:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if not self._pipelined:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, unless it came too early: the answer under way is still to be whole."""
        if not self._pipelined:
            self._refuse(ApiError(400, msg, code="invalid_http"))

    def _limit_head(self, size: int) -> None:
        if self._head is not None:
            self._head += size
            if self._head > MAX_HEAD:
                self._head = None
                message = f"The request line and headers are larger than the limit of {MAX_HEAD} bytes"
                self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what never becomes a request, and close."""
        body = error.body()
        phrase = http.HTTPStatus(error.status).phrase
        head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    # --- the direct way to the client ---------------------------------------------------------------------------

    def writable(self) -> bool:
        """Whether a part of the body under way may be written now."""
        cycle = self.cycle
        under_way = cycle is not None and cycle.response_started and not cycle.response_complete
        return bool(
            under_way
            and cycle.chunked_encoding
            and not cycle.disconnected
            and not self.flow.write_paused
            and not self.transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        """Write a part of the body as one chunk."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def _withdraw(self) -> None:
        """A scope that holds the connection it belongs to would wait for a collection."""
        if self.cycle is not None:
            self.cycle.scope.pop("extensions", None)

    # --- a limit on unread data -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client reads too slowly; whoever writes waits from now on."""
        super().pause_writing()
        self._start_clock()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._stop_clock()

    def on_response_complete(self) -> None:
        """All is written. What the client hasn't read yet is given the same time."""
        super().on_response_complete()
        self._withdraw()
        if self.transport.get_write_buffer_size() > 0:
            self._start_clock()

    def _start_clock(self) -> None:
        if self._overdue is None and self._write_timeout_s > 0:
            self._overdue = self.loop.call_later(self._write_timeout_s, self._give_up, self.cycle)

    def _stop_clock(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self, cycle: object) -> None:
        self._overdue = None
        # A complete answer may have been read to its end without ever having been held up.
        if self.flow.write_paused or (self.cycle is cycle and self.transport.get_write_buffer_size() > 0):
            self._on_write_timeout()
            self.transport.abort()
