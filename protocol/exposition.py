"""Serves a process's Prometheus registry as text over HTTP, on a private unix socket and, if asked, on a TCP port.

It runs in daemon threads and answers `GET /metrics` and, on the unix socket, what a process adds; it holds no metrics
of its own beside the process collector.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from protocol.places import Place

log = logging.getLogger("triptych.metrics")

CLIENT_TIMEOUT_S = 5.0  # all a client gets to ask and to read, however it drips
MAX_CLIENTS = 8
MAX_REQUEST_BYTES = 16 * 1024
MAX_UNIX_PATH = 107
CLOSE_S = 2.0

Page = Callable[[Mapping[str, str]], bytes]
"""What a further path answers: the query's fields in, JSON out; ValueError for a query that can't be answered."""


class ExpositionError(OSError):
    """The metrics can't be served where they were asked to be; says why."""


def new_registry(role: str) -> CollectorRegistry:
    """A registry of this process's own, with CPU, memory and descriptor numbers as `triptych_<role>_process_*`.

    The prefix keeps them apart when the API appends the other processes' text to its own.
    """
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(namespace=f"triptych_{role}", registry=registry)
    return registry


class MetricsServer:
    """The handle that `serve_metrics` returns. `port` is the TCP port in use (0: none)."""

    def __init__(
        self,
        listeners: list[socket.socket],
        registry: CollectorRegistry,
        place: Place | None,
        port: int,
        pages: Mapping[str, Page],
    ) -> None:
        self.port = port
        self._pages = pages
        self._listeners = listeners
        self._registry = registry
        self._place = place
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._clients: dict[threading.Thread, socket.socket] = {}
        self._accepting = [
            threading.Thread(target=self._accept, args=(listener,), name="metrics", daemon=True)
            for listener in listeners
        ]
        for thread in self._accepting:
            thread.start()

    def close(self) -> None:
        """Stop answering, wait for the threads, and remove the socket file. Idempotent.

        A thread that outlived this could be the last to hold what the registry watches, and free it while the
        interpreter ends: torch aborts the process then.
        """
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            _shut(listener)  # wakes the thread in accept(); close() alone would not
            listener.close()
        accepting, self._accepting = self._accepting, []
        _join(accepting)
        for client in self._clients.values():
            _shut(client)
        _join(self._clients)
        if self._place is not None:
            self._place.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while listener in self._listeners:
            try:
                client, _ = listener.accept()
            except OSError as error:
                if listener in self._listeners:
                    # Out of descriptors, or a client that left between SYN and accept: the next one may fare better.
                    log.warning("metrics: accept failed: %s", error)
                    threading.Event().wait(0.1)
                continue
            if not self._slots.acquire(blocking=False):
                client.close()
                continue
            thread = threading.Thread(target=self._serve, args=(client,), name="metrics-client", daemon=True)
            self._clients = {one: its for one, its in self._clients.items() if one.is_alive()} | {thread: client}
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                _answer(client, self._registry, self._pages if client.family == socket.AF_UNIX else {})
        except OSError as error:
            log.debug("metrics client left: %s", error)
        except Exception:
            log.exception("metrics could not be collected")
        finally:
            self._slots.release()


def serve_metrics(
    registry: CollectorRegistry,
    *,
    unix_path: str = "",
    host: str = "127.0.0.1",
    port: int = 0,
    pages: Mapping[str, Page] | None = None,
    by_force: bool = False,
) -> MetricsServer:
    """Serve `registry` at `/metrics` on the unix socket (mode 0600; empty: not) and on `host:port` (port 0: not).

    `pages` are further paths, on the unix socket only; they are called in this module's threads. A socket file left by
    a dead process is swept; one that a live process answers on is an ExpositionError, unless `by_force` takes it.
    """
    listeners: list[socket.socket] = []
    place: Place | None = None
    try:
        if unix_path:
            listener, place = _listen_unix(unix_path, by_force)
            listeners.append(listener)
        if port:
            listeners.append(_listen_tcp(host, port))
    except ExpositionError:
        for listener in listeners:
            listener.close()
        if place is not None:
            place.release()
        raise
    return MetricsServer(listeners, registry, place, port, pages or {})


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("closing a socket of the metrics: %s", error)


def _join(threads: Iterable[threading.Thread]) -> None:
    deadline = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _listen_unix(path: str, by_force: bool) -> tuple[socket.socket, Place]:
    if len(os.fsencode(path)) > MAX_UNIX_PATH:
        raise ExpositionError(
            f"metrics at {path}: the path has {len(os.fsencode(path))} bytes, at most {MAX_UNIX_PATH}"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    place: Place | None = None
    try:
        place = Place.claim(path, by_force=by_force)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(MAX_CLIENTS)
        place.listening()
    except OSError as error:
        listener.close()
        if place is not None:
            place.release()
        raise ExpositionError(f"metrics at {path}: {error.strerror or error}") from error
    return listener, place


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MAX_CLIENTS)
    except OSError as error:
        raise ExpositionError(f"metrics at {host}:{port}: {error.strerror or error}") from error


def _answer(client: socket.socket, registry: CollectorRegistry, pages: Mapping[str, Page]) -> None:
    deadline = time.monotonic() + CLIENT_TIMEOUT_S
    head = b""
    while b"\r\n\r\n" not in head:
        client.settimeout(max(deadline - time.monotonic(), 0.001))
        more = client.recv(4096)
        if not more:
            return
        head += more
        if len(head) > MAX_REQUEST_BYTES:
            _reply(client, deadline, "431 Request Header Fields Too Large", b"")
            return
    method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
    target, _, query = rest.split(b" ", 1)[0].decode("latin-1").partition("?")
    if target != "/metrics" and target not in pages:
        known = ", ".join(["/metrics", *pages])
        _reply(client, deadline, "404 Not Found", f"only {known} is here\n".encode())
    elif method not in (b"GET", b"HEAD"):
        _reply(client, deadline, "405 Method Not Allowed", b"only GET and HEAD\n", "Allow: GET, HEAD\r\n")
    elif target in pages:
        try:
            body = pages[target](dict(parse_qsl(query)))
        except ValueError as error:
            _reply(client, deadline, "400 Bad Request", f"{error}\n".encode())
        else:
            _reply(client, deadline, "200 OK", body, kind="application/json", head=method == b"HEAD")
    else:
        text = generate_latest(registry)
        _reply(client, deadline, "200 OK", text, kind=CONTENT_TYPE_PLAIN_0_0_4, head=method == b"HEAD")


def _reply(
    client: socket.socket,
    deadline: float,
    status: str,
    body: bytes,
    headers: str = "",
    *,
    kind: str = "text/plain; charset=utf-8",
    head: bool = False,
) -> None:
    start = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}"
    client.settimeout(max(deadline - time.monotonic(), 0.001))
    client.sendall(start.encode("ascii") + b"Connection: close\r\n\r\n" + (b"" if head else body))
