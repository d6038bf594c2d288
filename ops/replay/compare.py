"""What distinguishes runs of one trace, in words: every other against the first."""

from __future__ import annotations

from collections.abc import Sequence

from ops.replay.result import RunResult

SAME = 0.01
"""Figures closer than this are called the same."""

REASONS = {
    "tokens": "the step's token budget was used up",
    "slots": "all running slots were taken",
    "blocks": "its KV blocks were not free",
    "watermark": "too few blocks would have been left for those that run",
    "credits": "the future of those that run was promised the blocks",
    "draining": "pages of those that ended were not back yet",
}


def compare(runs: Sequence[RunResult]) -> list[str]:
    """Sentences: first how each run differs from the first one, then what bound admission in each."""
    base, *others = runs
    return [difference(run, base) for run in others] + [bound(run) for run in runs]


def difference(run: RunResult, base: RunResult) -> str:
    """`run` against `base`, the most important first."""
    parts = [
        _goodput(run, base),
        _latency("p99 TTFT", run.latency.ttft_s.p99, base.latency.ttft_s.p99, "s"),
        _latency("p99 TPOT", run.latency.tpot_ms.p99, base.latency.tpot_ms.p99, "ms"),
        _count("preemptions", run.preemptions, base.preemptions),
        _count("replayed tokens", run.tokens.replayed, base.tokens.replayed),
        _relative("throughput", run.requests_per_s, base.requests_per_s),
        _longest(run, base),
        _incomplete(run, base),
    ]
    return f"{run.name} against {base.name}: " + "; ".join(part for part in parts if part) + "."


def bound(run: RunResult) -> str:
    """Which admission tests kept the head of the queue out, and how often."""
    total = sum(run.held_passes.values())
    if not total:
        return f"{run.name}: nothing ever kept the head of the queue out."
    shares = sorted(run.held_passes.items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(
        f"{passes / total:.0%} because {REASONS.get(test, test)}" for test, passes in shares if passes / total >= 0.005
    )
    share = total / run.steps if run.steps else 0.0
    return f"{run.name}: the head of the queue was held {total:,} times in {run.steps:,} steps ({share:.0%}): {told}."


def _goodput(run: RunResult, base: RunResult) -> str:
    ours, theirs = run.goodput.share, base.goodput.share
    shares = f"({share(ours)} against {share(theirs)})"
    if ours == theirs:
        return f"as many requests within the objectives ({share(ours)})"
    if _same(ours, theirs):
        return f"about as many requests within the objectives {shares}"
    if not theirs:
        return f"{share(ours)} of requests within the objectives instead of none"
    if not ours:
        return f"no request within the objectives instead of {share(theirs)}"
    if ours > theirs:
        return f"{_times(ours / theirs)} as many requests within the objectives {shares}"
    return f"only {ours / theirs:.2f} times as many requests within the objectives {shares}"


def _latency(what: str, ours: float, theirs: float, unit: str) -> str:
    if _same(ours, theirs):
        return f"{what} the same" if ours else ""
    return f"{what} {figure(ours)} {unit} instead of {figure(theirs)}"


def _count(what: str, ours: int, theirs: int) -> str:
    if ours == theirs:
        return "" if not ours else f"{ours:,} {what}, as many"
    return f"{ours:,} {what} instead of {theirs:,}"


def _relative(what: str, ours: float, theirs: float) -> str:
    if _same(ours, theirs):
        return f"{what} the same within {SAME:.0%}"
    if not theirs or not ours:
        return f"{what} {figure(ours)} instead of {figure(theirs)} requests/s"
    change = ours / theirs - 1
    return f"{what} {abs(change):.0%} {'higher' if change > 0 else 'lower'}"


def _longest(run: RunResult, base: RunResult) -> str:
    ours, theirs = run.latency.e2e_s.max, base.latency.e2e_s.max
    if not theirs or not ours or _same(ours, theirs):
        return ""
    return f"the longest request takes {figure(ours)} s instead of {figure(theirs)}"


def _incomplete(run: RunResult, base: RunResult) -> str:
    ours, theirs = run.num_requests - run.completed, base.num_requests - base.completed
    if ours == theirs:
        return ""
    return f"{ours:,} requests don't complete instead of {theirs:,}"


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times" if ratio < 2 else f"{ratio:.1f} times" if ratio < 100 else f"{ratio:,.0f} times"


def share(value: float) -> str:
    """A share in per cent, with as many decimals as a small one needs."""
    return f"{value:.1%}" if value >= 0.001 or not value else f"{value:.2%}"


def figure(value: float) -> str:
    """Three significant digits, never an exponent."""
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 1 or not magnitude else f"{value:.3g}"
