"""Asks a process of its own whether a grammar can be compiled, within a time, before a request that has it is queued.

Off the event loop; one at a time, so that grammars hold up grammars at most. That process is started when a first one
comes, and anew when one has cost it its life.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

from services.errors import invalid
from services.structured import Form

log = logging.getLogger("triptych.api")

CHECK_S = 3.0
START_S = 60.0
KEPT = 256
"""Answers that are remembered: most clients send the same few schemas."""


class GrammarChecker:
    """Checks grammars in one worker process. `check_s`: how long one may take."""

    def __init__(self, check_s: float = CHECK_S) -> None:
        self._check_s = check_s
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._known: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()
        self._worker: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._connection: tuple[socket.socket, BinaryIO] | None = None

    async def check(self, form: Form) -> str:
        """The grammar for a request's parameters. ApiError 400, naming the field, if it can't be compiled."""
        key = form.kind, form.text
        known = self._known.get(key)
        if known is None:
            known = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, *key)
            if known is not None:
                self._known[key] = known
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        # A worker that was lost isn't remembered: it may have been killed for another reason.
        grammar, error = known or ("", "compiling it takes too long or too much memory")
        if error:
            raise invalid(f"{form.param}: {error}", form.param, "invalid_grammar")
        return grammar

    def close(self) -> None:
        """End the worker, in the middle of a check too. Nothing can be checked afterwards."""
        self._closing = True
        if self._worker is not None:
            self._worker.kill()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=True)

    def _ask(self, kind: str, text: str) -> tuple[str, str] | None:
        """What the worker says, None if that costs it its life."""
        if self._closing:
            return None
        connection, lines = self._started()
        answer = b""
        try:
            connection.settimeout(self._check_s)
            connection.sendall(msgspec.json.encode((kind, text)) + b"\n")
            answer = lines.readline()
        except OSError:  # its time is over (a TimeoutError is one), or it died before it had read all
            pass
        if not answer.endswith(b"\n"):
            log.warning("a grammar of %d characters was too much for its check", len(text))
            self._end()
            return None
        return msgspec.json.decode(answer, type=tuple[str, str])

    def _started(self) -> tuple[socket.socket, BinaryIO]:
        """The connection to a worker that lives, and what it says there."""
        if self._connection is not None and self._worker is not None and self._worker.poll() is None:
            return self._connection
        self._end()
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        self._connection = ours, ours.makefile("rb")
        with theirs:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "services.grammar_worker"],
                cwd=Path(__file__).parent.parent,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        try:
            ready = self._connection[1].readline()
        except OSError:
            ready = b""
        if not ready:
            self._end()
            raise RuntimeError("the process that checks grammars does not start")
        return self._connection

    def _end(self) -> None:
        if self._connection is not None:
            for end in reversed(self._connection):
                end.close()
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
        self._connection = self._worker = None
