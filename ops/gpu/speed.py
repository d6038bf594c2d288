"""Phase `speed`: decode and prefill of Llama-3-8B's shape with random weights, as fractions of the measured ceilings.

Steps go through the runner's own executor: batch columns, plans, graphs and sampling are in the times, and so are gaps
that the host leaves between steps. There is no scheduler here: that is phase `loop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from ops.gpu.random_model import random_model
from ops.gpu.report import Checks, Skipped
from ops.gpu.roofline import (
    DECODE_GOAL,
    DECODE_GOAL_FROM,
    PREFILL_GOAL,
    Ceilings,
    blocks_needed,
    decode_bytes,
    decode_fraction,
    prefill_fraction,
    prefill_work,
    that_fit,
)
from ops.gpu.setting import Setting
from ops.gpu.stepping import ahead, arrival, step
from protocol.messages import Step
from runner.config import RunnerConfig
from runner.cuda.executor import DeviceExecutor
from runner.cuda.load import Builder
from runner.pool import PoolSize
from scheduler.costs import NAMED_SHAPES, ModelShape, kv_bytes_per_token

PAGE = 16
LEAST_S = 8.0  # a point takes less
SPARE = 2 * PAGE
"""Tokens that each row has room for beyond its context and the measured steps."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: decodes (batch, context), prefill chunks, how many steps, and the most memory for KV."""

    shape: ModelShape
    decodes: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 2048))
    chunks: tuple[int, ...] = (2048, 8192)
    steps: int = 48
    warm_up: int = 8
    prefills: int = 8
    kv_bytes: int = 80 << 30


FULL = Sizes(NAMED_SHAPES["llama-3-8b"])
SMALL = Sizes(
    ModelShape(2, 64, 2, 1, 64, 96, 200), ((1, 32), (3, 48), (3, 4096)), (32,), steps=4, warm_up=2, prefills=2,
    kv_bytes=1 << 20,
)  # fmt: skip


def run(checks: Checks, setting: Setting, sizes: Sizes = FULL) -> None:
    """Without ceilings only times are told. Points for which no time is left are skipped."""
    given, ceilings = setting.given, None
    if "ceilings.bytes_per_s" in given and "ceilings.flops_per_s" in given:
        ceilings = Ceilings(given["ceilings.bytes_per_s"], given["ceilings.flops_per_s"])
    speed, executor = Speed(setting, sizes), None
    with checks.attempt("random model") as found:
        executor = speed.build()
        found.numbers |= {"weights_GB": executor.weight_bytes / 1e9, "blocks": executor.limits.num_blocks}
    if executor is None:
        return
    for batch, context in speed.decodes:
        with checks.attempt(f"decode {batch} × {context}, step") as found:
            _in_time(checks)
            seconds = speed.decode_seconds(executor, batch, context)
            found.numbers |= {"ms": seconds * 1e3, "tokens_per_s": batch / seconds}
            found.numbers["GB"] = decode_bytes(sizes.shape, batch, speed.middle(context)) / 1e9
            if ceilings is not None:
                fraction = decode_fraction(sizes.shape, batch, speed.middle(context), seconds, ceilings)
                name = f"decode {batch} × {context}, of the bandwidth"
                if batch >= DECODE_GOAL_FROM:
                    checks.goal(name, fraction, DECODE_GOAL)
                else:
                    checks.measured(name, f"{fraction:.1%}", fraction=fraction)
    for chunk in sizes.chunks:
        with checks.attempt(f"prefill {chunk}, step") as found:
            _in_time(checks)
            seconds = speed.prefill_seconds(executor, chunk)
            found.numbers |= {"ms": seconds * 1e3, "tokens_per_s": chunk / seconds}
            found.numbers["TFLOP"] = prefill_work(sizes.shape, chunk) / 1e12
            if ceilings is not None:
                fraction = prefill_fraction(sizes.shape, chunk, seconds, ceilings)
                checks.goal(f"prefill {chunk}, of the matrix rate", fraction, PREFILL_GOAL)


def _in_time(checks: Checks) -> None:
    if checks.left_s < LEAST_S:
        raise Skipped("no time was left")


class Speed:
    """Makes the executor and times steps on it."""

    def __init__(self, setting: Setting, sizes: Sizes, clock: Callable[[], float] = time.perf_counter) -> None:
        self._setting, self._sizes, self._clock = setting, sizes, clock
        self._room = sizes.steps + sizes.warm_up + SPARE
        self._number = 0
        blocks = sizes.kv_bytes // (kv_bytes_per_token(sizes.shape) * PAGE)
        self.decodes = that_fit(sizes.decodes, self._room, PAGE, blocks)
        """The points that the memory for KV holds."""
        needed = [blocks_needed(rows, context + self._room, PAGE) for rows, context in self.decodes]
        self._blocks = max(*needed, *(blocks_needed(1, chunk + PAGE, PAGE) for chunk in sizes.chunks))
        self._longest = max(chain((context for _, context in self.decodes), sizes.chunks)) + self._room

    def middle(self, context: int) -> int:
        """Tokens behind a row in the middle of the measured steps."""
        return context + self._sizes.warm_up + self._sizes.steps // 2

    def build(self) -> DeviceExecutor:
        """The random model with just the pages and the graphs that are needed; pages hold random numbers, as zeros
        would draw less power."""
        sizes, setting = self._sizes, self._setting
        rows = max(rows for rows, _ in self.decodes)
        most = max(*sizes.chunks, *(2 * batch * PAGE for batch, _ in self.decodes))
        model = random_model(sizes.shape, self._longest, setting.module, setting.device.torch)
        config = RunnerConfig(
            device="cuda", max_num_seqs=rows, max_num_batched_tokens=most, max_model_len=self._longest, block_size=PAGE
        )
        builder = Builder(config, model, setting.device, setting.module)
        buckets = sorted({rows for rows, _ in self.decodes})
        executor = builder.build(PoolSize(self._blocks, self._longest, 0), buckets)
        for layer in executor.pages.layers:
            layer.normal_()
        return executor

    def decode_seconds(self, executor: DeviceExecutor, batch: int, context: int) -> float:
        """Mean time of a step, two under way, after some that aren't counted."""
        sizes = self._sizes
        per_row = -(-(context + self._room) // PAGE)
        computed = (context - PAGE) // PAGE * PAGE  # what the prompt's last page holds is computed, the rest is there
        tokens = [1 + index % (sizes.shape.vocab - 1) for index in range(context)]
        counts = dict.fromkeys(range(batch), 1)
        news = [
            arrival(row, tokens, 1 + row * per_row, context + self._room, PAGE, computed=computed)
            for row in range(batch)
        ]
        first = self._step(dict.fromkeys(range(batch), context - computed), arrivals=news)
        ahead(executor, [first, *(self._step(counts) for _ in range(sizes.warm_up))])
        began = self._clock()
        ahead(executor, (self._step(counts) for _ in range(sizes.steps)))
        elapsed = self._clock() - began
        executor.clear()
        return elapsed / sizes.steps

    def prefill_seconds(self, executor: DeviceExecutor, chunk: int) -> float:
        """Mean time of a step that computes one prompt of `chunk` tokens, two under way."""
        tokens = [1 + index % (self._sizes.shape.vocab - 1) for index in range(chunk)]

        def steps(first: int, count: int) -> Iterator[Step]:
            for request in range(first, first + count):
                left = [request - 1] if request > first else []
                yield self._step({request: chunk}, arrivals=[arrival(request, tokens, 1, chunk, PAGE)], left=left)

        ahead(executor, steps(0, 2))
        executor.clear()
        began = self._clock()
        ahead(executor, steps(10, self._sizes.prefills))
        elapsed = self._clock() - began
        executor.clear()
        return elapsed / self._sizes.prefills

    def _step(self, counts: dict[int, int], **more: object) -> Step:
        self._number += 1
        return step(self._number, counts, **more)  # type: ignore[arg-type]
