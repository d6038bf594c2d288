"""Reads one streamed answer of /v1/completions or /v1/chat/completions into times and counts.

What counts as a token's arrival is decided here, and only here: a chunk that carries text (or reasoning, or a tool
call). A chunk with just a role, or with empty text, is not a token. Counts come from the server's usage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from ops.bench.sse import SseParser


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def carries_output(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class RequestRecord:
    """What one request was and got. Times are seconds on the load generator's clock; token counts are the server's.

    `chunk_times` are the arrivals of chunks with output; `chunk_tokens` the output tokens so far at each of them, where
    the server sends a running usage (else empty). `finished_at` is the arrival of the last chunk that carried
    output or the finish reason. `error` is the kind a report counts by; None for a complete answer.
    """

    index: int
    planned_at: float = 0.0
    sent_at: float = 0.0
    finished_at: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    error_message: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first chunk with output; None if no chunk had any."""
        return self.chunk_times[0] - self.sent_at if self.chunk_times else None

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last chunk."""
        return self.finished_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first: (e2e - ttft) / (n - 1); None below two tokens."""
        ttft = self.ttft
        return None if ttft is None or self.output_tokens < 2 else (self.e2e - ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between neighbouring chunks with output."""
        times = self.chunk_times
        return [after - before for before, after in pairwise(times)]

    def fail(self, kind: str, message: str) -> None:
        """Marks the request as failed; the first cause stays."""
        if self.error is None:
            self.error, self.error_message = kind, message[:500]


class StreamReader:
    """Body sink of one streaming request; fills its record."""

    __slots__ = ("_done", "_has_usage", "_sse", "record")

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self._sse = SseParser()
        self._done = False
        self._has_usage = False

    def __call__(self, body: bytes, now: float) -> None:
        """Takes body bytes that arrived at `now` (seconds)."""
        for payload in self._sse.feed(body):
            if payload == b"[DONE]":
                self._done = True
                continue
            try:
                chunk = _decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.record.fail("invalid_chunk", f"{error}: {payload[:200]!r}")
                continue
            self._take(chunk, now)

    def close(self) -> None:
        """The body has ended: decides whether the answer is complete."""
        if not self._done:
            self.record.fail("truncated", "the stream ended without [DONE]")
        elif not self._has_usage:
            self.record.fail("no_usage", "the server sent no usage, so tokens can't be counted")

    def _take(self, chunk: _Chunk, now: float) -> None:
        record = self.record
        if chunk.error is not None:
            record.fail(f"in_band:{error_code(chunk.error)}", str(chunk.error))
            return
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
                record.finished_at = now
            if choice.carries_output():
                record.chunk_times.append(now)
                record.finished_at = now
                if chunk.usage is not None:
                    record.chunk_tokens.append(chunk.usage.completion_tokens)
        if chunk.usage is not None:  # some servers send a running total in every chunk: the last one counts
            self._has_usage = True
            record.prompt_tokens = chunk.usage.prompt_tokens
            record.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details else 0


def error_code(error: object) -> str:
    """The shortest name of an OpenAI-style error object: its code, else its type, else "error"."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "error")
    return "error"
