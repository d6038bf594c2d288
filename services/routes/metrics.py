"""GET /metrics: this process's metrics and, appended, the text of the scheduler and the runner on this machine.

The others are asked over their private unix sockets, in a thread, with a short timeout; a dead one is left out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from services.state import ApiState

log = logging.getLogger("triptych.api")

ROLES = ("scheduler", "runner")
TIMEOUT_S = 1.0
MAX_BYTES = 16 * 2**20


class MetricsRoute:
    """Serves one text for all processes."""

    def __init__(self, state: ApiState) -> None:
        self._state = state
        self._executor = ThreadPoolExecutor(3, thread_name_prefix="metrics")

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, version 0.0.4."""
        loop = asyncio.get_running_loop()
        directory = self._state.config.runtime_dir
        texts = await asyncio.gather(
            loop.run_in_executor(self._executor, generate_latest, self._state.metrics.registry),
            *(loop.run_in_executor(self._executor, fetch, f"{directory}/{role}.metrics.sock") for role in ROLES),
        )
        return Response(b"".join(texts), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def fetch(path: str) -> bytes:
    """The metrics text served on a unix socket; empty if nobody answers completely and in time."""
    if not os.path.exists(path):
        return b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(path)
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = b""
            while more := connection.recv(65536):
                answer += more
                if len(answer) > MAX_BYTES:
                    raise OSError("the answer is too long")
    except OSError as error:
        log.warning("no metrics from %s: %s", path, error)
        return b""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or _short(head, body):
        log.warning("no metrics from %s: an incomplete answer", path)
        return b""
    return body if body.endswith(b"\n") else body + b"\n"


def _short(head: bytes, body: bytes) -> bool:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) != int(line.partition(b":")[2])
    return True
