"""What the scheduler bench times: the real scheduler, loaded with requests, and a stand-in for its runner.

The stand-in makes results as a runner would but computes nothing, always between the clocks of two timed calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import Limits, SamplingParams, Step, StepResult, Submit
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler

BLOCK_SIZE = 16
VOCABULARY = 49_152
FIRST_TOKEN, NUM_TOKENS = 1000, 40_000
STEP_TOKENS = 8192
MAX_MODEL_LEN = 16_384
PEER = 0
WAITING_TOKENS, WAITING_PREFIXES, TENANTS, PRIORITIES = 64, 100, 8, 5

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class PassTime:
    """One pass: nanoseconds of `schedule` and of `update` with the outputs taken, and what the step held."""

    schedule_ns: int
    update_ns: int
    rows: int
    sampled: int
    blocks_taken: int

    @property
    def total_ns(self) -> int:
        """The pass and its update."""
        return self.schedule_ns + self.update_ns


def prompt_tokens(seed: int, length: int) -> bytes:
    """A prompt of `length` token ids (i32 column) that shares no leading block with one of another seed."""
    lap, start = divmod(seed, NUM_TOKENS)
    return pack_i32((np.arange(length) * (31 + lap) + start * 7919) % NUM_TOKENS + FIRST_TOKEN)


def staggered(base: int, index: int) -> int:
    """Length of the prompt at `index`: from `base` up, so that in every step one row in 16 needs a block."""
    return base + index % BLOCK_SIZE


class StandIn:
    """Answers steps: a row that reaches its last known token gets another. Checks nothing; see the tests for that."""

    def __init__(self) -> None:
        self._incarnation: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        self._known: dict[int, int] = {}

    def execute(self, step: Step) -> StepResult:
        for request_id in u64(step.left).tolist():
            for column in (self._incarnation, self._computed, self._known):
                column.pop(request_id, None)
        for new in step.new:
            self._incarnation[new.id] = new.incarnation
            self._computed[new.id] = new.num_computed
            self._known[new.id] = len(new.tokens) >> 2
        sampled = []
        for request_id, count in zip(u64(step.ids).tolist(), i32(step.num_tokens).tolist(), strict=True):
            self._computed[request_id] += count
            if self._computed[request_id] == self._known[request_id]:
                sampled.append(request_id)
        positions = [self._known[request_id] for request_id in sampled]
        for request_id in sampled:
            self._known[request_id] += 1
        return StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            ids=pack_u64(sampled),
            incarnations=pack_i32([self._incarnation[request_id] for request_id in sampled]),
            positions=pack_i32(positions),
            tokens=pack_i32([FIRST_TOKEN + position % NUM_TOKENS for position in positions]),
        )


class Subject:
    """A scheduler with its stand-in. Built empty; `decodes` loads it with running requests.

    `clock` times the calls from outside; what the scheduler does with its own clock is part of them.
    """

    def __init__(
        self, *, max_num_seqs: int, num_blocks: int, queue_policy: str = "", clock: Clock = time.perf_counter_ns
    ) -> None:
        limits = Limits(
            model="bench",
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=STEP_TOKENS,
            eos_token_ids=(2,),
        )
        config = SchedulerConfig(
            queue_policy=queue_policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_queued_reqs=0,
        )
        self.core = CoreScheduler(config, limits, b"bench-hash-key!!", clock=time.perf_counter_ns)
        self.core.epoch = 1
        self.last_step: Step | None = None
        self._runner = StandIn()
        self._clock = clock
        self._next_id = 1

    def submit(self, prompt: bytes, max_tokens: int, **more: Any) -> int:
        """Add a request; the nanoseconds that took. `more` are fields of Submit. RuntimeError if it was refused."""
        params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        submit = Submit(self._next_id, prompt, params, **more)
        self._next_id += 1
        start = self._clock()
        self.core.add(PEER, submit)
        elapsed = self._clock() - start
        for _, outputs in self.core.take_outputs():
            for rejection in outputs.rejected:
                raise RuntimeError(f"the scheduler refused a request of the bench: {rejection.message}")
        return elapsed

    def step(self) -> PassTime:
        """One timed pass and its timed update. RuntimeError if nothing could be scheduled."""
        free = self.core.refresh_stats().free_blocks
        start = self._clock()
        step = self.core.schedule()
        schedule_ns = self._clock() - start
        if step is None:
            raise RuntimeError("the scheduler had nothing to schedule")
        taken = free - self.core.refresh_stats().free_blocks
        self.last_step = step
        result = self._runner.execute(step)
        start = self._clock()
        self.core.update(result)
        self.core.take_outputs()
        update_ns = self._clock() - start
        return PassTime(schedule_ns, update_ns, len(step.ids) >> 3, len(result.ids) >> 3, taken)


def decodes(running: int, waiting: int, *, policy: str, prompt_len: int, max_steps: int) -> Subject:
    """A scheduler with `running` requests that all decode for at least `max_steps` more steps, and `waiting` that
    can't enter because every slot is taken.

    Prompts of running requests share nothing. Those that wait differ in what policies look at: each shares half of its
    prompt with one in a hundred, and they have several tenants, priorities, routing keys and deadlines.
    """
    longest = prompt_len + BLOCK_SIZE
    max_tokens = max_steps + prefill_steps(running, longest)
    subject = Subject(
        max_num_seqs=running,
        num_blocks=2 * running * (-(-(longest + max_tokens) // BLOCK_SIZE) + 1),
        queue_policy=policy,
    )
    for index in range(running):
        subject.submit(prompt_tokens(index, staggered(prompt_len, index)), max_tokens)
    while subject.step().sampled < running:
        pass
    for index in range(waiting):
        half = WAITING_TOKENS // 2
        prompt = prompt_tokens(running + index % WAITING_PREFIXES, half) + prompt_tokens(running + index, half)
        subject.submit(
            prompt,
            1 + index % WAITING_TOKENS,
            priority=index % PRIORITIES,
            tenant=f"tenant-{index % TENANTS}",
            routing_key=f"session-{index % WAITING_PREFIXES}",
            deadline_ms=60_000 + index * 7919 % 60_000,
        )
    return subject


def prefill_steps(running: int, longest: int) -> int:
    """Steps until the last of `running` prompts has its first token, at most: decodes beside it use budget too."""
    return 2 + -(-running * longest // max(1, STEP_TOKENS - running))
