"""How much work a request will be: how much of its prompt isn't cached, and how many outputs it has, is taken to be
what it was for prompts of about its length."""

from __future__ import annotations

from math import log2

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PER_OCTAVE = 8
BUCKETS = 24 * PER_OCTAVE
"""Prompt lengths, an eighth of an octave each; the last takes all that are longer."""
MEMORY = 1000.0
"""Ended requests that a bucket goes by; older ones fade."""
PRIOR = 4.0
"""A bucket starts as if so many requests had ended in it that were like all on average."""


def bucket_of(num_prompt: int) -> int:
    """The bucket of a prompt of so many tokens."""
    return min(int(PER_OCTAVE * log2(max(num_prompt, 1))), BUCKETS - 1)


class ExpectedWork:
    """Work is the device's time, in ns, above the knee where a step waits for arithmetic: linear in its tokens and in
    the tokens that they attend. `costs` is what one of each takes (`StepPace.work_ns`)."""

    def __init__(self) -> None:
        self._ended = np.zeros(BUCKETS)
        self._seen = np.zeros((2, BUCKETS))
        """Sums over those ended: of the part of the prompt that was computed, and of outputs."""
        self._all: tuple[float, npt.NDArray[np.float64]] = 0.0, np.zeros(2)

    def learn(self, num_prompt: int, num_cached: int, outputs: int) -> None:
        """A request has ended that found `num_cached` tokens of its prompt in the prefix cache."""
        bucket, keep = bucket_of(num_prompt), 1.0 - 1.0 / MEMORY
        seen = np.array((1.0 - num_cached / max(num_prompt, 1), outputs))
        self._ended[bucket] = self._ended[bucket] * keep + 1.0
        self._seen[:, bucket] = self._seen[:, bucket] * keep + seen
        ended, sums = self._all
        self._all = ended * keep + 1.0, sums * keep + seen

    def expected(self) -> Floats:
        """The part of a prompt that has to be computed, and its outputs, in each bucket [2, BUCKETS]. All and none
        before any request has ended."""
        ended, sums = self._all
        mean = sums / ended if ended else np.array((1.0, 0.0))
        return np.asarray((self._seen + PRIOR * mean[:, None]) / (self._ended + PRIOR))

    def of(self, prompts: Floats, costs: tuple[float, float], computed: Floats | None = None) -> Floats:
        """Of requests with these prompts [N], tokens each, of which `computed` aren't in the cache, where that is
        known."""
        part, outputs = self.expected()[:, buckets_of(prompts)]
        return _work(prompts, prompts * part if computed is None else computed, outputs, costs)

    def computed(self, prompts: Floats) -> Floats:
        """The tokens of these prompts [N] that will have to be computed."""
        return np.asarray(prompts * self.expected()[0, buckets_of(prompts)])

    def of_buckets(self, counts: Floats, tokens: Floats, costs: tuple[float, float]) -> float:
        """Of `counts` requests per bucket with `tokens` prompt tokens together [BUCKETS]."""
        here = counts > 0
        prompts = tokens[here] / counts[here]
        part, outputs = self.expected()[:, here]
        return float((counts[here] * _work(prompts, prompts * part, outputs, costs)).sum())


def buckets_of(prompts: Floats) -> npt.NDArray[np.intp]:
    """The buckets of prompts of so many tokens [N]."""
    return np.minimum((PER_OCTAVE * np.log2(np.maximum(prompts, 1.0))).astype(np.intp), BUCKETS - 1)


def _work(prompts: Floats, computed: Floats, outputs: Floats, costs: tuple[float, float]) -> Floats:
    token, context = costs
    return computed * token + outputs * (token + context * (prompts + outputs / 2))
