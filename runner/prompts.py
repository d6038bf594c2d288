"""Log-probabilities of prompts: which hidden states of a step tell them, and their way into messages. No torch here.

The hidden state of a token tells the probability of the one after it. The numbers come as one table, which
`runner.prompt_table` makes of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from protocol.messages import PromptLogprobs
from runner.batch import Batch, Int32s, Int64s, Rows, spread

SLICE_ROWS = 128
"""Hidden states whose logits exist at a time, whatever the length of a prompt."""
SLICE_COPIES = 4
"""Of [SLICE_ROWS, vocabulary] float32: logits, log-probabilities, a comparison, and what selecting the best takes."""


class Part(NamedTuple):
    """Consecutive tokens of one prompt: `length` of them from index `position` on, with `asked` alternatives each."""

    id: int
    incarnation: int
    position: int
    length: int
    asked: int


@dataclass(frozen=True, slots=True)
class Told:
    """The N prompt tokens whose log-probabilities a step tells, part after part."""

    parts: list[Part]
    where: Int64s
    """int64 [N]: which of the step's hidden states tells each."""
    targets: Int64s
    """int64 [N]: the tokens themselves."""
    most: int
    """The largest number of alternatives."""

    def messages(self, table: Int32s) -> list[PromptLogprobs]:
        """A message for each part. table int32 [N, 2 + 2 * most] has the bits of each target's log-probability, its
        rank, the ids of the likeliest, and the bits of their log-probabilities."""
        found, begin, most = [], 0, self.most
        for part in self.parts:
            rows = table[begin : begin + part.length]
            begin += part.length
            columns = (rows[:, 0], rows[:, 1], rows[:, 2 : 2 + part.asked], rows[:, 2 + most : 2 + most + part.asked])
            packed = (np.ascontiguousarray(column, "<i4").tobytes() for column in columns)
            found.append(PromptLogprobs(part.id, part.incarnation, part.position, *packed))
        return found


def told_by(batch: Batch, rows: Rows) -> Told | None:
    """What the step with these rows tells of prompts; None if nobody asks."""
    if not batch.params.tell_prompts:
        return None
    slots, limits = rows.slots, batch.limits
    first = np.maximum(rows.starts + 1, batch.prompt_from[slots])
    counts = np.minimum(rows.starts + rows.counts + 1, batch.num_prompt[slots]) - first
    asked = np.minimum(batch.params.prompt_logprobs[slots], min(limits.max_logprobs, limits.vocab_size))
    begins = np.cumsum(rows.counts, dtype=np.int64) - rows.counts - rows.starts
    telling = (asked >= 0) & (counts > 0) & ~batch.dead[slots]
    if not np.count_nonzero(telling):
        return None
    slots, first, counts, asked, begins = (column[telling] for column in (slots, first, counts, asked, begins))
    index, offset = spread(counts)
    positions = first[index] + offset
    columns = (batch.ids[slots], batch.incarnations[slots], first, counts, asked)
    return Told(
        parts=[Part(*values) for values in zip(*(column.tolist() for column in columns), strict=True)],
        where=begins[index] + positions - 1,
        targets=batch.tokens[slots[index], positions].astype(np.int64),
        most=int(asked.max()),
    )


def told_uniformly(batch: Batch, rows: Rows, first: int, logprob: float) -> list[PromptLogprobs]:
    """What is told where every id from `first` on is as likely as any other."""
    told = told_by(batch, rows)
    if told is None:
        return []
    table = np.empty((len(told.where), 2 + 2 * told.most), np.int32)
    table[:, 0] = table[:, 2 + told.most :] = np.array(logprob, np.float32).view(np.int32)
    table[:, 1] = 1
    table[:, 2 : 2 + told.most] = np.arange(first, first + told.most)
    return told.messages(table)


def slice_bytes(vocab_width: int) -> int:
    """Bytes that a slice takes at most."""
    return SLICE_COPIES * SLICE_ROWS * vocab_width * 4
