"""Recorded traffic as rows: when a request came, how long its prompt and its answer were, which prefix it shared.

Three formats, told apart by the first line, gzip or not: Azure CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`),
Mooncake JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`, one per 512-token block), and our
own JSON lines, which is also what `triptych serve --record` writes: the fields of `protocol.trace.TraceLine`.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from protocol.trace import TraceLine

_Line = TypeVar("_Line")

MOONCAKE_BLOCK_TOKENS = 512
NS = 1_000_000_000
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceError(ValueError):
    """A trace that can't be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request.

    `at_ns`: since the trace's first row. `hash_ids`: one per block of `block_tokens` tokens; equal ids are equal
    blocks, and tokens behind the last one are nobody else's. `token_ids` are the prompt itself, where it was recorded.
    `cancel_ns`: when the client left, since the first row; `deadline_ms`: within which it wanted its first token (0 for
    none, both).
    """

    at_ns: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    token_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    deadline_ms: int = 0
    cancel_ns: int = 0

    @property
    def at_s(self) -> float:
        """Seconds since the trace's first row."""
        return self.at_ns / NS


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, limit: int | None = None, time_scale: float = 1.0) -> list[TraceRow]:
    """The first `limit` rows, in the file's order of time; times are multiplied by `time_scale` (0.5: twice as fast).

    Scaling counts in thousandths, in integers: two who scale the same trace get the same nanoseconds.
    Raises TraceError for an unknown format, a bad line (numbered) or an empty file, OSError if it can't be opened.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        lines = iter(file)
        first = next(lines, "")
        try:
            rows = list(islice(_rows(path, first, lines), limit))
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: no rows")
    start, permille = min(row.at_ns for row in rows), round(time_scale * 1000)
    shifted = (
        replace(
            row,
            at_ns=(row.at_ns - start) * permille // 1000,
            cancel_ns=row.cancel_ns and (row.cancel_ns - start) * permille // 1000,
        )
        for row in rows
    )
    return sorted(shifted, key=lambda row: row.at_ns)


def _rows(path: Path, first: str, rest: Iterator[str]) -> Iterator[TraceRow]:
    if first.lstrip().startswith("{"):
        lines = _with_first(first, rest)
        return _mooncake(path, lines) if '"input_length"' in first else _own(path, lines)
    if first.strip().split(",") == _AZURE_COLUMNS:
        return _azure(path, rest)
    wanted = ",".join(_AZURE_COLUMNS)
    raise TraceError(f"{path}: the first line is neither JSON nor {wanted!r}: {first[:80]!r}")


def _with_first(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, cells in enumerate(csv.reader(lines), start=2):
        if not cells:
            continue
        try:
            stamp, context, generated = cells
            yield _checked(TraceRow(_stamp_ns(stamp), int(context), int(generated)))
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error


def _stamp_ns(stamp: str) -> int:
    """Nanoseconds of a timestamp with up to nine decimals, which a float or a datetime would round."""
    whole, _, fraction = stamp.partition(".")
    return int(datetime.fromisoformat(f"{whole}+00:00").timestamp()) * NS + int(fraction.ljust(9, "0")[:9] or 0)


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, row in _decoded(path, lines, _MooncakeLine):
        try:
            at_ns = round(row.timestamp * 1_000_000)
            yield _checked(TraceRow(at_ns, row.input_length, row.output_length, row.hash_ids))
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error


def _own(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, line in _decoded(path, lines, TraceLine):
        try:
            hash_ids, block_tokens = line.hash_ids, line.block_tokens
            if line.prefix:
                hash_ids, block_tokens = _as_blocks(line.prefix), 1
            row = TraceRow(
                at_ns=round(line.at_s * NS),
                input_tokens=len(line.token_ids) or line.prompt_tokens,
                output_tokens=line.output_tokens,
                hash_ids=hash_ids,
                block_tokens=block_tokens,
                token_ids=line.token_ids,
                priority=line.priority,
                tenant=line.tenant,
                deadline_ms=line.deadline_ms,
                cancel_ns=round(line.cancel_at_s * NS),
            )
            yield _checked(row)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error


def _as_blocks(prefix: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Prefix groups as blocks of one token: token j of group g is the same wherever g stands."""
    return tuple((group << 24) + index for group, count in prefix for index in range(count))


def _decoded(path: Path, lines: Iterable[str], kind: type[_Line]) -> Iterator[tuple[int, _Line]]:
    decode = msgspec.json.Decoder(kind).decode
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}:{number}: {error}") from error


def _checked(row: TraceRow) -> TraceRow:
    numbers = (row.input_tokens, row.output_tokens, row.cancel_ns, row.deadline_ms, *row.hash_ids)
    if min(numbers) < 0 or row.block_tokens < 1:
        raise ValueError(
            f"negative number: {row.input_tokens} in, {row.output_tokens} out, hash ids {row.hash_ids[:8]}, "
            f"blocks of {row.block_tokens}"
        )
    return row
