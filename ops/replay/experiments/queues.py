"""Experiments on the queue: cache-aware orders, starvation, fairness."""

from __future__ import annotations

from ops.replay.experiments import made
from ops.replay.experiments.spec import Experiment, Plot, Run

NO_BOUND = "--set max_queue_age_s=0"
NEVER = "--set queue_fallback_waiting=1000000"
RATES = (8.0, 10.0, 12.0, 16.0)
USUAL = 12.0
ORDERS = ("fcfs", "lpm", "dfs-weight", "shortest-prefill", "hrrn")


def _at_rate(line: str, options: str, rate: float) -> Run:
    return Run(f"{line}, {rate:g}/s", options, trace=made.prefixes(rate), line=line, x=rate)


PREFIXES = Experiment(
    name="prefixes",
    title="Queue orders where prompts share prefixes, and the flip to first come",
    asks="60 groups of requests with 4,000 tokens in common each; the pool holds the prefixes of about 20. The "
    "longest cached prefix first (`lpm`) raises the hit rate, but looks at every waiter; beyond 128 waiters "
    "it gives way to first come, first served, as in SGLang. What do the orders bring at 12 requests a second, "
    "and what does the flip cost above that?",
    options=f"--depth 1 --blocks 6144 {NO_BOUND}",
    runs=(
        *(
            Run(
                f"{order}, {USUAL:g}/s",
                f"--set queue_policy={order}",
                trace=made.prefixes(USUAL),
                line=order * (order in ("fcfs", "lpm")),
                x=USUAL,
            )
            for order in ORDERS
        ),
        *(_at_rate("fcfs", "--set queue_policy=fcfs", rate) for rate in RATES if rate != USUAL),
        *(_at_rate("lpm", "--set queue_policy=lpm", rate) for rate in RATES if rate != USUAL),
        *(_at_rate("lpm without the flip", f"--set queue_policy=lpm {NEVER}", rate) for rate in RATES),
    ),
    columns=("hit_rate", "requests_per_s", "ttft_p50", "ttft_p99", "waiting_peak"),
    plots=(
        Plot("against", "Prompt tokens found in the cache", ("hit_rate",), x="requests per second", y="share"),
        Plot("against", "Median time to the first token", ("ttft_p50",), x="requests per second", y="s"),
    ),
    quick_requests=350,
    quick_runs=("fcfs, 12/s", "lpm, 12/s", "lpm, 16/s", "lpm without the flip, 16/s"),
    teaches="",
)

STARVATION = Experiment(
    name="starvation",
    title="Starvation, with and without the age bound",
    asks="Short prompts alone take all of the machine for some minutes; a few long ones come too "
    "(`shortest-prefill`), or some of lower priority (`priority`). How long do those wait, and what does "
    "bounding their wait cost the others?",
    options="--depth 1",
    runs=(
        *(
            Run(
                f"shortest-prefill, {label}",
                f"--set queue_policy=shortest-prefill {NEVER} --set max_queue_age_s={bound}",
                trace=made.LONG_AND_SHORT,
            )
            for label, bound in (("no bound", 0), ("30 s", 30), ("10 s", 10))
        ),
        *(
            Run(
                f"priority, {label}",
                f"--set queue_policy=priority --set max_queue_age_s={bound}",
                trace=made.URGENT_AND_BATCH,
            )
            for label, bound in (("no bound", 0), ("30 s", 30), ("10 s", 10))
        ),
    ),
    columns=("long_max", "batch_max", "ttft_p50", "ttft_p99", "requests_per_s"),
    plots=(
        Plot("bars", "Longest queue time of the long prompts", ("long_max",), y="s"),
        Plot("bars", "Longest queue time of the least urgent", ("batch_max",), y="s"),
    ),
    quick_requests=900,
    quick_runs=("shortest-prefill, no bound", "shortest-prefill, 10 s", "priority, no bound", "priority, 10 s"),
    teaches="",
)

FAIRNESS = Experiment(
    name="fairness",
    title="A heavy tenant and a light one",
    asks="One tenant asks for more than the machine has, another for a thirteenth of that. Who pays for the overload?",
    options="--depth 1",
    trace=made.HEAVY_AND_LIGHT,
    runs=(
        Run("fcfs", f"--set queue_policy=fcfs {NO_BOUND}"),
        Run("fair", f"--set queue_policy=fair {NO_BOUND}"),
        Run("fair, heavy=9", f"--set queue_policy=fair {NO_BOUND} --set tenant_weights=heavy=9"),
        Run("fair, heavy=40", f"--set queue_policy=fair {NO_BOUND} --set tenant_weights=heavy=40"),
        Run("fair, age bound 30 s", "--set queue_policy=fair --set max_queue_age_s=30"),
    ),
    columns=("light_p50", "light_p99", "heavy_p50", "heavy_p99", "requests_per_s"),
    plots=(Plot("bars", "TTFT p99 by tenant", ("light_p99", "heavy_p99"), y="s"),),
    quick_requests=700,
    quick_runs=("fcfs", "fair", "fair, heavy=40"),
    teaches="",
)
