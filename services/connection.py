"""uvicorn's HTTP connection with what it lacks: one request at a time, and limits on unread data and on idling.

It knows nothing about what is asked and answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState


class Connection(HttpToolsProtocol):
    """One client's connection.

    - A request that comes before the answer to the one before it (pipelining) is not read: the connection closes after
      the answer under way, and the client asks again, as RFC 9112 wants it to. So no request waits unseen behind
      another, reading never pauses, and a client that leaves is noticed whatever it had sent.
    - A client that leaves more than the transport's high-water mark (64 KiB) unread for `write_timeout_s`, or any rest
      of an answer that is complete, is disconnected; `on_write_timeout` counts it. 0: never.
    - A connection that asks for nothing is closed after the keep-alive time, the first time too, and so is one whose
      request line or headers stop coming.
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request."""
        super().connection_made(transport)
        self._limit_idleness()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request, if one is under way."""
        self._stop_clock()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # --- one request at a time --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read on, unless what comes belongs to a request that won't be answered here."""
        if not self._pipelined:
            super().data_received(data)
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
            super().send_400_response(msg)

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
