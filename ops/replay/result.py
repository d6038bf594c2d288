"""What a replay found, as plain data: the JSON report, and all that the terminal and the page are drawn from.

Times are seconds unless a name says ms. Percentile p of n values is sorted[floor(p·n)].
"""

from __future__ import annotations

import msgspec


class Percentiles(msgspec.Struct, frozen=True):
    """A distribution over requests (or tokens)."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    count: int


class Tokens(msgspec.Struct, frozen=True):
    """Rows computed, by what they were good for: scheduled = prefill + decode + replayed + wasted.

    `prefill` and `decode` are useful: a prompt token not found in the cache, an output's row. `replayed` were computed
    before and lost to a preemption. `wasted` ran past an end that was not known yet.
    """

    scheduled: int
    prefill: int
    decode: int
    replayed: int
    wasted: int
    prompt: int
    cached: int
    outputs: int


class Goodput(msgspec.Struct, frozen=True):
    """Share of all requests that met both objectives, and each; `per_s` over the makespan."""

    slo_ttft_s: float
    slo_tpot_s: float
    share: float
    per_s: float
    ttft_share: float
    tpot_share: float


class Series(msgspec.Struct, frozen=True):
    """Levels over time, [bins] each, bins of `width_s`. Rates are per second; `held` maps an admission test to the share
    of the bin's steps in which it held the head of the queue."""

    width_s: float
    running: list[float]
    waiting: list[float]
    used_blocks: list[float]
    prefill_rate: list[float]
    decode_rate: list[float]
    step_ms: list[float]
    preemptions: list[int]
    finished: list[int]
    in_slo: list[int]
    ratio: list[float]
    held: dict[str, list[float]]


class Lane(msgspec.Struct, frozen=True):
    """One request's life: spans of (state, begin, end), states "waiting", "prefill", "decode", "preempted"."""

    id: int
    prompt: int
    outputs: int
    spans: list[tuple[str, float, float]]
    in_slo: bool


class Requests(msgspec.Struct, frozen=True):
    """Every request, a column per fact, in order of number. -1 where it never happened."""

    id: list[int]
    arrival_s: list[float]
    ttft_s: list[float]
    tpot_ms: list[float]
    e2e_s: list[float]
    queue_s: list[float]
    prompt: list[int]
    outputs: list[int]
    cached: list[int]
    preemptions: list[int]
    end: list[str]


class RunResult(msgspec.Struct, frozen=True):
    """One preset on one trace."""

    name: str
    strategies: dict[str, str]
    settings: dict[str, str]
    cost: dict[str, float | int | str | bool]
    limits: dict[str, int]
    num_requests: int
    ends: dict[str, int]
    makespan_s: float
    busy_s: float
    offered_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_s: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    max_itl_ms: Percentiles
    e2e_s: Percentiles
    queue_s: Percentiles
    goodput: Goodput | None
    tokens: Tokens
    steps: int
    mean_rows: float
    peak_rows: int
    preemptions: int
    preempted_requests: int
    max_preemptions: int
    evictions: int
    mean_used: float
    peak_used: float
    mean_waiting: float
    peak_waiting: int
    held_passes: dict[str, int]
    series: Series
    lanes: list[Lane]
    requests: Requests | None = None
    decisions: dict[str, int] = {}
    """CRC-32 of the decisions, chained over the steps: "all", and after 100, 1,000 and 10,000 steps."""


class Report(msgspec.Struct, frozen=True):
    """Several presets on one trace. `trace` says which, how it was scaled and cut, and what was dropped."""

    trace: dict[str, float | int | str]
    runs: list[RunResult]
    version: str = ""
