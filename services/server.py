"""Runs the HTTP server around the application: start, draining, stop, and the periodic log line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
import zmq

from protocol.exposition import new_registry
from protocol.links import HEARTBEAT_INTERVAL_S
from protocol.process import StopSignal
from services.app import build_app
from services.config import ApiConfig
from services.connection import Connection
from services.engine import Engine
from services.errors import unavailable
from services.keys import Keyring
from services.metrics import ApiMetrics
from services.neighbours import Neighbours
from services.record import Recording, shared_key
from services.responses.shelf import Shelf
from services.responses.store import ResponseStore
from services.sampling import Defaults, load_defaults
from services.state import ApiState
from services.text.chat_template import ChatTemplate
from services.text.tokenizer import Tokenizer
from services.textpool import TextPool
from services.tls import server_context
from services.tools.dialect import Dialect
from services.trim import Trimmer

log = logging.getLogger("triptych.api")

CLOSE_WAIT_S = 2  # for connections to take their last bytes once everything is said
DRAIN_POLL_S = 0.05
TRIM_PERIOD_S = 0.5


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


async def _beat_for_ever(beat: Callable[[], None]) -> None:
    while True:
        beat()
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)


class ApiServer:
    """One API process's server. `run` returns when it was stopped or the chain can't be joined."""

    def __init__(
        self,
        config: ApiConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        keyring: Keyring,
    ) -> None:
        self.config = config
        self.registry = new_registry("api")
        self.metrics = ApiMetrics(self.registry, config.served_model_name)
        recording = self._open_recording()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.metrics.gauge("connections", "HTTP connections that are open.", lambda: self.num_connections)
        self._fatal = ""
        self._stop: Callable[[], None] = lambda: None
        self._uvicorn: _Uvicorn | None = None
        neighbours = Neighbours(config, self.metrics)
        self._tls = server_context(config)
        defaults = load_defaults(config.model) if config.generation_config == "auto" else Defaults()
        self.state = ApiState(
            config=config,
            engine=Engine(config, self.metrics, self._context, on_fatal=self._on_fatal),
            text=TextPool(tokenizer, template, config.text_threads),
            metrics=self.metrics,
            neighbours=neighbours,
            responses=Shelf(ResponseStore.of(config), neighbours),
            defaults=defaults,
            dialect=Dialect.of(tokenizer, template, config.tool_call_parser, config.reasoning_parser),
            recording=recording,
        )
        store = self.state.responses.store
        self.metrics.gauge("kept_responses", "Answers of /v1/responses that are kept.", lambda: len(store))
        self.metrics.gauge("kept_responses_bytes", "What they hold, as JSON.", lambda: store.size)
        self._app = build_app(self.state, keyring)

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._uvicorn.server_state.connections) if self._uvicorn is not None else 0

    def _open_recording(self) -> Recording | None:
        config = self.config
        if not config.record:
            return None
        key = shared_key(config.runtime_dir)
        recording = Recording(config.record, key, self.metrics, with_tokens=config.record_tokens)
        log.info("recording to %s (%s)", config.record, "token ids" if config.record_tokens else "lengths and hashes")
        return recording

    def _on_fatal(self, message: str) -> None:
        self._fatal = message
        self._stop()

    async def run(
        self,
        listener: socket.socket,
        stop: StopSignal,
        *,
        on_listening: Callable[[], None] = lambda: None,
        beat: Callable[[], None] = lambda: None,
    ) -> int:
        """Serve until `stop` is requested, then drain. Returns the exit code: 1 if something else ended it.

        `beat` is called twice a second while the loop turns, first when it begins to accept.
        """
        connection = functools.partial(
            Connection,
            write_timeout_s=self.config.write_timeout_s,
            on_write_timeout=self.metrics.write_timeouts.inc,
        )
        settings = uvicorn.Config(
            self._app,
            http=cast(Any, connection),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=self.config.keep_alive_s,
            timeout_graceful_shutdown=CLOSE_WAIT_S,
        )
        settings.load()
        settings.ssl = self._tls
        self._uvicorn = server = _Uvicorn(settings)
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()
        self._stop = stopping.set
        loop.add_reader(stop.fileno(), stopping.set)
        self.state.engine.start()
        logger = loop.create_task(self._log_periodically())
        trimmer = loop.create_task(self._trim_periodically())
        beating = loop.create_task(_beat_for_ever(beat))
        serving = loop.create_task(server.serve(sockets=[listener]))
        waiting = loop.create_task(stopping.wait())
        on_listening()
        try:
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            loop.remove_reader(stop.fileno())
            if self._fatal:
                log.error("%s", self._fatal)
            elif not serving.done():
                await self._drain()
            self.state.engine.refuse_all(unavailable("The server is shutting down", "shutting_down"))
            server.should_exit = True
            await serving
        finally:
            logger.cancel()
            trimmer.cancel()
            beating.cancel()
            waiting.cancel()
            self.state.engine.close()
            if self.state.recording is not None:
                self.state.recording.close()
            self.state.text.close()
            self.state.grammars.close()
            self.state.neighbours.close()
            self._context.term()
        return 1 if self._fatal or not stopping.is_set() else 0

    async def _drain(self) -> None:
        """Refuse new requests, let the running ones end within the grace."""
        state, grace = self.state, self.config.shutdown_grace_s
        state.draining = True
        log.info("stopping: %d requests may run on for %g s", state.engine.num_live(), grace)
        deadline = state.clock() + grace
        while state.engine.calls and state.clock() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    async def _trim_periodically(self) -> None:
        trimmer = Trimmer()
        while True:
            await asyncio.sleep(TRIM_PERIOD_S)
            trimmer.look(self.num_connections)
            self.state.responses.store.sweep()

    async def _log_periodically(self) -> None:
        interval = self.config.log_interval_s
        if interval <= 0:
            return
        before = (0.0, 0.0)
        while True:
            await asyncio.sleep(interval)
            now = self.metrics.token_counts()
            if now == before and not self.state.engine.num_live():
                continue  # an idle server writes no log
            status = self.state.engine.chain.status
            log.info(
                "%d requests here (%s running, %s waiting), prompt %.1f tokens/s, generation %.1f tokens/s, KV %.1f %%",
                self.state.engine.num_live(),
                status.running if status else "?",
                status.waiting if status else "?",
                (now[0] - before[0]) / interval,
                (now[1] - before[1]) / interval,
                100 * status.kv_usage if status else 0.0,
            )
            before = now
