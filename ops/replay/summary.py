"""From what was recorded of a run to its result: the definitions of every figure in the report."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, fields

import msgspec
import numpy as np
import numpy.typing as npt

from ops.replay.engine import Setup
from ops.replay.recorder import GAP_BIN_NS, Recorder
from ops.replay.result import (
    CURVE_POINTS,
    Curves,
    Goodput,
    Lane,
    Latencies,
    Percentiles,
    Requests,
    RunResult,
    Series,
    Tokens,
)
from protocol.messages import Limits, RequestStatus
from protocol.settings import specs, to_text
from runner.step_costs import StepCost
from scheduler.config import SchedulerConfig
from scheduler.interface import Scheduler

Values = npt.NDArray[np.float64]

DEFINITIONS = """definitions:
  TTFT        from a request's arrival to its first output; with a measured cost, to when its client has it.
  TPOT        (last output - first) / (n - 1) for n outputs; requests with one output have none.
  ITL         gap between neighbouring outputs of one request, over all requests, in bins of 1 ms.
  E2E         from arrival to the end. Queue: from arrival to the first admission.
  Percentile  p of n values is the one at index floor(p n) of the sorted values; of requests that completed.
  Goodput     share of all requests with TTFT and TPOT within the objectives; one that was rejected, cancelled or
              failed has missed them, one with a single output has no TPOT to miss.
  Tokens      scheduled = prefill + decode (useful) + replayed (lost to a preemption, computed again) + wasted
              (computed past an end that wasn't known yet)."""

COMPLETED = frozenset(
    status.name.lower() for status in (RequestStatus.STOPPED, RequestStatus.LENGTH, RequestStatus.REPETITION)
)
INERT_SETTINGS = frozenset(
    {
        *("runtime_dir", "scheduler_address", "runner_address", "log_level", "log_interval_s", "metrics_port"),
        *("metrics_host", "lease_s", "runner_silence_s", "takeover", "scheduler_cls", "data_parallel_size"),
        *("placement_policy", "placement_min_match", "placement_balance_tokens", "placement_balance_ratio"),
        "replica_patience_s",
    }
)
"""Settings of the process around a scheduler: without effect in a replay."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request has to keep to count as good: first token and mean time per token, in seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05


@dataclass(frozen=True, slots=True)
class _Facts:
    """Times of the replayed requests in order of arrival, [n] each, in ns; nan where there is none."""

    arrival: Values
    ttft: Values
    tpot: Values
    e2e: Values
    queue: Values
    max_gap: Values
    prompt: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    completed: npt.NDArray[np.bool_]
    ttft_ok: npt.NDArray[np.bool_]
    tpot_ok: npt.NDArray[np.bool_]

    @property
    def in_slo(self) -> npt.NDArray[np.bool_]:
        return self.ttft_ok & self.tpot_ok


def summarise(
    recorder: Recorder, setup: Setup, scheduler: Scheduler, limits: Limits, objectives: Objectives, *, details: bool
) -> RunResult:
    """The result of a run that has ended. `details` adds a row per request."""
    workload, columns, stats = recorder.workload, recorder.columns, recorder.stats
    order = np.array(workload.order, np.intp)
    facts = _facts(recorder, order, objectives, getattr(setup.cost, "delivery_ns", 0.0))
    makespan_s, count = recorder.end_ns / 1e9, len(order)
    completed = int(facts.completed.sum())
    outputs = int(columns.outputs[order].sum())
    span_s = (workload.rows[workload.order[-1]].at_ns - workload.rows[workload.order[0]].at_ns) / 1e9 if count else 0.0
    accounts, preemptions = recorder.accounts, columns.preemptions[order]
    share = facts.in_slo.mean() if count else 0.0
    return RunResult(
        name=setup.name,
        scheduler=f"{setup.scheduler_cls.__module__}:{setup.scheduler_cls.__qualname__}",
        strategies=_strategies(scheduler),
        settings=_settings(setup.config),
        cost=cost_facts(setup.cost),
        limits={
            "blocks": limits.num_blocks - 1,
            "block_size": limits.block_size,
            "max_num_seqs": min(setup.config.max_num_seqs, limits.max_num_seqs),
            "max_num_batched_tokens": setup.config.max_num_batched_tokens or limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "pipeline_depth": setup.config.pipeline_depth,
        },
        num_requests=count,
        completed=completed,
        ends=dict(sorted(Counter(columns.status[index] for index in workload.order).items())),
        cancels_ignored=recorder.cancels_ignored,
        makespan_s=makespan_s,
        busy_s=recorder.busy_ns / 1e9,
        offered_per_s=_over(count - 1, span_s),
        requests_per_s=_over(completed, makespan_s),
        output_tokens_per_s=_over(outputs, makespan_s),
        prompt_tokens_per_s=_over(int(facts.prompt[facts.completed].sum()), makespan_s),
        latency=_latencies(recorder, facts),
        goodput=Goodput(
            slo_ttft_s=objectives.ttft_s,
            slo_tpot_s=objectives.tpot_s,
            share=float(share),
            per_s=_over(int(facts.in_slo.sum()), makespan_s),
            ttft_share=float(facts.ttft_ok.mean()) if count else 0.0,
            tpot_share=float(facts.tpot_ok.mean()) if count else 0.0,
        ),
        tokens=Tokens(
            scheduled=recorder.scheduled,
            prefill=accounts.prefill,
            decode=accounts.decode,
            replayed=accounts.replayed,
            wasted=accounts.wasted,
            prompt=accounts.prompt,
            cached=accounts.cached,
            outputs=outputs,
            lost=accounts.lost,
            kept=accounts.kept,
        ),
        steps=recorder.steps,
        mean_step_ms=_over(recorder.busy_ns / 1e6, recorder.steps),
        mean_rows=_over(recorder.row_steps, recorder.steps),
        peak_rows=recorder.peak_rows,
        preemptions=int(preemptions.sum()),
        preempted_requests=int((preemptions > 0).sum()),
        max_preemptions=int(preemptions.max(initial=0)),
        evictions=stats.evictions,
        mean_used=_over(recorder.levels.get("used", 0.0), recorder.end_ns),
        peak_used=recorder.peak_used,
        mean_waiting=_over(recorder.levels.get("waiting", 0.0), recorder.end_ns),
        peak_waiting=recorder.peak_waiting,
        held_passes={str(test): passes for test, passes in stats.held_passes.items()},
        series=_series(recorder, facts),
        curves=Curves(
            ttft_s=_curve(facts.ttft[facts.completed] / 1e9),
            tpot_ms=_curve(facts.tpot[facts.completed] / 1e6),
            e2e_s=_curve(facts.e2e[facts.completed] / 1e9),
            queue_s=_curve(facts.queue[facts.completed] / 1e9),
        ),
        lanes=_lanes(recorder, facts),
        requests=_requests(recorder, facts) if details else None,
        decisions=recorder.decisions,
    )


def _facts(recorder: Recorder, order: npt.NDArray[np.intp], objectives: Objectives, delivery_ns: float = 0.0) -> _Facts:
    """`delivery_ns`: what a client waits beside the steps, for its first token and so for all of them."""
    columns, rows = recorder.columns, recorder.workload.rows
    arrival = np.array([rows[index].at_ns for index in order], np.float64)
    outputs, first, last = columns.outputs[order], columns.first[order], columns.last[order]
    status = [columns.status[index] for index in order]
    completed = np.array([one in COMPLETED for one in status], np.bool_)
    ttft = np.where(first >= 0, first - arrival + delivery_ns, np.nan)
    several = outputs > 1
    tpot = np.where(several, (last - first) / np.maximum(outputs - 1, 1), np.nan)
    queue = np.where(first >= 0, columns.queue[order], np.nan)
    return _Facts(
        arrival=arrival,
        ttft=ttft,
        tpot=tpot,
        e2e=np.where(completed, columns.end[order] - arrival + delivery_ns, np.nan),
        queue=queue,
        max_gap=np.where(several, columns.max_gap[order], np.nan),
        prompt=np.array([rows[index].input_tokens for index in order], np.int64),
        outputs=outputs,
        completed=completed,
        ttft_ok=completed & (ttft <= objectives.ttft_s * 1e9),
        tpot_ok=completed & (~several | (tpot <= objectives.tpot_s * 1e9)),
    )


def percentiles(values: Values) -> Percentiles:
    """The distribution of those `values` that are numbers."""
    kept = np.sort(values[~np.isnan(values)])
    if not len(kept):
        return Percentiles()
    p50, p90, p99, p999 = (float(kept[rank(p, len(kept))]) for p in (0.5, 0.9, 0.99, 0.999))
    return Percentiles(math.fsum(kept) / len(kept), p50, p90, p99, p999, float(kept[-1]), len(kept))


def rank(share: float, count: int) -> int:
    """The index of percentile `share` among `count` sorted values."""
    return min(int(share * count), count - 1)


def _latencies(recorder: Recorder, facts: _Facts) -> Latencies:
    done = facts.completed
    return Latencies(
        ttft_s=percentiles(facts.ttft[done] / 1e9),
        tpot_ms=percentiles(facts.tpot[done] / 1e6),
        itl_ms=_gap_percentiles(recorder),
        max_itl_ms=percentiles(facts.max_gap[done] / 1e6),
        e2e_s=percentiles(facts.e2e[done] / 1e9),
        queue_s=percentiles(facts.queue[done] / 1e9),
    )


def _gap_percentiles(recorder: Recorder) -> Percentiles:
    """Of all gaps between outputs, of whatever request. The mean and the longest are exact."""
    count = int(recorder.gaps.sum())
    if not count:
        return Percentiles()
    columns, upto = recorder.columns, np.cumsum(recorder.gaps)
    p50, p90, p99, p999 = (
        (int(np.searchsorted(upto, rank(share, count), side="right")) + 0.5) * GAP_BIN_NS / 1e6
        for share in (0.5, 0.9, 0.99, 0.999)
    )
    total = int((columns.last - columns.first).sum())
    return Percentiles(total / count / 1e6, p50, p90, p99, p999, float(columns.max_gap.max()) / 1e6, count)


def _curve(values: Values) -> list[float]:
    kept = np.sort(values[~np.isnan(values)])
    if not len(kept):
        return []
    places = np.round(np.linspace(0, len(kept) - 1, CURVE_POINTS)).astype(np.intp)
    return _rounded(kept[places])


def _series(recorder: Recorder, facts: _Facts) -> Series:
    bins = recorder.bins
    used, width_s = bins.used, bins.width_ns / 1e9
    spans = np.full(used, float(bins.width_ns))
    if used:  # the last bin ends where the run does
        spans[-1] = max(recorder.end_ns - (used - 1) * bins.width_ns, 1)

    def sums(name: str) -> Values:
        return np.array(bins.sums.get(name, [0.0] * used)[:used])

    def events(times: Values) -> list[int]:
        index = np.minimum((times // bins.width_ns).astype(np.intp), used - 1)  # the last are told after the last step
        return np.bincount(index, minlength=used)[:used].tolist()  # type: ignore[no-any-return]

    end = facts.arrival + np.where(facts.completed, facts.e2e, 0)
    steps = np.maximum(sums("steps"), 1)
    return Series(
        width_s=width_s,
        running=_rounded(sums("running") / spans),
        waiting=_rounded(sums("waiting") / spans),
        used=_rounded(sums("used") / spans),
        computed_per_s=_rounded(sums("tokens") / spans * 1e9),
        outputs_per_s=_rounded(sums("outputs") / spans * 1e9),
        step_ms=_rounded(sums("busy") / steps / 1e6),
        preemptions=[int(n) for n in sums("preemptions")],
        arrived=events(facts.arrival),
        completed=events(end[facts.completed]),
        in_slo=events(end[facts.in_slo]),
        held={str(test): _rounded(np.minimum(sums(f"held {test}") / steps, 1)) for test in recorder.stats.held_passes},
        ratio=_rounded(sums("ratio") / spans) if "ratio" in bins.sums else [],
    )


def _lanes(recorder: Recorder, facts: _Facts) -> list[Lane]:
    columns, rows, in_slo = recorder.columns, recorder.workload.rows, facts.in_slo
    return [
        Lane(
            id=index,
            prompt=rows[index].input_tokens,
            cached=int(columns.cached[index]),
            outputs=int(columns.outputs[index]),
            end=columns.status[index],
            in_slo=bool(in_slo[place]),
            spans=[(state, begin / 1e9, end / 1e9) for state, begin, end in recorder.lanes.spans[index]],
            why=recorder.lanes.why.get(index, []),
        )
        for place, index in enumerate(recorder.workload.order)
        if index in recorder.lanes.spans
    ]


def _requests(recorder: Recorder, facts: _Facts) -> Requests:
    columns, order = recorder.columns, recorder.workload.order

    def or_never(values: Values, unit: float) -> list[float]:
        return [-1.0 if math.isnan(value) else value / unit for value in values.tolist()]

    return Requests(
        id=list(order),
        arrival_s=(facts.arrival / 1e9).tolist(),
        ttft_s=or_never(facts.ttft, 1e9),
        tpot_ms=or_never(facts.tpot, 1e6),
        e2e_s=or_never(facts.e2e, 1e9),
        queue_s=or_never(facts.queue, 1e9),
        prompt=facts.prompt.tolist(),
        outputs=facts.outputs.tolist(),
        cached=[int(columns.cached[index]) for index in order],
        preemptions=[int(columns.preemptions[index]) for index in order],
        end=[columns.status[index] for index in order],
    )


def cost_facts(cost: StepCost) -> dict[str, float | int | str | bool]:
    """A cost model as the report names it: which, and its numbers."""
    kind = type(cost).__name__.removesuffix("Cost").lower()
    numbers = msgspec.structs.asdict(cost) if isinstance(cost, msgspec.Struct) else asdict(cost)  # type: ignore[call-overload]
    return {"model": kind, **{("of" if name == "model" else name): value for name, value in numbers.items()}}


def _strategies(scheduler: Scheduler) -> dict[str, str]:
    """The names of the decisions in force, of a class that has them as strategies."""
    strategies = getattr(scheduler, "strategies", None)
    if strategies is None:
        return {}
    found = {field.name: getattr(getattr(strategies, field.name), "name", "") for field in fields(strategies)}
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def _settings(config: SchedulerConfig) -> dict[str, str]:
    """What differs from a scheduler's defaults, as text."""
    return {
        spec.name: to_text(spec, getattr(config, spec.name))
        for spec in specs(SchedulerConfig).values()
        if spec.name not in INERT_SETTINGS and getattr(config, spec.name) != spec.default
    }


def _rounded(values: Values) -> list[float]:
    """Six significant digits are more than a chart shows."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def _over(amount: float, divisor: float) -> float:
    return amount / divisor if divisor > 0 else 0.0
