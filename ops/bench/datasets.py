"""What to send: prompts of chosen or recorded lengths, each a pure function of (seed, index) or (seed, block hash).

A prompt is token ids (/v1/completions takes them, so lengths are exact) or text of common English words, one word per
wanted token: about right for BPE vocabularies; the server's usage tells the true count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ops.traces import TraceRow

Prompt = list[int] | str

# Streams of random numbers that must not meet: one tag per use.
_PROMPTS, _SHARED_PREFIX, _BLOCKS, _LENGTHS = 1, 2, 3, 4

_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "even most made after also did many off before must well back through years much where your way down should "
    "me because long each just state those people too mister how little good world make very year still see own work"
).split()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send. `input_tokens` is the wanted length; `at_s` the recorded arrival (None: not recorded)."""

    prompt: Prompt
    input_tokens: int
    output_tokens: int
    at_s: float | None = None


class Dataset(Protocol):
    """Requests by index; equal for equal seeds."""

    def __len__(self) -> int: ...

    def request(self, index: int) -> PlannedRequest:
        """The request at `index`; indices past the end give more of the kind."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Where prompt tokens come from: ids drawn from [low, high), or words when `text` is set."""

    low: int
    high: int
    text: bool

    def draw(self, key: Sequence[int], count: int) -> npt.NDArray[np.int64]:
        """`count` random items, a function of `key` alone. Shorter draws are prefixes of longer ones."""
        low, high = (0, len(_WORDS)) if self.text else (self.low, self.high)
        return np.random.default_rng(list(key)).integers(low, high, size=count)

    def prompt(self, items: npt.NDArray[np.int64]) -> Prompt:
        """Items as the request's prompt."""
        return " ".join(_WORDS[i] for i in items.tolist()) if self.text else items.tolist()


@dataclass(frozen=True, slots=True)
class RandomDataset:
    """Independent random prompts, optionally behind a shared prefix.

    Lengths are uniform in [n(1 - r), n(1 + r)], both ends included, at least 1. `prefix_tokens` come on top.
    """

    count: int
    input_tokens: int
    output_tokens: int
    range_ratio: float
    prefix_tokens: int
    vocabulary: Vocabulary
    seed: int

    def __len__(self) -> int:
        return self.count

    def request(self, index: int) -> PlannedRequest:
        lengths = np.random.default_rng([self.seed, _LENGTHS, index])
        own, output = (self._length(lengths, mean) for mean in (self.input_tokens, self.output_tokens))
        items = np.concatenate(
            [
                self.vocabulary.draw([self.seed, _SHARED_PREFIX], self.prefix_tokens),
                self.vocabulary.draw([self.seed, _PROMPTS, index], own),
            ]
        )
        return PlannedRequest(self.vocabulary.prompt(items), len(items), output)

    def _length(self, rng: np.random.Generator, mean: int) -> int:
        low, high = (round(mean * (1 + sign * self.range_ratio)) for sign in (-1, 1))
        return max(1, int(rng.integers(low, high + 1)))


@dataclass(frozen=True, slots=True)
class TraceDataset:
    """Recorded lengths and arrivals; prompts as recorded, or made up so that equal hash ids give equal blocks.

    `max_input` and `max_output` clip a row for models that are smaller than the recorded one.
    """

    rows: Sequence[TraceRow]
    vocabulary: Vocabulary
    seed: int
    max_input: int | None = None
    max_output: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def request(self, index: int) -> PlannedRequest:
        row = self.rows[index % len(self.rows)]
        length = max(1, min(row.input_tokens, self.max_input or row.input_tokens))
        output = max(1, min(row.output_tokens, self.max_output or row.output_tokens))
        if row.token_ids and not self.vocabulary.text:
            return PlannedRequest(list(row.token_ids[:length]), length, output, row.at_s)
        size = row.block_tokens
        blocks = [
            self.vocabulary.draw([self.seed, _BLOCKS, hash_id], size) for hash_id in row.hash_ids[: -(-length // size)]
        ]
        missing = max(0, length - size * len(blocks))
        blocks.append(self.vocabulary.draw([self.seed, _PROMPTS, index], missing))
        return PlannedRequest(self.vocabulary.prompt(np.concatenate(blocks)[:length]), length, output, row.at_s)


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> npt.NDArray[np.float64]:
    """Seconds at which `count` requests are due, the first at 0; all 0 for an infinite `rate` (requests/s).

    Gaps follow a gamma distribution of mean 1/rate and shape `burstiness`: 1 is a Poisson process, below 1 comes in
    bursts, above 1 is more regular, infinite is evenly spaced.
    """
    if np.isinf(rate):
        return np.zeros(count)
    if np.isinf(burstiness):
        gaps = np.full(max(0, count - 1), 1 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), size=max(0, count - 1))
    return np.concatenate([[0.0], np.cumsum(gaps)])[:count]
