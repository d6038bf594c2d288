"""Experiments on the queue: cache-aware orders, starvation, fairness."""

from __future__ import annotations

from ops.replay.experiments import made
from ops.replay.experiments.spec import Experiment, Plot, Run

NO_BOUND = "--set max_queue_age_s=0"
NEVER = "--set queue_fallback_waiting=1000000"
RATES = (8.0, 12.0, 16.0, 24.0)
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
    quick_requests=500,
    quick_runs=("fcfs, 24/s", "lpm, 24/s", "lpm without the flip, 24/s"),
    teaches="Where prompts share prefixes, the order is capacity: first come, first served gets 8.7 requests a second "
    "through, whatever is offered, and `lpm` 14.6 at 16/s, because those who share a prefix come one after "
    "another and find it. All orders that look at the cache do about as well; `shortest-prefill` has the best "
    "median and by far the longest wait, as nothing bounds it here. More waiters make such an order better: "
    "there is more to choose from. So the flip at 128 waiting, which saves the scheduler's own time, comes "
    "just when the order is worth most: at 24/s it takes throughput from 19.1 to 10.2 a second, and the queue "
    "that grows from that keeps it flipped. It is a fuse for schedulers whose pass costs more with every "
    "waiter; raise `queue_fallback_waiting` as far as the pass time allows.",
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
    teaches="An order without a bound keeps the last in line out for as long as the overload lasts: three minutes "
    "here, because the trace is no longer. With a bound, the longest wait is the bound and a moment. It isn't "
    "free: a bound that the whole queue exceeds turns any order into first come, first served, which 10 s "
    "does to both here (the median goes from 0.6 s to 10 s under `shortest-prefill`). 30 s costs that median "
    "next to nothing, and doubles the one under `priority`. So the bound belongs above the wait that overload "
    "brings on an ordinary day.",
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
    teaches="First come, first served makes both pay: the light tenant, which asks for less than its half, waits half "
    "a minute and more in a queue that isn't its own. Under `fair` it waits for less than a second, and the "
    "heavy one no longer than before. Weights are promises: with heavy=9 the light tenant has a tenth of the "
    "machine, little more than it needs, and waits for seconds; with heavy=40 it is the one that is "
    "overloaded. The age bound undoes fairness once the heavy tenant's own queue is older than the bound (p99 "
    "55 s for the light one): where tenants must be kept apart, set `max_queue_age_s` to 0, or above the "
    "longest queue that one of them may build up.",
)
