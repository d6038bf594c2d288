"""How close a replay comes to the real thing: the same requests on the virtual clock and over real sockets, joined.

Nothing here runs a server; `ops.bench.fidelity` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from ops.bench.openai_stream import RequestRecord
from ops.calibrate.scatter import Panel
from ops.replay.engine import Engine, Observer, Setup
from ops.replay.workload import Workload, fits
from ops.traces import TraceRow
from protocol.columns import i32, u64
from protocol.messages import Limits, Outputs, Step
from runner.config import RunnerConfig
from runner.step_costs import StepCost
from scheduler.config import SchedulerConfig
from scheduler.interface import Scheduler


@dataclass(frozen=True, slots=True)
class Times:
    """What a client saw of one request, in seconds. `tpot` is NaN for a single output."""

    ttft: float
    tpot: float
    e2e: float


class Metric(msgspec.Struct, frozen=True):
    """Means over the requests that have both; `off` is predicted over measured, less one. `typical_off` is the median
    over requests of the absolute value of theirs."""

    measured: float
    predicted: float
    off: float
    typical_off: float
    count: int


class Fidelity(msgspec.Struct, frozen=True):
    """Both sides of the same requests. Seconds; the columns are in order of the trace, `request` its row."""

    ttft: Metric
    tpot: Metric
    e2e: Metric
    failed: int
    request: list[int]
    measured_ttft: list[float]
    predicted_ttft: list[float]
    measured_tpot: list[float]
    predicted_tpot: list[float]
    delivery_s: float
    notes: dict[str, float | int | str] = {}


class _Clients(Observer):
    """Notes when each request came, and its first and last token."""

    def __init__(self, count: int) -> None:
        self.came = np.zeros(count, np.int64)
        self.first = np.full(count, -1, np.int64)
        self.last = np.full(count, -1, np.int64)
        self.outputs = np.zeros(count, np.int64)

    def arrived(self, request: int, now_ns: int) -> None:
        self.came[request] = now_ns

    def cancelled(self, request: int, now_ns: int, *, live: bool) -> None:
        """Nobody leaves here."""

    def stepped(self, step: Step, sent_ns: int, begin_ns: int, end_ns: int) -> None:
        """Steps are not a client's business."""

    def passed(self, scheduler: Scheduler, now_ns: int) -> None:
        """Nor are passes."""

    def told(self, outputs: Outputs, now_ns: int) -> None:
        ids = u64(outputs.ids).astype(np.int64)
        self.first[ids[i32(outputs.positions) == 0]] = now_ns
        self.last[ids] = now_ns
        self.outputs[ids] += 1


def servable(rows: Sequence[TraceRow], limits: Limits, max_input: int = 0, max_output: int = 0) -> list[TraceRow]:
    """The rows as both sides run them: cut to these lengths (0: not), without those that no context holds, and with
    nobody leaving or asking for precedence."""
    cut = (
        replace(
            row,
            input_tokens=min(row.input_tokens, max_input or row.input_tokens),
            output_tokens=min(row.output_tokens, max_output or row.output_tokens),
            token_ids=row.token_ids[: max_input or None],
            priority=0,
            tenant="",
            deadline_ms=0,
            cancel_ns=0,
        )
        for row in rows
    )
    return [row for row in cut if fits(row, limits.max_model_len)]


def predict(
    rows: Sequence[TraceRow],
    limits: Limits,
    cost: StepCost,
    config: SchedulerConfig,
    scheduler_cls: type[Scheduler],
    delivery_ns: float,
) -> dict[int, Times]:
    """The replay's times of each row, on a machine of these limits. `delivery_ns` is added to what a client sees."""
    workload = Workload(rows, range(len(rows)))
    vocab = workload.vocab_size
    runner = RunnerConfig(
        backend="sim",
        block_size=limits.block_size,
        num_blocks_override=limits.num_blocks,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        sim_vocab_size=vocab,
        sim_eos_token_id=vocab - 1,
        sim_strict=False,
    )
    seen = _Clients(len(rows))
    Engine(Setup("fidelity", config, runner, cost, scheduler_cls), workload, seen).run()
    found = {}
    for index in np.flatnonzero(seen.first >= 0).tolist():
        ttft = int(seen.first[index] - seen.came[index]) + delivery_ns
        rest, count = int(seen.last[index] - seen.first[index]), int(seen.outputs[index])
        found[index] = Times(ttft / 1e9, rest / (count - 1) / 1e9 if count > 1 else math.nan, (ttft + rest) / 1e9)
    return found


def observe(records: Sequence[RequestRecord]) -> dict[int, Times]:
    """The times that an HTTP client measured, by index; failed requests are left out."""
    found = {}
    for record in records:
        if record.error is None and record.ttft is not None:
            tpot = record.tpot
            found[record.index] = Times(record.ttft, math.nan if tpot is None else tpot, record.e2e)
    return found


def compare(
    predicted: Mapping[int, Times],
    measured: Mapping[int, Times],
    *,
    delivery_s: float,
    failed: int = 0,
    notes: Mapping[str, float | int | str] | None = None,
) -> Fidelity:
    """Both sides of the requests that have both. ValueError if there are none."""
    both = sorted(predicted.keys() & measured.keys())
    if not both:
        raise ValueError("no request has both a predicted and a measured time")
    theirs, ours = [measured[i] for i in both], [predicted[i] for i in both]
    return Fidelity(
        ttft=_metric([t.ttft for t in theirs], [t.ttft for t in ours]),
        tpot=_metric([t.tpot for t in theirs], [t.tpot for t in ours]),
        e2e=_metric([t.e2e for t in theirs], [t.e2e for t in ours]),
        failed=failed,
        request=both,
        measured_ttft=[t.ttft for t in theirs],
        predicted_ttft=[t.ttft for t in ours],
        measured_tpot=[0.0 if math.isnan(t.tpot) else t.tpot for t in theirs],
        predicted_tpot=[0.0 if math.isnan(t.tpot) else t.tpot for t in ours],
        delivery_s=delivery_s,
        notes=dict(notes or {}),
    )


def _metric(measured: Sequence[float], predicted: Sequence[float]) -> Metric:
    theirs, ours = np.array(measured), np.array(predicted)
    known = ~np.isnan(theirs) & ~np.isnan(ours) & (theirs > 0)
    if not known.any():
        return Metric(0.0, 0.0, 0.0, 0.0, 0)
    theirs, ours = theirs[known], ours[known]
    means = float(theirs.mean()), float(ours.mean())
    typical = float(np.median(np.abs(ours / theirs - 1)))
    return Metric(*means, means[1] / means[0] - 1, typical, int(known.sum()))


def render(found: Fidelity) -> str:
    """The comparison as a table for a terminal."""
    lines = [f"{name}: {value}" for name, value in found.notes.items()]
    lines.append(f"{'':<12}{'measured':>12}{'predicted':>12}{'off':>9}{'typical':>9}{'requests':>10}")
    for name, metric in (("mean TTFT", found.ttft), ("mean TPOT", found.tpot), ("mean E2E", found.e2e)):
        ms = (metric.measured * 1e3, metric.predicted * 1e3)
        lines.append(
            f"{name:<12}{ms[0]:>9.2f} ms{ms[1]:>9.2f} ms{metric.off:>+9.1%}{metric.typical_off:>9.1%}{metric.count:>10}"
        )
    if found.failed:
        lines.append(f"{found.failed} requests failed and are not compared")
    return "\n".join(lines)


def panels(found: Fidelity) -> list[Panel]:
    """Predicted against measured, a dot per request."""
    return [
        Panel("TTFT", "s", found.measured_ttft, found.predicted_ttft),
        Panel(
            "TPOT",
            "ms",
            [value * 1e3 for value in found.measured_tpot],
            [value * 1e3 for value in found.predicted_tpot],
        ),
    ]
