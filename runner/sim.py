"""The simulated runner: a cost model in place of tensors, behind the same messages. Imports neither torch nor weights.

Tokens are a function of (sim seed, request seed, choice, prompt, position) and of nothing else, so a stream is the
same alone, in any batch, chunked, preempted and resumed:

    key      = mix(mix(mix(sim_seed ^ blake2b64(prompt)) ^ seed) ^ choice)
    draw(p)  = mix(key + p * 0x9E3779B97F4A7C15)          mix: the finaliser of splitmix64; p: index in the sequence
    token(p) = first + high 32 bits of draw(p) mod (vocab - first), the end id replaced by its neighbour;
               the end id itself when the low 32 bits / 2^32 fall below `sim_eos_rate` and min_tokens is reached.

A step costs what the `sim_` settings say as a linear model, or what a cost model says that was given. Steps that wait
in the queue start back to back: a step starts at the later of its receipt and the previous step's planned end, so late
wake-ups never add up. Swapped blocks add their bytes over `sim_copy_gb_s`. Grammars compile in `sim_grammar_ms` (a text
that begins with "invalid" doesn't) and change no token. KV arrives after `sim_kv_fetch_ms`: all of it, none from a
source named "fail…", N tokens from "partial:N", never from "never".
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.messages import (
    CompileGrammar,
    FetchKv,
    GrammarStatus,
    KvStatus,
    Limits,
    PromptLogprobs,
    Step,
    StepResult,
    TokenLogprobs,
)
from runner.batch import Int32s, Rows, StepError, spread
from runner.config import RunnerConfig
from runner.errands import Answer, Errand, refusal
from runner.pages import PageChecker
from runner.prompts import told_uniformly
from runner.step_costs import LinearCost, StepCost
from runner.steps import DEVICE_ERROR, Sampled, StepMachine, StepSize
from runner.uniform import GOLDEN, mix

U64s = npt.NDArray[np.uint64]
MAX_LOGPROBS = 20


def sim_limits(config: RunnerConfig) -> Limits:
    """The limits that a simulated runner announces."""
    return Limits(
        model=config.served_model_name,
        block_size=config.block_size,
        num_blocks=config.num_blocks_override or config.sim_num_blocks,
        max_model_len=config.max_model_len or config.sim_max_model_len,
        vocab_size=config.sim_vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens,
        eos_token_ids=(config.sim_eos_token_id,),
        dtype="simulated",
        kv_bytes_per_block=config.sim_kv_bytes_per_block,
        max_logprobs=min(MAX_LOGPROBS, config.sim_vocab_size),
        host_blocks=config.sim_host_blocks or config.swap_space_bytes // config.sim_kv_bytes_per_block,
    )


def sim_cost(config: RunnerConfig) -> LinearCost:
    """What a step takes by the settings."""
    return LinearCost(
        fixed_ns=config.sim_step_ms * 1e6,
        token_ns=config.sim_token_us * 1e3,
        context_ns=config.sim_context_ns,
        row_ns=config.sim_row_us * 1e3,
        overlap=config.sim_overlap,
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Time for steps: the first is received at `begin_ns`, each begins before `last_begin_ns`, none ends after
    `last_end_ns`."""

    begin_ns: int
    last_begin_ns: int
    last_end_ns: int


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What k steps of R decode rows sample, `tokens` [k, R], and when each of them ends."""

    tokens: Int32s
    ends_ns: list[int]


class SimulatedExecutor:
    """An `Executor` that spends time instead of computing. `clock_ns` and `sleep_until_ns` may be virtual.

    `cost` replaces the configured step time. `ends` maps a request to the output (counted from 1) that is its end
    token; requests that aren't in it end as configured.
    """

    def __init__(
        self,
        config: RunnerConfig,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep_until_ns: Callable[[int], None] | None = None,
        cost: StepCost | None = None,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        self.limits = sim_limits(config)
        self._cost = cost or sim_cost(config)
        self._ends = ends or {}
        self._end_at: Int32s = np.zeros(self.limits.max_num_seqs, np.int32)
        self._cost_ns = 0
        self._config = config
        self._clock_ns = clock_ns
        self._sleep_until_ns = sleep_until_ns or self._sleep
        self._machine = StepMachine(self.limits, PageChecker(self.limits) if config.sim_strict else None)
        self._keys: U64s = np.zeros(self.limits.max_num_seqs, np.uint64)
        self._planned_end_ns = 0
        self.inventory = self._machine.inventory
        self.weight_bytes = 0

    @property
    def num_residents(self) -> int:
        """Requests in the batch."""
        return len(self._machine.batch)

    def _sleep(self, deadline_ns: int) -> None:
        left = deadline_ns - self._clock_ns()
        if left > 0:
            time.sleep(left / 1e9)

    @property
    def step_size(self) -> StepSize:
        """Of the step that ran last."""
        return self._machine.size

    def clear(self) -> None:
        """Forget all residents."""
        self._machine.clear()

    def answer(self, errand: Errand) -> Answer | None:
        """What the names of grammar and source ask for, after the configured time."""
        if isinstance(errand, CompileGrammar):
            bad = errand.grammar.startswith("invalid")
            why = f"the grammar can't be compiled: {errand.grammar[:100]!r}" if bad else ""
            return Answer(GrammarStatus(errand.id, why), self._config.sim_grammar_ms / 1000)
        if errand.source == "never":
            return None
        count, why = errand.num_tokens, ""
        kind, _, number = errand.source.partition(":")
        if errand.source.startswith("fail"):
            count, why = 0, f"the source {errand.source!r} failed"
        elif kind == "partial":
            if not number.isdecimal():
                return refusal(errand, f"partial:{number}: expected a number of tokens")
            count = min(int(number), errand.num_tokens)
        return Answer(KvStatus(errand.id, errand.incarnation, count, why), self._config.sim_kv_fetch_ms / 1000)

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        """A transfer's pages are its own until it ends; then they hold what arrived."""
        self._machine.transfer(order, status)

    def execute(self, step: Step, received_ns: int) -> StepResult:
        """Run a step: bookkeeping and tokens at once, then wait until its planned end."""
        start = max(received_ns, self._planned_end_ns)
        self._cost_ns = 0
        result = self._machine.run(step, self._compute)
        if result.failure is not None:
            num_tokens = int(np.frombuffer(step.num_tokens, "<i4").sum()) if len(step.num_tokens) % 4 == 0 else 0
            self._cost_ns = self._cost.step_ns(max(num_tokens, 0), 0, 0)
        copy_ns = self._copy_ns(step)
        self._planned_end_ns = start + self._cost_ns + copy_ns
        self._sleep_until_ns(self._planned_end_ns)
        return msgspec.structs.replace(result, copy_ns=copy_ns) if copy_ns else result

    def foresee(self, ids: bytes, context: int, most: int, within: Span) -> Foreseen | None:
        """What up to `most` steps from now on would sample and when they would end, if each of these rows only decodes,
        attending `context` tokens together in the first one. Changes nothing.

        The last step is the first in which a row samples an end token, or the last that still begins and ends `within`
        the span. None if there is no such step, or what it does can't be told so easily.
        """
        batch, rows = self._machine.batch, len(ids) // 8
        if not self._machine.sound or self._config.sim_poison_token >= 0:
            return None
        slots = batch.lookup(ids)
        if batch.params.logprobs[slots].max() >= 0:
            return None
        now_ns = max(within.begin_ns, self._planned_end_ns)
        ends_ns: list[int] = []
        while len(ends_ns) < most and now_ns < within.last_begin_ns:
            cost_ns = self._cost.step_ns(rows, context, rows)
            if cost_ns <= 0 or now_ns + cost_ns > within.last_end_ns:
                break
            now_ns += cost_ns
            context += rows
            ends_ns.append(now_ns)
        if not ends_ns:
            return None
        positions = batch.num_tokens[slots] + np.arange(len(ends_ns), dtype=np.int32)[:, None]
        tokens = self._draw(slots, positions)
        ending = (tokens == self._config.sim_eos_token_id).any(axis=1)
        count = int(ending.argmax()) + 1 if ending.any() else len(ends_ns)
        return Foreseen(tokens[:count], ends_ns[:count])

    def coast(self, step: Step, seen: Foreseen) -> None:
        """Be where the steps that were foreseen lead; `step` says what they change together."""
        self._machine.coast(step, seen.tokens)
        self._planned_end_ns = seen.ends_ns[-1]
        self._sleep_until_ns(self._planned_end_ns)

    def _copy_ns(self, step: Step) -> int:
        """Bytes over GB/s are nanoseconds."""
        rate = self._config.sim_copy_gb_s
        num_blocks = (len(step.swap_out) + len(step.swap_in)) // 8
        return int(num_blocks * self.limits.kv_bytes_per_block / rate) if rate else 0

    def _compute(self, step: Step, rows: Rows) -> Sampled:
        if self._config.sim_poison_token >= 0:
            self._check_poison(rows)
        for new in step.new:
            slot = self._machine.batch.slot(new.id)
            if slot is not None:
                self._keys[slot] = self._key(new.tokens[: 4 * new.num_prompt], new.params.seed, new.params.choice)
                self._end_at[slot] = self._ends.get(new.id, 0)
        size = self._machine.size
        self._cost_ns = self._cost.step_ns(size.tokens, size.context, size.rows)
        slots = rows.slots[rows.samples]
        tokens = self._draw(slots, self._machine.batch.num_tokens[slots])
        return Sampled(tokens, self._logprobs(slots, tokens), prompts=self._tell_prompts(rows))

    def _check_poison(self, rows: Rows) -> None:
        """Go wrong as configured if one of these rows computes the poisonous token."""
        row, index = spread(rows.counts)
        tokens = self._machine.batch.tokens[rows.slots[row], rows.starts[row] + index]
        if not (tokens == self._config.sim_poison_token).any():
            return
        if self._config.sim_poison_fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._config.sim_poison_fault == "hang":
            threading.Event().wait()
        raise StepError(DEVICE_ERROR, f"the step computes token {self._config.sim_poison_token}")

    def _key(self, prompt: bytes, seed: int, choice: int) -> np.uint64:
        digest = int.from_bytes(hashlib.blake2b(prompt, digest_size=8).digest(), "little")
        key = mix(np.array([digest ^ self._config.sim_seed], np.uint64))
        key = mix(key ^ np.uint64(seed & 0xFFFFFFFFFFFFFFFF))
        return np.uint64(mix(key ^ np.uint64(choice & 0xFFFFFFFFFFFFFFFF))[0])

    def _draw(self, slots: npt.NDArray[np.int64], positions: Int32s) -> Int32s:
        """The tokens at `positions` ([R], or [k, R] for several of each row) of these requests."""
        batch, config = self._machine.batch, self._config
        draws = mix(self._keys[slots] + positions.astype(np.uint64) * GOLDEN)
        first, eos = config.sim_first_token_id, config.sim_eos_token_id
        span = config.sim_vocab_size - first
        tokens = (first + (draws >> np.uint64(32)) % np.uint64(span)).astype(np.int32)
        tokens[tokens == eos] = eos + 1 if eos + 1 < config.sim_vocab_size else first
        if config.sim_eos_rate > 0:
            low = (draws & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
            allowed = positions - batch.num_prompt[slots] >= batch.params.min_tokens[slots]
            tokens[(low < config.sim_eos_rate) & allowed] = eos
        if self._ends:
            tokens[positions - batch.num_prompt[slots] + 1 == self._end_at[slots]] = eos
        return tokens

    def _tell_prompts(self, rows: Rows) -> list[PromptLogprobs]:
        """Of the same distribution as all log-probabilities here."""
        first = self._config.sim_first_token_id
        return told_uniformly(self._machine.batch, rows, first, -math.log(self._config.sim_vocab_size - first))

    def _logprobs(self, slots: npt.NDArray[np.int64], tokens: Int32s) -> list[TokenLogprobs]:
        """Of the uniform distribution, which is what the simulator draws from: every id is as likely as any other."""
        batch = self._machine.batch
        asked = batch.params.logprobs[slots]
        found: list[TokenLogprobs] = []
        if len(asked) == 0 or asked.max() < 0:
            return found
        first, vocab = self._config.sim_first_token_id, self._config.sim_vocab_size
        logprob = -math.log(vocab - first)
        for row in np.flatnonzero(asked >= 0).tolist():
            slot, count = int(slots[row]), min(int(asked[row]), vocab - first)
            top = np.arange(first, first + count, dtype="<i4")
            values = np.full(count, logprob, "<f4")
            position = int(batch.num_tokens[slot])
            request = int(batch.ids[slot])
            found.append(TokenLogprobs(request, position, logprob, 1, top.tobytes(), values.tobytes()))
        return found
