"""Recorded traffic as rows: when a request came, how long its prompt and its answer were, which prefix it shared.

Two formats, told apart by the first line, gzip or not: Azure CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`) and
Mooncake JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`, one per 512-token block).
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceError(ValueError):
    """A trace that can't be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request.

    `at_s`: seconds since the trace's first row. `hash_ids`: one per 512-token block, equal ids are equal blocks.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, limit: int | None = None, time_scale: float = 1.0) -> list[TraceRow]:
    """The first `limit` rows, ordered by time; arrival times are multiplied by `time_scale` (0.5: twice as fast).

    Raises TraceError for an unknown format, a bad line (numbered) or an empty file, OSError if it can't be opened.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        lines = iter(file)
        first = next(lines, "")
        try:
            if first.lstrip().startswith("{"):
                rows = list(islice(_mooncake(path, _with_first(first, lines)), limit))
            elif first.strip().split(",") == _AZURE_COLUMNS:
                rows = list(islice(_azure(path, lines), limit))
            else:
                wanted = ",".join(_AZURE_COLUMNS)
                raise TraceError(f"{path}: the first line is neither JSON nor {wanted!r}: {first[:80]!r}")
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: no rows")
    start = min(row.at_s for row in rows)
    shifted = (
        TraceRow((row.at_s - start) * time_scale, row.input_tokens, row.output_tokens, row.hash_ids) for row in rows
    )
    return sorted(shifted, key=lambda row: row.at_s)


def _with_first(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, cells in enumerate(csv.reader(lines), start=2):
        if not cells:
            continue
        try:
            stamp, context, generated = cells
            yield _checked(datetime.fromisoformat(stamp).timestamp(), int(context), int(generated))
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            yield _checked(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error


def _checked(at_s: float, input_tokens: int, output_tokens: int, hash_ids: tuple[int, ...] = ()) -> TraceRow:
    if input_tokens < 0 or output_tokens < 0 or min(hash_ids, default=0) < 0:
        raise ValueError(f"negative number: {input_tokens} in, {output_tokens} out, hash ids {hash_ids[:8]}")
    return TraceRow(at_s, input_tokens, output_tokens, hash_ids)
