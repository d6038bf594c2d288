"""`triptych bench placement`: what the choice of a replica is worth, on a trace and a virtual clock.

The dispatch and the schedulers that serve, a simulated runner each; nothing between them takes time.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ops.replay.clock import VirtualClock
from ops.replay.setups import MODEL, at_rate, cost_of
from ops.replay.workload import Workload, build
from ops.traces import TraceError, read_trace
from protocol.messages import Limits, StepResult
from protocol.settings import SettingError
from runner.config import RunnerConfig
from runner.sim import SimulatedExecutor
from runner.step_costs import StepCost
from scheduler.config import PLACEMENT_NAMES, SchedulerConfig
from scheduler.core import CoreScheduler
from scheduler.dispatch import Dispatch

PEER, EPOCH = 0, 1
STATUS_NS = 500_000_000
"""How often a scheduler process brings its levels up to date."""
NEVER_NS = 1 << 62


@dataclass(slots=True)
class _Link:
    """What a dispatch asks of a link."""

    limits: Limits
    up: bool = True
    state: str = "ready"
    epoch: int = EPOCH


class SimulatedReplica:
    """A replica as the dispatch sees it: the serving scheduler, a simulated runner, and the steps between them."""

    down_since: float | None = None

    def __init__(
        self, number: int, config: SchedulerConfig, runner: RunnerConfig, cost: StepCost, clock: VirtualClock
    ) -> None:
        self.number = number
        self.up = True
        self._clock = clock
        self._own = VirtualClock()
        self._executor = SimulatedExecutor(runner, clock_ns=self._own, sleep_until_ns=self._own.sleep_until, cost=cost)
        self.link = _Link(self._executor.limits)
        self.core = CoreScheduler(config, self._executor.limits, b"triptych bench!!", clock=clock)
        self.core.epoch = EPOCH
        self.core.refresh_stats()
        self._flights: deque[tuple[int, StepResult]] = deque()
        self._free_ns = 0
        self.busy_ns = 0

    def get_core(self) -> CoreScheduler:
        """The scheduler object."""
        return self.core

    def begin_work(self) -> None:
        """Nothing is measured here."""

    @property
    def next_ns(self) -> int:
        """When its next step ends."""
        return self._flights[0][0] if self._flights else NEVER_NS

    def turn(self) -> None:
        """Apply what has ended by now, and send steps until the pipeline is full."""
        while self.next_ns <= self._clock.now_ns:
            self.core.update(self._flights.popleft()[1])
        while self.core.in_flight < self.core.config.pipeline_depth:
            step = self.core.schedule()
            if step is None:
                break
            begin = max(self._clock.now_ns, self._free_ns)
            result = self._executor.execute(step, begin)
            self._free_ns = self._own.now_ns
            self.busy_ns += self._free_ns - begin
            self._flights.append((self._free_ns, msgspec.structs.replace(result, execute_ns=self._free_ns - begin)))


@dataclass(slots=True)
class Result:
    """What one policy came to. Times in seconds; `requests` per replica."""

    policy: str
    hit_ratio: float
    ttft: list[float] = field(default_factory=list)
    span_s: float = 0.0
    tokens: int = 0
    requests: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """Of the times to the first token."""
        return sorted(self.ttft)[min(int(share * len(self.ttft)), len(self.ttft) - 1)]


def play(workload: Workload, policy: str, count: int, runner: RunnerConfig, cost: StepCost, **changes: Any) -> Result:
    """Replay on `count` replicas. All requests end, as recorded."""
    clock = VirtualClock()
    config = SchedulerConfig(placement_policy=policy, max_num_queued_reqs=0, preset="vllm", **changes)
    replicas = [SimulatedReplica(number, config, runner, cost, clock) for number in range(count)]
    dispatch = Dispatch(replicas, config)  # type: ignore[arg-type]
    waiting = deque((workload.rows[index].at_ns, index) for index in workload.order)
    result, first, status_ns = Result(policy, 0.0), set[int](), 0
    while waiting or len(dispatch):
        times = [replica.next_ns for replica in replicas] + ([waiting[0][0]] if waiting else [])
        clock.sleep_until(min(times))
        if clock.now_ns >= status_ns:
            status_ns = clock.now_ns + STATUS_NS
            for replica in replicas:
                replica.core.refresh_stats()
        while waiting and waiting[0][0] <= clock.now_ns:
            dispatch.submit(PEER, workload.submit(waiting.popleft()[1]))
        for replica in replicas:
            replica.turn()
            for _, outputs in replica.core.take_outputs():
                if outputs.rejected:
                    raise SettingError(f"request {outputs.rejected[0].id}: {outputs.rejected[0].message}")
                dispatch.told(replica.number, outputs)
                for index in set(memoryview(outputs.ids).cast("Q")) - first:
                    first.add(index)
                    result.ttft.append((clock.now_ns - workload.rows[index].at_ns) / 1e9)
    stats = [replica.core.stats for replica in replicas]
    result.hit_ratio = sum(one.prefix_hit_tokens for one in stats) / sum(one.prefix_queried_tokens for one in stats)
    result.tokens = sum(one.generated_tokens + one.prompt_tokens for one in stats)
    result.span_s = clock.now_ns / 1e9
    result.requests = [one.started for one in stats]
    result.busy = [replica.busy_ns / max(clock.now_ns, 1) for replica in replicas]
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    options = _parser().parse_args(list(argv))
    try:
        rows = read_trace(options.trace, limit=options.limit)
        workload = build(at_rate(rows, options.rate) if options.rate else rows, max_model_len=131_072)
        runner = RunnerConfig(
            backend="sim",
            num_blocks_override=options.blocks + 1,
            max_model_len=131_072,
            max_num_batched_tokens=8192,
            sim_vocab_size=workload.vocab_size,
            sim_eos_token_id=workload.vocab_size - 1,
            sim_strict=False,
        )
        cost = cost_of(argparse.Namespace(cost="roofline", model=None, tflops=None, bandwidth=None, cost_set=()))
        print(f"{len(workload)} requests, {options.replicas} replicas of {options.blocks} blocks, {MODEL}")
        titles = f"{'placement':14}{'prefix hits':>12}{'TTFT mean':>11}{'p50':>8}{'p99':>9}{'tok/s':>9}"
        print(f"{titles}{'busy':>14}{'requests':>14}")
        for policy in options.policy or PLACEMENT_NAMES:
            _print(play(workload, policy, options.replicas, runner, cost))
    except (OSError, TraceError, SettingError) as error:
        print(f"triptych bench placement: {error}", file=sys.stderr)
        return 2
    return 0


def _print(result: Result) -> None:
    mean = sum(result.ttft) / len(result.ttft)
    busy = " ".join(f"{share:.0%}" for share in result.busy)
    requests = " ".join(map(str, result.requests))
    ttft = f"{mean:9.2f} s{result.percentile(0.5):8.2f}{result.percentile(0.99):9.2f}"
    tail = f"{result.tokens / result.span_s:9.0f}{busy:>14}{requests:>14}"
    print(f"{result.policy:14}{result.hit_ratio:12.1%}{ttft}{tail}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triptych bench placement",
        description="Replays a trace on several simulated replicas, once for each way of placing requests among them.",
    )
    parser.add_argument("trace", type=Path, help="a trace as `triptych replay` reads it; one with shared prefixes")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="runners (default 2)")
    parser.add_argument("--rate", type=float, default=0.0, metavar="R", help="requests a second (default: as recorded)")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="only the first N requests")
    parser.add_argument("--blocks", type=int, default=20_480, metavar="N", help="KV blocks of each (default 20480)")
    parser.add_argument("--policy", action="append", choices=PLACEMENT_NAMES, help="only this one; may be repeated")
    return parser
