"""The figures that tables and plots of experiments show, each from one run's result."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ops.replay.compare import figure, share
from ops.replay.experiments.spec import VLLM
from ops.replay.result import RunResult
from ops.replay.summary import rank
from ops.traces import TraceRow


@dataclass(frozen=True, slots=True)
class Ran:
    """A run that is over: its result, its trace, what vLLM did with the same, and what a watcher saw."""

    result: RunResult
    rows: Sequence[TraceRow]
    anchor: dict[str, Any]
    watched: Mapping[str, float]

    def of(self, chosen: Callable[[TraceRow], bool], column: str) -> list[float]:
        """A column of the requests whose row is chosen, sorted, without those that have no such figure."""
        requests = self.result.requests
        assert requests is not None, "experiments run with --details"
        values = zip(requests.id, getattr(requests, column), strict=True)
        return sorted(value for index, value in values if value >= 0 and chosen(self.rows[index]))


@dataclass(frozen=True, slots=True)
class Figure:
    """A column: its heading, how a value reads, and where it comes from. `of` gives None for a run without it."""

    heading: str
    text: Callable[[float], str]
    of: Callable[[Ran], float | None]


@cache
def anchors() -> dict[str, dict[str, Any]]:
    """vLLM's recorded runs by name."""
    with gzip.open(VLLM) as file:
        found: dict[str, dict[str, Any]] = json.load(file)
    return found


def anchor_of(name: str) -> dict[str, Any]:
    """One of them; empty for no name."""
    return anchors()[name] if name else {}


def count(value: float) -> str:
    return f"{value:,.0f}"


def times(value: float) -> str:
    return f"{value:.3f}"


def yes(value: float) -> str:
    return "yes" if value else "no"


def identity(value: float) -> str:
    return f"{value:.0f}"


def _tenant(name: str, column: str, p: float) -> Callable[[Ran], float | None]:
    def told(ran: Ran) -> float | None:
        values = ran.of(lambda row: row.tenant == name, column)
        return values[rank(p, len(values))] if values else None

    return told


def _against(path: str, of: Callable[[RunResult], float]) -> Callable[[Ran], float | None]:
    """A figure over vLLM's, which lies at a dotted path of its record."""

    def ratio(ran: Ran) -> float | None:
        theirs = _recorded(path)(ran)
        return None if theirs is None else of(ran.result) / theirs

    return ratio


def _recorded(path: str) -> Callable[[Ran], float | None]:
    def told(ran: Ran) -> float | None:
        found: Any = ran.anchor or None
        for key in path.split("."):
            found = found and found[key]
        return None if found is None else float(found)

    return told


def _watched(name: str) -> Callable[[Ran], float | None]:
    return lambda ran: ran.watched.get(name)


def _same_decisions(ran: Ran) -> float | None:
    if not ran.anchor:
        return None
    wanted = {**ran.anchor["decision_crc32_at_step"], "all": ran.anchor["decision_crc32"]}
    return float(ran.result.decisions == wanted)


def _runway(ran: Ran) -> float | None:
    """Where a step takes a second and the first one computes all prompts: steps from then to the first preemption."""
    begins = [begin for lane in ran.result.lanes for state, begin, _ in lane.spans if state == "preempted"]
    return min(begins) - 1 if begins else None


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0


FIGURES: dict[str, Figure] = {
    "goodput": Figure("within objectives", share, lambda ran: ran.result.goodput.share),
    "vllm_goodput": Figure("vLLM", share, _recorded("goodput.share")),
    "requests_per_s": Figure("requests/s", figure, lambda ran: ran.result.requests_per_s),
    "outputs_per_s": Figure("output tokens/s", count, lambda ran: ran.result.output_tokens_per_s),
    "vllm_requests_per_s": Figure("vLLM: requests/s", figure, _recorded("req_s")),
    "vllm_preemptions": Figure("vLLM: preemptions", count, _recorded("preemptions")),
    "rate_ratio": Figure("requests/s ÷ vLLM's", times, _against("req_s", lambda result: result.requests_per_s)),
    "e2e_ratio": Figure(
        "longest E2E ÷ vLLM's", times, _against("e2e_ms.max", lambda result: result.latency.e2e_s.max * 1e3)
    ),
    "ttft_p50": Figure("TTFT p50, s", figure, lambda ran: ran.result.latency.ttft_s.p50),
    "ttft_p99": Figure("TTFT p99, s", figure, lambda ran: ran.result.latency.ttft_s.p99),
    "tpot_p99": Figure("TPOT p99, ms", figure, lambda ran: ran.result.latency.tpot_ms.p99),
    "e2e_max": Figure("longest E2E, s", figure, lambda ran: ran.result.latency.e2e_s.max),
    "queue_max": Figure("longest queue time, s", figure, lambda ran: ran.result.latency.queue_s.max),
    "completed": Figure("completed", count, lambda ran: ran.result.completed),
    "preemptions": Figure("preemptions", count, lambda ran: ran.result.preemptions),
    "replayed": Figure("tokens replayed", count, lambda ran: ran.result.tokens.replayed),
    "replayed_each": Figure(
        "replayed per victim", count, lambda ran: _per(ran.result.tokens.replayed, ran.result.preemptions)
    ),
    "survived": Figure(
        "survived in the cache", share, lambda ran: _per(ran.result.tokens.kept, ran.result.tokens.lost)
    ),
    "hit_rate": Figure(
        "prompt from the cache", share, lambda ran: _per(ran.result.tokens.cached, ran.result.tokens.prompt)
    ),
    "used": Figure("pool in use", share, lambda ran: ran.result.mean_used),
    "running": Figure("rows a step", figure, lambda ran: ran.result.mean_rows),
    "waiting_peak": Figure("most waiting", count, lambda ran: ran.result.peak_waiting),
    "makespan": Figure("makespan, s", count, lambda ran: ran.result.makespan_s),
    "runway": Figure("steps until the first preemption", count, _runway),
    "digest": Figure("decision digest", identity, lambda ran: ran.result.decisions.get("all")),
    "same_decisions": Figure("vLLM's digest", yes, _same_decisions),
    "light_p50": Figure("light: TTFT p50, s", figure, _tenant("light", "ttft_s", 0.5)),
    "light_p99": Figure("light: TTFT p99, s", figure, _tenant("light", "ttft_s", 0.99)),
    "heavy_p50": Figure("heavy: TTFT p50, s", figure, _tenant("heavy", "ttft_s", 0.5)),
    "heavy_p99": Figure("heavy: TTFT p99, s", figure, _tenant("heavy", "ttft_s", 0.99)),
    "batch_max": Figure("least urgent: longest queue, s", figure, _tenant("batch", "queue_s", 1.0)),
    "urgent_p99": Figure("urgent: TTFT p99, s", figure, _tenant("urgent", "ttft_s", 0.99)),
    "long_max": Figure("longest prompts: longest queue, s", figure, _tenant("long", "queue_s", 1.0)),
    "forecasts": Figure("forecasts", count, _watched("forecasts")),
    "above": Figure("real peak above it", share, _watched("above")),
    "bias": Figure("real ÷ forecast, mean", times, _watched("bias")),
}
