"""Writes what came, as a trace that can be replayed: one line of JSON per generation that has ended. Never text.

A thread hashes, encodes and writes; the event loop only puts into a bounded queue. Lines are appended whole, so several
API processes may share a file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import secrets
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocol.columns import i32
from protocol.trace import TraceLine
from services.journal import Call, Generation
from services.metrics import ApiMetrics

log = logging.getLogger("triptych.api")

BLOCK_TOKENS = 16
KEY_BYTES = 32
KEY_FILE = "record.key"
MOST_WAITING = 65_536
FLUSH_BYTES = 64 * 1024
FLUSH_S = 1.0
_MASK63 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Ended:
    """What the thread needs of one generation. Times are ns since 1970; `cancel_ns` is 0 if the client stayed."""

    prompt: bytes
    cache_salt: str
    arrival_ns: int
    output_tokens: int
    priority: int
    tenant: str
    deadline_ms: int
    cancel_ns: int


class Recording:
    """An open recording. `over` is called on the event loop and never blocks; `close` writes what is left.

    Each choice of a request is a line of its own, as it is a request of its own to the scheduler. Times are Unix time,
    which all processes on all machines share. OSError if the file can't be opened.
    """

    def __init__(
        self,
        path: str,
        key: bytes,
        metrics: ApiMetrics,
        *,
        with_tokens: bool = False,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path = path
        self._key = key
        self._metrics = metrics
        self._with_tokens = with_tokens
        self._wall_ns = wall_ns
        self._waiting: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._complained = False
        self._file = _open(path)
        self._thread = threading.Thread(target=self._write_all, name="recording", daemon=True)
        self._thread.start()

    def over(self, call: Call) -> None:
        """The call has been released: note its generations that ended by themselves, and those whose client left."""
        for generation in call.generations:
            ended = self._ended(call, generation)
            if ended is None:
                continue  # refused or failed: how long its answer would have been is not known
            if self._waiting.qsize() < MOST_WAITING:
                self._waiting.put(ended)
            else:
                self._lose(1, "the disk doesn't keep up")

    def close(self) -> None:
        """Write what waits and close the file. Idempotent."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _ended(self, call: Call, generation: Generation) -> Ended | None:
        submit = generation.submit
        by_itself = bool(generation.outcome) or generation.finished is not None
        if generation.error is not None or not (by_itself or call.disconnected):
            return None
        return Ended(
            submit.prompt,
            submit.cache_salt,
            submit.arrival_ns,
            # Who left would have gone on to the limit: a replay ends it when the client leaves, not before.
            len(generation.tokens) if by_itself else submit.params.max_tokens,
            submit.priority,
            submit.tenant,
            submit.deadline_ms,
            0 if by_itself else self._wall_ns(),
        )

    # --- the thread -------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        lines: list[bytes] = []
        size, due = 0, 0.0
        open_ = True
        while open_:
            try:
                timeout = max(0.0, due - time.monotonic()) if lines else None
                ended = self._waiting.get(timeout=timeout)
            except queue.Empty:
                ended = None
            else:
                open_ = ended is not None
            if ended is not None:
                if not lines:
                    due = time.monotonic() + FLUSH_S
                lines.append(self._line(ended))
                size += len(lines[-1])
            if lines and (not open_ or size >= FLUSH_BYTES or time.monotonic() >= due):
                self._write(lines)
                lines, size = [], 0
        os.close(self._file)

    def _line(self, ended: Ended) -> bytes:
        tokens = i32(ended.prompt)
        line = TraceLine(
            at_s=_seconds(ended.arrival_ns),
            output_tokens=ended.output_tokens,
            priority=ended.priority,
            tenant=ended.tenant,
            deadline_ms=ended.deadline_ms,
        )
        if ended.cancel_ns:
            line.cancel_at_s = _seconds(ended.cancel_ns)
        if self._with_tokens:
            line.token_ids = tuple(tokens.tolist())
        else:
            line.prompt_tokens = len(tokens)
            line.hash_ids = prefix_hashes(self._key, ended.prompt, ended.cache_salt)
            line.block_tokens = BLOCK_TOKENS
        return msgspec.json.encode(line) + b"\n"

    def _write(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        written, why = 0, ""
        try:
            # One write appends in one piece beside those of other processes, unless the disk is full.
            written = os.write(self._file, data)
        except OSError as error:
            why = error.strerror or str(error)
        if written < len(data):
            kept = data[:written].count(b"\n")
            self._cut(written - (data[:written].rfind(b"\n") + 1))
            self._lose(len(lines) - kept, why or "the disk is full")
            lines = lines[:kept]
        self._metrics.recorded.inc(len(lines))

    def _cut(self, torn: int) -> None:
        """Take back the last `torn` bytes of a write that was cut short, unless somebody has written behind them."""
        if not torn:
            return
        try:
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            if os.fstat(self._file).st_size == end:
                os.ftruncate(self._file, end - torn)
        except OSError as error:
            log.warning("the recording %s has a torn line: %s", self._path, error)

    def _lose(self, count: int, why: str) -> None:
        self._metrics.record_lost.inc(count)
        if not self._complained:
            self._complained = True
            log.warning(
                "the recording %s has gaps: %s; serving goes on, further losses are only counted", self._path, why
            )


def prefix_hashes(key: bytes, prompt: bytes, cache_salt: str) -> tuple[int, ...]:
    """One number of 63 bits per full block of an i32 prompt: equal ones mean that all up to there is equal.

    Keyed, so that nobody without the key can try texts against them. Prompts of different salts share nothing, as in
    the prefix cache.
    """
    found = []
    parent = cache_salt.encode("utf-8", "surrogatepass")
    size = 4 * BLOCK_TOKENS
    for start in range(0, len(prompt) - size + 1, size):
        parent = hashlib.blake2b(parent + b"\0" + prompt[start : start + size], digest_size=16, key=key).digest()
        found.append(int.from_bytes(parent[:8], "little") & _MASK63)
    return tuple(found)


def shared_key(runtime_dir: str) -> bytes:
    """The key of this instance's recordings: drawn by whichever API process comes first, kept in the private directory.

    OSError if it can't be written or read.
    """
    path = Path(runtime_dir) / KEY_FILE
    draft = path.with_name(f"{KEY_FILE}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(KEY_BYTES))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process of this instance was first
    finally:
        os.close(descriptor)
        os.unlink(draft)
    return path.read_bytes()


def _open(path: str) -> int:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)  # also one that was there before: lengths and tenants are nobody else's business
    return file


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 6)
