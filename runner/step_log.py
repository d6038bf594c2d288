"""The last steps that ran, as columns of numbers: what a cost model is fitted to. In memory, asked for by `/steps`.

One row costs about a microsecond to keep. Times are ns of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
import numpy as np

from protocol.messages import Limits, StepResult
from runner.steps import StepSize

CAPACITY = 65_536


class StepPage(msgspec.Struct):
    """Steps `first` … `first + n - 1` of all that this runner has run, a column [n] per fact.

    `received_ns` is when the step reached the runner, `started_ns` and `ended_ns` when it ran: those received before
    the one before them had ended were pipelined. `copy_ns` of the time were copies of swapped blocks.
    """

    limits: Limits
    first: int
    tokens: list[int]
    context: list[int]
    rows: list[int]
    received_ns: list[int]
    started_ns: list[int]
    ended_ns: list[int]
    copy_ns: list[int]


class StepLog:
    """A ring of steps. One thread adds, others read."""

    def __init__(self, limits: Limits, capacity: int = CAPACITY) -> None:
        self._limits = limits
        self._rows = np.zeros((capacity, 7), np.int64)
        self._count = 0
        self._lock = threading.Lock()

    def add(self, size: StepSize, result: StepResult, ended_ns: int) -> None:
        """Keep one step that did not fail; `result` carries its timings."""
        started = ended_ns - result.execute_ns
        row = (size.tokens, size.context, size.rows, started - result.queue_ns, started, ended_ns, result.copy_ns)
        with self._lock:
            self._rows[self._count % len(self._rows)] = row
            self._count += 1

    def page(self, query: Mapping[str, str]) -> bytes:
        """The kept steps from number `since` on (default: all that are kept), as JSON. ValueError for a bad number."""
        try:
            since = int(query.get("since", "0"))
        except ValueError:
            raise ValueError(f"since: {query['since']!r} is not a number") from None
        with self._lock:
            first = max(since, self._count - len(self._rows), 0)
            kept = self._rows[np.arange(first, max(self._count, first)) % len(self._rows)]
        return msgspec.json.encode(StepPage(self._limits, first, *kept.T.tolist()))
