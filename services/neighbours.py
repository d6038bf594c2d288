"""What the other processes on this machine say on their private sockets: metrics, and how many requests an API holds.

They are asked in threads with a short timeout; one that doesn't answer completely and in time is left out.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import re
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
from prometheus_client.exposition import generate_latest

from services.config import ApiConfig
from services.metrics import ApiMetrics

log = logging.getLogger("triptych.api")

SCHEDULER, RUNNER = "scheduler", "runner"
TIMEOUT_S = 1.0
MAX_BYTES = 16 * 2**20
LIVE_PAGE = "/live"
READY_PAGE = "/ready"
"""`1` while this very process can serve: behind one port any of several may answer."""
_NUMBER = re.compile(r"-(\d+)\.metrics\.sock$")


class Neighbours:
    """Asks the sockets in one runtime directory. `number` is this process's among several API processes, 0: alone."""

    def __init__(self, config: ApiConfig, metrics: ApiMetrics) -> None:
        self.number = config.process_number
        self._directory = config.runtime_dir
        self._own = config.metrics_socket
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(4, thread_name_prefix="neighbours")

    def close(self) -> None:
        """Let the threads end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def metrics(self) -> bytes:
        """The metrics text of all processes; those of several API processes are told apart by the label `process`,
        those of several runners by `replica`."""
        loop = asyncio.get_running_loop()
        apis, runners = self._apis(), self._numbered(RUNNER)
        alone = [f"{self._directory}/{role}.metrics.sock" for role in (SCHEDULER, RUNNER)]
        paths = [*alone, *apis.values(), *runners.values()]
        own, *texts = await asyncio.gather(
            loop.run_in_executor(self._executor, generate_latest, self._metrics.registry),
            *(loop.run_in_executor(self._executor, fetch, path) for path in paths),
        )
        others = texts[len(alone) :]
        if self.number:
            by_number = {self.number: own, **dict(zip(apis, others, strict=False))}
            own = merged({str(number): by_number[number] for number in sorted(by_number)})
        replicas = {str(number): text for number, text in zip(runners, others[len(apis) :], strict=True)}
        return b"".join([own, *texts[: len(alone)], merged(replicas, "replica")])

    async def live(self, here: int) -> dict[int, int]:
        """How many generations each API process holds, by number; `here` are this one's."""
        loop = asyncio.get_running_loop()
        apis = self._apis()
        answers = await asyncio.gather(
            *(loop.run_in_executor(self._executor, fetch, path, LIVE_PAGE) for path in apis.values())
        )
        live = {number: msgspec.json.decode(body, type=int) for number, body in zip(apis, answers, strict=True) if body}
        return dict(sorted({**live, self.number: here}.items()))

    def has(self, number: int) -> bool:
        """Whether there is another API process of this number."""
        return number in self._apis()

    async def ask(self, number: int, page: str) -> bytes:
        """What another API process answers for a page; empty if it doesn't."""
        path = self._apis().get(number)
        return await asyncio.get_running_loop().run_in_executor(self._executor, fetch, path, page) if path else b""

    def _apis(self) -> dict[int, str]:
        """The sockets of the other API processes by their numbers; empty for a process that is alone."""
        if not self.number:
            return {}
        return {number: path for number, path in self._numbered("api").items() if path != self._own}

    def _numbered(self, role: str) -> dict[int, str]:
        """The sockets of a role of which there are several, by their numbers."""
        paths = glob.glob(f"{glob.escape(self._directory)}/{role}-*.metrics.sock")
        return dict(sorted((int(match[1]), path) for path in paths if (match := _NUMBER.search(path))))


def merged(texts: Mapping[str, bytes], label_name: str = "process") -> bytes:
    """One text of several processes' texts, each sample with its process's name or number as a label.

    Not summed: a process that starts again begins at 0, and in a sum that would look like a reset of all of them.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for process, text in texts.items():
        label = b'%s="%s"' % (label_name.encode(), process.encode())
        family = b""
        for line in text.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                kind, family = line.split(b" ", 3)[1:3]
                lines = heads.setdefault(family, [])
                if not any(known.startswith(b"# " + kind) for known in lines):
                    lines.append(line)
            elif line and not line.startswith(b"#"):
                samples.setdefault(family, []).append(_labelled(line, label))
    return b"".join(
        b"".join(line + b"\n" for line in [*lines, *samples.get(family, ())]) for family, lines in heads.items()
    )


def _labelled(sample: bytes, label: bytes) -> bytes:
    """A sample's line with one more label in front; label values may hold anything, names may not."""
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return name + b"{" + label + (b"" if rest.startswith(b"}") else b",") + rest
    name, _, value = sample.partition(b" ")
    return name + b"{" + label + b"} " + value


def fetch(path: str, page: str = "/metrics") -> bytes:
    """What a process answers for `page` on its unix socket; empty if nobody answers completely and in time."""
    if not os.path.exists(path):
        return b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(path)
            connection.sendall(f"GET {page} HTTP/1.0\r\n\r\n".encode())
            answer = b""
            while more := connection.recv(65536):
                answer += more
                if len(answer) > MAX_BYTES:
                    raise OSError("the answer is too long")
    except OSError as error:
        log.warning("nothing from %s: %s", path, error)
        return b""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or _short(head, body):
        log.warning("nothing from %s: an incomplete answer", path)
        return b""
    return body if body.endswith(b"\n") else body + b"\n"


def _short(head: bytes, body: bytes) -> bool:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) != int(line.partition(b":")[2])
    return True
