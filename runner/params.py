"""Sampling parameters as columns over batch slots, written once per residency. No torch: the simulator has them too.

Bounds on token ids are enforced here against the sampled vocabulary, so that nothing downstream can index past a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from protocol.messages import SamplingParams

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by less only overflows
LARGEST = 1e6  # for any real-valued parameter: sums and quotients with logits stay finite in float32
NO_ALLOWED = "no_allowed_tokens"
BAD_PARAMS = "bad_params"


class ParamError(ValueError):
    """Parameters that can't be sampled with; concerns one request. `code` is a RowError code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Constraint:
    """A grammar that binds a request's outputs, the ids that may end them, and where in it they have led: known for
    this residency only, since the outputs tell it again."""

    grammar: str
    ends: frozenset[int]
    place: Any = None


class ParamColumns:
    """One row of parameters per slot. Rare, ragged ones (bias, allow list, end ids) are kept as arrays per slot."""

    def __init__(self, capacity: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.zeros(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.ones(capacity, np.float32)
        self.min_p = np.zeros(capacity, np.float32)
        self.repetition = np.ones(capacity, np.float32)
        self.presence = np.zeros(capacity, np.float32)
        self.frequency = np.zeros(capacity, np.float32)
        self.seed = np.zeros(capacity, np.uint64)
        self.choice = np.zeros(capacity, np.uint64)
        self.min_tokens = np.zeros(capacity, np.int32)
        self.logprobs = np.full(capacity, -1, np.int32)
        self.prompt_logprobs = np.full(capacity, -1, np.int32)
        self.penalised = np.zeros(capacity, np.bool_)
        self.edited = np.zeros(capacity, np.bool_)  # has an allow list, a bias or end ids under min_tokens
        self.constrained = np.zeros(capacity, np.bool_)  # has a grammar
        self.plain = np.ones(capacity, np.bool_)  # greedy and nothing else: the argmax of the raw logits
        self.end_ids: dict[int, np.ndarray] = {}
        self.allowed: dict[int, np.ndarray] = {}
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.constraints: dict[int, Constraint] = {}
        self.tell_prompts: set[int] = set()
        """Slots whose prompts are asked for log-probabilities."""

    def set(self, slot: int, params: SamplingParams) -> None:
        """Write a request's parameters into `slot`. ParamError if no token could ever be sampled with them."""
        self.clear(slot)
        numbers = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            *(value for _, value in params.logit_bias),
        )
        if not all(abs(number) <= LARGEST for number in numbers):  # false for NaN, too
            raise ParamError(BAD_PARAMS, f"a sampling parameter is not a finite number up to {LARGEST:g}")
        if params.repetition_penalty <= 0:
            raise ParamError(BAD_PARAMS, f"repetition_penalty is {params.repetition_penalty}, it must be above 0")
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(max(params.top_k, 0), self.vocab_size)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.seed[slot] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.choice[slot] = params.choice & 0xFFFFFFFFFFFFFFFF
        self.logprobs[slot] = params.logprobs
        self.prompt_logprobs[slot] = params.prompt_logprobs
        if params.prompt_logprobs >= 0:
            self.tell_prompts.add(slot)
        self.penalised[slot] = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._set_ragged(slot, params)
        self.plain[slot] = (
            self.temperature[slot] < GREEDY_BELOW
            and params.logprobs < 0
            and not self.penalised[slot]
            and not self.edited[slot]
            and not self.constrained[slot]
        )

    def _set_ragged(self, slot: int, params: SamplingParams) -> None:
        if params.allowed_token_ids:
            allowed = self._in_range(params.allowed_token_ids)
            if allowed.size == 0:
                raise ParamError(NO_ALLOWED, f"none of allowed_token_ids is below the vocabulary of {self.vocab_size}")
            self.allowed[slot] = allowed
        if params.logit_bias:
            ids = np.array([token for token, _ in params.logit_bias], np.int64)
            values = np.array([value for _, value in params.logit_bias], np.float32)
            inside = (ids >= 0) & (ids < self.vocab_size)
            self.bias[slot] = (ids[inside], values[inside])
        if params.min_tokens > 0:
            self.min_tokens[slot] = params.min_tokens
            self.end_ids[slot] = self._in_range((*params.eos_token_ids, *params.stop_token_ids))
        if params.grammar:
            # A model without end ids can still be told to stop.
            ends = self._in_range(params.eos_token_ids or params.stop_token_ids)
            self.constraints[slot] = Constraint(params.grammar, frozenset(ends.tolist()))
        self.constrained[slot] = slot in self.constraints
        self.edited[slot] = slot in self.allowed or slot in self.bias or slot in self.end_ids

    def _in_range(self, ids: tuple[int, ...]) -> np.ndarray:
        unique = np.unique(np.array(ids, np.int64))
        return unique[(unique >= 0) & (unique < self.vocab_size)]

    def clear(self, slot: int) -> None:
        """Forget the ragged parts of a slot; the columns are overwritten by the next `set`."""
        self.allowed.pop(slot, None)
        self.bias.pop(slot, None)
        self.end_ids.pop(slot, None)
        self.constraints.pop(slot, None)
        self.tell_prompts.discard(slot)
        self.min_tokens[slot] = 0
