"""Drives a server through batch sizes and prompt lengths and collects the steps that come of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ops.bench.datasets import RandomDataset, Vocabulary
from ops.bench.http_client import Clock, HttpClient
from ops.bench.load import LoadResult, RequestShape, run_load
from ops.bench.openai_stream import RequestRecord
from ops.calibrate.fit import Samples
from ops.calibrate.steps import StepReader, Steps
from protocol.messages import Limits

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (16, 128, 512, 2048)
OUTPUTS = 16
PROBES = 8
PROBE_PROMPT = 16
MOST_PROMPT_TOKENS = 8192
"""A run of more would teach no more, and take its time from others."""
POOL_SHARE = 0.8
"""What a run may take of the KV pool: preempted requests would blur it."""
FIRST_TOKEN_ID = 1000  # above special ids, which would stream as empty text
REQUEST_TIMEOUT_S = 300.0


class SweepError(RuntimeError):
    """The server's answers are of no use for a measurement; says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """So many requests at once, each of so many tokens."""

    batch: int
    prompt: int
    outputs: int = OUTPUTS


@dataclass
class Measured:
    """What a sweep has seen so far. `delivery` and `pauses` in ns."""

    parts: list[Samples] = field(default_factory=list)
    delivery: list[int] = field(default_factory=list)
    pauses: list[int] = field(default_factory=list)
    runs: int = 0

    @property
    def samples(self) -> Samples:
        """All steps."""
        columns = zip(*((p.tokens, p.context, p.rows, p.ns, p.group) for p in self.parts), strict=True)
        return Samples(*(np.concatenate(column) for column in columns))

    def pause_ns(self) -> float:
        """The usual time between two steps of which the second waits already; 0 if no step ever waited."""
        return float(np.median(self.pauses)) if self.pauses else 0.0

    def delivery_ns(self) -> float:
        """The usual time that a first token takes beside its steps."""
        return float(np.median(self.delivery)) if self.delivery else 0.0


def plan(limits: Limits, batches: Sequence[int] = BATCHES, prompts: Sequence[int] = PROMPTS) -> list[Run]:
    """The runs that this server can take without preempting."""
    pool = (limits.num_blocks - 1) * limits.block_size * POOL_SHARE
    return [
        Run(batch, prompt)
        for batch in batches
        for prompt in prompts
        if batch <= limits.max_num_seqs
        and prompt + OUTPUTS <= limits.max_model_len
        and batch * prompt <= MOST_PROMPT_TOKENS
        and batch * (prompt + OUTPUTS + limits.block_size) <= pool
    ]


class Sweep:
    """Runs against one server. The clock must be the monotonic one: the runner's times are of that."""

    def __init__(
        self, client: HttpClient, model: str, reader: StepReader, seed: int, clock: Clock = time.monotonic
    ) -> None:
        self._client = client
        self._shape = RequestShape("/v1/completions", model, ignore_eos=True)
        self._reader = reader
        self._seed = seed
        self._clock = clock
        self.limits = reader.skip()
        self.measured = Measured()
        self._vocabulary = Vocabulary(FIRST_TOKEN_ID, min(30_000, self.limits.vocab_size), text=False)

    async def probe(self, count: int = PROBES) -> None:
        """Short requests, one after the other, on an idle server: what a first token takes beside its steps."""
        prompt = min(PROBE_PROMPT, self.limits.max_model_len - 2)
        for _ in range(count):
            result, steps = await self.run(Run(1, prompt, 2))
            self.measured.delivery += deliveries(result.records, steps)

    async def whole(
        self, runs: Sequence[Run], seconds: float, on_run: Callable[[Run, float], None] = lambda run, left: None
    ) -> None:
        """All runs in random order, again and again until `seconds` have passed; each once, if that takes no more than
        three times as long."""
        order = random.Random(self._seed)
        end = self._clock() + seconds
        done = 0
        while self._clock() < (end if done >= len(runs) else end + 2 * seconds):
            if done % len(runs) == 0:
                turn = order.sample(list(runs), len(runs))
            run = turn[done % len(runs)]
            on_run(run, max(0.0, end - self._clock()))
            _, steps = await self.run(run)
            self.measured.parts.append(steps.samples(self.measured.runs))
            self.measured.pauses += steps.pauses().tolist()
            done += 1

    async def run(self, run: Run) -> tuple[LoadResult, Steps]:
        """One run's answers and steps. SweepError if a request failed."""
        self.measured.runs += 1
        seed = self._seed + self.measured.runs  # no prompt twice: nothing is found in the prefix cache
        dataset = RandomDataset(run.batch, run.prompt, run.outputs, 0.0, 0, self._vocabulary, seed)
        result = await run_load(
            self._client,
            self._shape,
            dataset,
            [0.0] * run.batch,
            timeout_s=REQUEST_TIMEOUT_S,
            clock=self._clock,
        )
        failed = [record for record in result.records if record.error is not None]
        if failed:
            raise SweepError(f"{len(failed)} of {run.batch} requests failed: {failed[0].error_message}")
        return result, self._reader.read()


def deliveries(records: Sequence[RequestRecord], steps: Steps) -> list[int]:
    """Of requests that were alone: ns from sending to the runner's receipt, and from the step that computed the end of
    the prompt to the first chunk."""
    found = []
    for record in records:
        if not record.chunk_times:
            continue
        sent, first = int(record.sent_at * 1e9), int(record.chunk_times[0] * 1e9)
        mine = np.flatnonzero((steps.received >= sent) & (steps.ended <= first))
        computed = np.cumsum(steps.tokens[mine])
        last = int(np.searchsorted(computed, record.prompt_tokens))
        if last < len(mine):
            found.append(int(steps.received[mine[0]] - sent + first - steps.ended[mine[last]]))
    return found
