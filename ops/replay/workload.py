"""A trace as requests to replay: prompts made up so that what was shared is shared, lengths as recorded.

Prompts are made when a request arrives and dropped with it: memory doesn't grow with the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ops.traces import TraceRow
from protocol.messages import SamplingParams, Submit
from runner.uniform import mix

SHARED_VOCABULARY = 128_000
PRIVATE_TOKENS = 200_000
"""Tokens of nobody else's prompt are this plus the request's number."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows with their numbers: request i is row i of the trace, `order` says which are replayed, by arrival.

    `max_tokens` is what every request asks for (0: its recorded length), so that a scheduler which isn't to know the
    lengths doesn't; the runner ends it where the record says.
    """

    rows: Sequence[TraceRow]
    order: Sequence[int]
    dropped: int = 0
    max_tokens: int = 0

    def __len__(self) -> int:
        return len(self.order)

    @property
    def vocab_size(self) -> int:
        """Above every token id that a prompt has."""
        recorded = max((max(row.token_ids, default=0) for row in self.rows), default=0)
        return max(PRIVATE_TOKENS + len(self.rows), recorded) + 2

    @property
    def ends(self) -> dict[int, int]:
        """After how many outputs each request ends, where the scheduler isn't told."""
        if not self.max_tokens:
            return {}
        return {index: self.rows[index].output_tokens for index in self.order}

    def submit(self, index: int) -> Submit:
        """The message with which an API would submit row `index`."""
        row = self.rows[index]
        return Submit(
            id=index,
            prompt=prompt_tokens(row, index).tobytes(),
            params=SamplingParams(max_tokens=self.max_tokens or row.output_tokens, ignore_eos=not self.max_tokens),
            priority=row.priority,
            tenant=row.tenant,
            deadline_ms=row.deadline_ms,
        )


def prompt_tokens(row: TraceRow, index: int) -> npt.NDArray[np.int32]:
    """The prompt [input_tokens]: token j of block h is mix(h·S + j) mod 128,000, the rest the request's own."""
    if row.token_ids:
        return np.array(row.token_ids, "<i4")
    tokens = np.full(row.input_tokens, PRIVATE_TOKENS + index, "<i4")
    if row.hash_ids:
        size = row.block_tokens
        blocks = np.array(row.hash_ids[: -(-row.input_tokens // size)], np.uint64) * np.uint64(size)
        numbers: npt.NDArray[np.uint64] = np.add.outer(blocks, np.arange(size, dtype=np.uint64)).ravel()
        shared = mix(numbers) % np.uint64(SHARED_VOCABULARY)
        count = min(len(shared), row.input_tokens)
        tokens[:count] = shared[:count]
    return tokens


def build(
    rows: Sequence[TraceRow],
    *,
    max_model_len: int,
    max_tokens: int = 0,
    repeat: int = 1,
    until_s: float = 0.0,
) -> Workload:
    """The workload of a trace. Rows that no context of `max_model_len` holds, or that produce nothing, are dropped.

    `repeat` plays it several times, one behind the other; what shared a prefix still does. `until_s` cuts it (0: all).
    """
    span = (rows[-1].at_ns + (rows[-1].at_ns // max(len(rows) - 1, 1))) if rows else 0
    played = [
        replace(row, at_ns=row.at_ns + span * turn, cancel_ns=row.cancel_ns and row.cancel_ns + span * turn)
        for turn in range(repeat)
        for row in rows
        if not until_s or row.at_ns < until_s * 1e9
    ]
    fitting = [i for i, r in enumerate(played) if fits(r, max_model_len)]
    return Workload(played, fitting, len(played) - len(fitting), max_tokens)


def fits(row: TraceRow, max_model_len: int) -> bool:
    """Whether the row can be served at all."""
    return row.input_tokens > 0 and row.output_tokens > 0 and row.input_tokens + row.output_tokens <= max_model_len
