"""What a replay found, as plain data: the JSON report, and all that the terminal and the page are drawn from.

Times are seconds unless a name says ms. Percentile p of n values is sorted[floor(p·n)]. Nothing here depends on when or
where the replay was run.
"""

from __future__ import annotations

import msgspec

SCHEMA = "triptych.replay/1"
CURVE_POINTS = 201


class Percentiles(msgspec.Struct, frozen=True):
    """A distribution over `count` requests (or tokens); all 0 where there are none."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0
    count: int = 0


class Latencies(msgspec.Struct, frozen=True):
    """Of the requests that completed: the others have no honest end.

    `tpot_ms` and `max_itl_ms` are per request with two outputs or more. `itl_ms` is over all their tokens, from bins of
    1 ms: a percentile is its bin's centre.
    """

    ttft_s: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    max_itl_ms: Percentiles
    e2e_s: Percentiles
    queue_s: Percentiles


class Tokens(msgspec.Struct, frozen=True):
    """Rows computed, by what they were good for: scheduled = prefill + decode + replayed + wasted.

    `prefill` and `decode` are useful: a prompt token not found in the cache, the row of an output behind the first.
    `replayed` were computed before and lost to a preemption. `wasted` ran past an end that was not known yet.
    `prompt` and `cached` are those of all admitted prompts; `outputs` is what clients were sent. Requests that were
    preempted had computed `lost` tokens when they left, of which they had `kept` when they returned, in the cache or on
    the host.
    """

    scheduled: int
    prefill: int
    decode: int
    replayed: int
    wasted: int
    prompt: int
    cached: int
    outputs: int
    lost: int = 0
    kept: int = 0


class Goodput(msgspec.Struct, frozen=True):
    """Share of *all* requests that completed within both objectives, and within each; `per_s` over the makespan.

    A request that was rejected, cancelled or failed has met none. One with a single output has no TPOT to miss.
    """

    slo_ttft_s: float
    slo_tpot_s: float
    share: float
    per_s: float
    ttft_share: float
    tpot_share: float


class Series(msgspec.Struct, frozen=True):
    """What happened over time, [bins] each, bins of `width_s`.

    Levels are means over the bin, rates per second. `held` maps an admission test to the share of the bin's steps in
    which it held the head of the queue. `ratio` is empty where admission has none.
    """

    width_s: float
    running: list[float]
    waiting: list[float]
    used: list[float]
    computed_per_s: list[float]
    outputs_per_s: list[float]
    step_ms: list[float]
    preemptions: list[int]
    arrived: list[int]
    completed: list[int]
    in_slo: list[int]
    held: dict[str, list[float]]
    ratio: list[float]


class Curves(msgspec.Struct, frozen=True):
    """Distributions as `CURVE_POINTS` quantiles, evenly from 0 to 1; empty where no request has the figure."""

    ttft_s: list[float]
    tpot_ms: list[float]
    e2e_s: list[float]
    queue_s: list[float]


class Lane(msgspec.Struct, frozen=True):
    """One request's life: spans of (state, begin, end), states "waiting", "prefill", "decode", "preempted".

    `end` is how it ended, `why` what the scheduler says about it, sentence by sentence, if it can.
    """

    id: int
    prompt: int
    cached: int
    outputs: int
    end: str
    in_slo: bool
    spans: list[tuple[str, float, float]]
    why: list[str] = []


class Requests(msgspec.Struct, frozen=True):
    """Every request, a column per fact, in order of arrival. -1 where it never happened."""

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
    """One way to schedule, on one trace. `ends` counts how requests ended: a status, or a rejection's code."""

    name: str
    scheduler: str
    strategies: dict[str, str]
    settings: dict[str, str]
    cost: dict[str, float | int | str | bool]
    limits: dict[str, int]
    num_requests: int
    completed: int
    ends: dict[str, int]
    cancels_ignored: int
    makespan_s: float
    busy_s: float
    offered_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    latency: Latencies
    goodput: Goodput
    tokens: Tokens
    steps: int
    mean_step_ms: float
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
    curves: Curves
    lanes: list[Lane]
    requests: Requests | None = None
    decisions: dict[str, int] = {}
    """CRC-32 of the decisions, chained over the steps: "all", and after 100, 1,000 and 10,000 steps."""


class Report(msgspec.Struct, frozen=True):
    """Several ways to schedule one trace. `trace` says which, how it was scaled and cut, and what was dropped."""

    trace: dict[str, float | int | str]
    runs: list[RunResult]
    words: list[str] = []
    schema: str = SCHEMA
    version: str = ""
