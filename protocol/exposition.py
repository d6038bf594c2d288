"""Serves a process's Prometheus registry as text over HTTP, on a private unix socket and, if asked, on a TCP port.

It runs in daemon threads and answers `GET /metrics` and, on the unix socket, what a process adds; it holds no metrics
of its own beside the process collector.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from protocol.links import file_identity

log = logging.getLogger("triptych.metrics")

CLIENT_TIMEOUT_S = 5.0  # all a client gets to ask and to read, however it drips
MAX_CLIENTS = 8
MAX_REQUEST_BYTES = 16 * 1024
MAX_UNIX_PATH = 107

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
        unix_path: str,
        port: int,
        pages: Mapping[str, Page],
    ) -> None:
        self.port = port
        self._pages = pages
        self._listeners = listeners
        self._registry = registry
        self._unix_path = unix_path
        self._file = file_identity(unix_path)
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        for listener in listeners:
            threading.Thread(target=self._accept, args=(listener,), name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop answering and remove the socket file. Idempotent."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            try:
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept(); close() alone would not
            except OSError as error:
                log.debug("closing the metrics listener: %s", error)
            listener.close()
        if listeners and self._file is not None and file_identity(self._unix_path) == self._file:
            _remove(self._unix_path)  # else another process has taken the place

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
            threading.Thread(target=self._serve, args=(client,), name="metrics-client", daemon=True).start()

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
    try:
        if unix_path:
            listeners.append(_listen_unix(unix_path, by_force))
        if port:
            listeners.append(_listen_tcp(host, port))
    except ExpositionError:
        for listener in listeners:
            listener.close()
            _remove(unix_path)
        raise
    return MetricsServer(listeners, registry, unix_path, port, pages or {})


def _listen_unix(path: str, by_force: bool) -> socket.socket:
    if len(os.fsencode(path)) > MAX_UNIX_PATH:
        raise ExpositionError(
            f"metrics at {path}: the path has {len(os.fsencode(path))} bytes, at most {MAX_UNIX_PATH}"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _sweep(path, by_force)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(MAX_CLIENTS)
    except OSError as error:
        listener.close()
        if isinstance(error, ExpositionError):
            raise
        raise ExpositionError(f"metrics at {path}: {error.strerror or error}") from error
    return listener


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MAX_CLIENTS)
    except OSError as error:
        raise ExpositionError(f"metrics at {host}:{port}: {error.strerror or error}") from error


def _sweep(path: str, by_force: bool) -> None:
    """Remove a dead process's socket file. ExpositionError if it is alive (unless by force) or not a socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ExpositionError(f"metrics at {path}: a file that is not a socket is in the way")
    if by_force:
        _remove(path)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            _remove(path)
        else:
            raise ExpositionError(f"metrics at {path}: another live process serves there")


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # the runtime directory may have been cleared before us


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
