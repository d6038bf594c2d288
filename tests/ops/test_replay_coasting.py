"""Many steps at once leave what they leave one by one: decisions, report, blocks, rows, and what the runner holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import pytest
from harness import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ops.replay.engine import Engine, Setup
from ops.replay.recorder import Recorder
from ops.replay.summary import Objectives, summarise
from ops.replay.workload import Workload, build
from ops.traces import TraceRow
from runner.config import RunnerConfig
from runner.step_costs import LinearCost, StepCost, TickCost
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler
from scheduler.interface import Scheduler

MICROSECOND = 1_000
BLOCK = 4
QUICK = LinearCost(fixed_ns=150_000, token_ns=3_000, context_ns=44, row_ns=500)
OBJECTIVES = {"slo_ttft_s": 0.004, "slo_tpot_s": 0.0004}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "vllm": {"preset": "vllm"},
    "vllm without a cache": {"preset": "vllm", "enable_prefix_caching": False},
    "sglang": {"preset": "sglang"},
    "triptych": {"preset": "triptych"},
    "triptych with objectives": {"preset": "triptych", **OBJECTIVES},
    "triptych with delayed pages": {"preset": "triptych", "page_release_delay_s": 0.003},
    "credit": {"preset": "credit"},
    "credit without turns": {"preset": "vllm", "admission_policy": "credit"},
    "fair queue, swapping": {"preset": "triptych", "queue_policy": "fair", "recovery_policy": "swap"},
    "forecast": {"preset": "triptych", "admission_policy": "forecast"},
}


class Counting(Recorder):
    """A recorder that also counts the passes."""

    passes = 0

    def passed(self, scheduler: Scheduler, now_ns: int) -> None:
        super().passed(scheduler, now_ns)
        self.passes += 1


@dataclass
class Run:
    """What a run has left."""

    report: bytes
    decisions: dict[str, int]
    states: dict[int, Any]
    """By time: all there is to know while the step that begins then is in flight; at the end, all without a step."""
    passes: int
    steps: int


def state(engine: Engine) -> Any:
    """Whatever the next decisions could depend on, and what the runner knows of it."""
    core = engine.scheduler
    assert isinstance(core, CoreScheduler)
    pool, table = core.pool, core.table
    slots = table.order
    columns = ("id", "computed", "known", "target", "total", "blocks", "sealed", "turn", "tail")
    return (
        (list(pool.free), pool.refs[:], pool.hash_of[:], pool.version, pool.evictions),
        {block_hash: list(blocks) for block_hash, blocks in pool.cached.items()},
        {name: getattr(table, name)[slots].tolist() for name in columns},
        [(bytes(r.data), r.blocks[:], r.hashes[:], r.status, r.num_replayed) for r in core.requests.values()],
        (core.step_id, core.left[:], asdict(core.refresh_stats())),
        engine.executor.inventory.export(),
    )


def run(
    rows: list[TraceRow], config: dict[str, Any], blocks: int, *, cost: StepCost = QUICK, depth: int = 1,
    max_tokens: int = 0, coasts: bool = True,
) -> Run:  # fmt: skip
    work = build(sorted(rows, key=lambda row: row.at_ns), max_model_len=BLOCK * blocks, max_tokens=max_tokens)
    setup = setup_for(work, config, blocks, cost, depth)
    recorder = Counting(work, digest=True)
    engine = Engine(setup, work, recorder, coasts=coasts)
    states = {}
    for now_ns in engine.boundaries():
        faults = engine.scheduler.check()
        assert not faults, faults
        if engine.scheduler.in_flight:
            states[now_ns] = state(engine)
    states[-1] = state(engine)
    recorder.finish()
    result = summarise(recorder, setup, engine.scheduler, engine.limits, Objectives(0.004, 0.0004), details=True)
    return Run(msgspec.json.encode(result), recorder.decisions, states, recorder.passes, recorder.steps)


def setup_for(work: Workload, config: dict[str, Any], blocks: int, cost: StepCost, depth: int) -> Setup:
    scheduler = SchedulerConfig(
        **{"max_num_seqs": 6, "max_num_batched_tokens": 48, "pipeline_depth": depth, "max_num_queued_reqs": 0} | config
    )
    runner = RunnerConfig(
        backend="sim", num_blocks_override=blocks + 1, block_size=BLOCK, max_model_len=4096, max_num_seqs=6,
        max_num_batched_tokens=48, sim_vocab_size=work.vocab_size, sim_eos_token_id=work.vocab_size - 1,
        sim_strict=False, sim_host_blocks=16, sim_copy_gb_s=10.0,
    )  # fmt: skip
    return Setup("coasting", scheduler, runner, cost, CoreScheduler)


def assert_same(coasted: Run, single: Run) -> None:
    assert coasted.decisions == single.decisions
    assert coasted.report == single.report
    for now_ns, found in coasted.states.items():
        assert found == single.states[now_ns], now_ns


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRow]:
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        at_ns = draw(st.integers(0, 40_000)) * MICROSECOND
        prompt = draw(st.integers(1, 40))
        prefix = draw(st.lists(st.integers(1, 3), max_size=-(-prompt // 8)))
        cancel_ns = at_ns + draw(st.integers(1, 20_000)) * MICROSECOND if draw(st.integers(0, 4)) == 0 else 0
        tenant = draw(st.sampled_from(("", "other")))
        outputs = draw(st.integers(1, 70))
        rows.append(TraceRow(at_ns, prompt, outputs, tuple(prefix), 8, cancel_ns=cancel_ns, tenant=tenant))
    return rows


SPACED = [TraceRow(turn * 60_000 * MICROSECOND, 9, 200, (1,), 8) for turn in range(4)]
ALONE = [TraceRow(0, 1, 70), TraceRow(150_000, 1, 1)]


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
@settings(max_examples=examples(6), deadline=None)
@given(rows=traces(), blocks=st.integers(28, 90), unknown=st.booleans())
@example(rows=ALONE, blocks=40, unknown=False)
@example(rows=SPACED, blocks=60, unknown=True)
def test_steps_made_at_once_leave_what_single_steps_leave(
    config: dict[str, Any], rows: list[TraceRow], blocks: int, unknown: bool
) -> None:
    max_tokens = 72 if unknown else 0
    coasted, single = (run(rows, config, blocks, max_tokens=max_tokens, coasts=c) for c in (True, False))
    assert_same(coasted, single)


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in ("credit",)])
def test_most_steps_of_a_quiet_run_are_made_without_a_pass(name: str) -> None:
    coasted, single = (run(SPACED, CONFIGURATIONS[name], 60, coasts=coasts) for coasts in (True, False))
    assert single.passes >= single.steps == coasted.steps > 700
    assert coasted.passes < single.steps // 10
    assert_same(coasted, single)


@pytest.mark.parametrize(
    ("config", "depth", "cost"),
    [({"preset": "credit"}, 1, QUICK), ({"preset": "vllm"}, 2, QUICK), ({"preset": "vllm"}, 1, TickCost(0))],
    ids=["rows that take turns", "steps that overlap", "steps that take no time"],
)
def test_other_steps_are_made_one_by_one(config: dict[str, Any], depth: int, cost: StepCost) -> None:
    made = run(SPACED, config, 60, depth=depth, cost=cost)
    assert made.passes >= made.steps > 700


def test_a_class_of_ones_own_is_asked_for_every_step() -> None:
    class Mine(CoreScheduler):
        pass

    work = build(SPACED, max_model_len=4096)
    setup = setup_for(work, {"preset": "vllm"}, 60, QUICK, 1)
    recorder = Counting(work)
    Engine(Setup("mine", setup.config, setup.runner, setup.cost, Mine), work, recorder).run()
    assert recorder.passes >= recorder.steps > 700


def test_who_looks_at_single_steps_is_shown_each_of_them() -> None:
    class Looking(Counting):
        def looks_ns(self) -> int:
            return 0

    work = build(SPACED, max_model_len=4096)
    recorder = Looking(work)
    Engine(setup_for(work, {"preset": "vllm"}, 60, QUICK, 1), work, recorder).run()
    assert recorder.passes >= recorder.steps > 700


def test_a_pool_too_small_for_all_steps_at_once_still_preempts_when_it_is_full() -> None:
    rows = [TraceRow(0, 20, 60), TraceRow(0, 20, 60), TraceRow(0, 20, 60)]
    coasted, single = (run(rows, {"preset": "vllm"}, 30, coasts=coasts) for coasts in (True, False))
    assert coasted.states[-1][4][2]["preemptions"] > 0
    assert coasted.passes < single.passes * 0.6
    assert_same(coasted, single)
