"""Experiments on the KV pool: watermark, preemption storms, reservation, recovery."""

from __future__ import annotations

from ops.replay.experiments import made
from ops.replay.experiments.peaks import PeakWatcher
from ops.replay.experiments.spec import Experiment, Plot, Run

CONV = "azure_2023_conv.csv.gz"
SMALL = "--preset vllm --depth 1 --blocks 4096 --digest --slo-ttft 2 --slo-tpot 0.05"
RESERVES = (0.0025, 0.005, 0.01, 0.02, 0.04)
WATERMARKS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)


def _storm(load: float, scale: float, what: str, label: str, settings: str) -> Run:
    return Run(
        f"{label}, load {load}",
        f"--time-scale {scale} {settings}",
        line=label,
        x=load,
        anchor=f"seed_azure_2023_conv_b4096_{load}_{what}",
    )


STORMS = (
    ("wm0.00", "watermark 0", "--set watermark=0"),
    ("wm0.02", "watermark 0.02", "--set watermark=0.02"),
    ("seqs32", "max_num_seqs 32", "--set watermark=0 --max-num-seqs 32"),
    ("nocache", "cache off", "--set watermark=0 --set enable_prefix_caching=false"),
)

RUNWAY = Experiment(
    name="runway",
    title="Runway: what a watermark buys, in steps",
    asks="20,480 blocks of 16 tokens, 40 running requests. Each needs a block every 16 steps, together 2.5 blocks "
    "a step. A watermark of 0.01 keeps 204 blocks free when the last one enters: about 82 steps. Is it so?",
    options="--preset vllm --depth 1 --cost tick --set enable_prefix_caching=false --max-num-batched-tokens 400000",
    runs=tuple(
        Run(
            f"watermark {reserve:g}",
            f"--set watermark={reserve:g}",
            trace=made.runway(reserve),
            line="replayed",
            x=reserve,
        )
        for reserve in RESERVES
    ),
    columns=("runway", "preemptions"),
    plots=(Plot("against", "Steps until the first preemption", ("runway",), x="watermark", y="steps"),),
    quick_requests=made.STREAMS,
    quick_runs=("watermark 0.01", "watermark 0.02"),
    teaches="A watermark is a time: blocks divided by blocks a step, 20 steps for 51 blocks, 81 for 204, 327 for 819. "
    "What has to happen within it is that somebody ends. Of 40 answers of L tokens that end evenly one ends "
    "every L/40 steps, so that 0.01 covers L up to about 3,280 tokens, at any block size; twice as many "
    "streams halve the runway and the wait for an end alike. When all stop at the same length, as here, no "
    "watermark saves them: it only moves the first preemption.",
)

WATERMARK = Experiment(
    name="watermark",
    title="Watermark: the cliff and the slope",
    asks="The same pool under steady load: 600 requests wait from the start (7,200 prompt tokens, 1,000 outputs on "
    "average), about 40 fit. How many preemptions and how much throughput at which watermark, with and "
    "without the prefix cache?",
    options="--preset vllm --depth 1",
    trace=made.STEADY,
    runs=tuple(
        Run(
            f"{watermark:g}, {cache}",
            f"--set watermark={watermark:g} --set enable_prefix_caching={str(cache == 'cache on').lower()}",
            line=cache,
            x=watermark,
        )
        for cache in ("cache on", "cache off")
        for watermark in WATERMARKS
    ),
    columns=("preemptions", "replayed", "outputs_per_s", "used"),
    plots=(
        Plot("against", "Preemptions: the cliff", ("preemptions",), x="watermark", y="preemptions"),
        Plot("against", "Throughput: the slope", ("outputs_per_s",), x="watermark", y="output tokens/s"),
    ),
    quick_requests=80,
    quick_runs=("0, cache on", "0.01, cache on", "0.16, cache on", "0, cache off", "0.16, cache off"),
    teaches="The cliff: the first hundred blocks, a runway of 40 steps, take 80 % of the preemptions away, and the "
    "next hundred half of the rest; ends come at random here, and the runway has to outlast the gap between "
    "two. The slope: every block kept free is one that nobody computes with, 0.16 costs 3 % of the "
    "throughput. It is that flat because a step's time at 40 long contexts is mostly attention, so fewer rows "
    "are faster steps. What a preemption costs depends on the cache: with it, 72 of them cost half a per "
    "cent, without it 4 %. Between 0.005 and 0.02 nothing is to be gained; too little is worse than too much "
    "only without a cache.",
)

STORM = Experiment(
    name="storm",
    title="A preemption storm from a small pool",
    asks="The conversation hour on 4,096 blocks, with vLLM's decisions, at 1.0 and 1.4 of what this pool can do. A "
    "watermark of 0.02 or 32 running requests at most: both stop the storm. What do they cost? And what does "
    "the prefix cache do for the victims?",
    options=SMALL,
    trace=CONV,
    runs=tuple(_storm(load, scale, *what) for load, scale in ((1.0, 0.483), (1.4, 0.345)) for what in STORMS),
    columns=("preemptions", "replayed", "requests_per_s", "goodput", "e2e_max", "digest", "same_decisions"),
    plots=(
        Plot("bars", "Preemptions", ("preemptions",)),
        Plot("bars", "Requests per second", ("requests_per_s",)),
    ),
    quick="--limit 600",
    quick_runs=tuple(f"{label}, load 1.4" for _, label, _ in STORMS),
    teaches="All eight runs are decision for decision what vLLM's own scheduler did. The watermark takes 99.5 % of "
    "the preemptions away and costs nothing: at 1.4 of capacity throughput even grows by 1 %, since nothing "
    "is replayed. 32 slots end them all, and 4 % of the throughput at load 1.0 and 12 % at 1.4, with the pool "
    "six tenths full: a limit on requests is a limit on memory only for requests of one size. At load 1.0 "
    "that 4 % makes the difference between a queue that drains and one that doesn't: a twelfth as many "
    "requests are on time. Without the cache a victim replays 1,088 tokens instead of 226, and the storm "
    "feeds itself: half as many victims more.",
)

UNTOLD = "--depth 1 --blocks 4096 --unknown-lengths 1024 --time-scale 0.345 --limit 6000"
NOTING = "--scheduler-cls ops.replay.experiments.peaks:NotingScheduler"

CONSERVATIVENESS = Experiment(
    name="conservativeness",
    title="Conservativeness of the predictive admission",
    asks="SGLang's admission reserves a share of what the running requests may still put out. The share starts at "
    "0.7 times `schedule_conservativeness`, decays while all goes well, and jumps up when the pool was full. 400 "
    "requests of about 200 tokens wait from the start; each asks for 2,048 and ends after about 1,000.",
    options="--preset sglang --depth 1 --blocks 4096 --unknown-lengths 2048",
    trace=made.decoding(200, 1000),
    runs=tuple(
        Run(f"{value:g}", f"--set schedule_conservativeness={value:g}", line="conservativeness", x=value)
        for value in (0.3, 1.0, 2.0)
    ),
    columns=("preemptions", "replayed", "outputs_per_s", "used", "running", "ttft_p50", "e2e_max"),
    plots=(
        Plot("time", "The ratio over time", ("ratio",), y="ratio"),
        Plot("time", "Retractions over time", ("preemptions",), y="retractions per bin"),
        Plot("time", "Throughput over time", ("outputs_per_s",), y="output tokens/s"),
    ),
    quick_requests=200,
    quick_runs=("0.3", "2"),
    teaches="The reserve is a bet on how much of its limit a request uses: half of it here, while the ratio decays to "
    "a floor of 14 % of where it began. So even 2 runs into a full pool, only less often. 0.3 never gets to "
    "its floor of 0.03: each retraction lifts the ratio to what has been decoded, about 0.3, and it falls "
    "again, a saw-tooth; 1 and 2 lie on their floors (0.10, 0.14) most of the time. Neither extreme has the "
    "most throughput: 0.3 replays 2.6 times the tokens of 2, and 2 leaves room unused. The differences are "
    "small (4 %), because the retractions correct the bet.",
)

FORECAST = Experiment(
    name="forecast",
    title="Forecast admission, and whether its forecast is right",
    asks="The same 6,000 conversations. `optimistic` reserves nothing, `predictive` a ratio, `credit` all that may "
    "come; `forecast` the highest point that the batch is likely to reach, learned from outputs that have "
    "ended. And what was forecast when somebody was let in, against what those rows came to: how often was it "
    "too low?",
    options=f"--preset vllm {UNTOLD}",
    trace=CONV,
    runs=(
        Run("optimistic, watermark 0", "--set watermark=0"),
        Run("optimistic, watermark 0.02", "--set watermark=0.02"),
        Run("predictive", "--set admission_policy=predictive --set watermark=0"),
        Run("credit", "--set admission_policy=credit"),
        *(
            Run(
                f"forecast, confidence {confidence:g}",
                f"{NOTING} --set forecast_confidence={confidence:g}",
                watch=PeakWatcher,
            )
            for confidence in (0.5, 0.8, 0.95, 0.99)
        ),
    ),
    columns=("preemptions", "replayed", "requests_per_s", "used", "ttft_p50", "e2e_max", "forecasts", "above", "bias"),
    plots=(
        Plot("bars", "Preemptions", ("preemptions",)),
        Plot("bars", "Requests per second", ("requests_per_s",)),
        Plot("pairs", "Forecast against real peak, all confidences", y="blocks"),
    ),
    quick="--limit 400",
    quick_runs=("optimistic, watermark 0", "credit", "forecast, confidence 0.5", "forecast, confidence 0.99"),
    teaches="A confidence of 0.95 preempts 20 times instead of 1,079 and has all of the throughput; `credit`, which is "
    "never wrong, leaves 42 % of the pool unused and 16 % of the throughput with it. On average the forecast is right "
    "to 2 %. A quantile at each point in time is too low for the highest of all points: taken as it is, the real peak "
    "was above it in 15 % of the cases at 0.95, and in 49 % at 0.8. So the quantile is corrected by how often it was "
    "missed: 1.3 % now at 0.95, 0.6 % at 0.99, 5.6 % at 0.8. That is more careful than asked, since a preemption "
    "counts as a miss too, and costs no throughput. A watermark of 0.02 does as well on this trace; it was found by "
    "trying, which is what the forecast is to save. `predictive` is safe here, at 1 % of the throughput.",
)

VICTIMS = (
    ("cache off", 1000, 200, "--set enable_prefix_caching=false"),
    ("1000 in, 200 out", 1000, 200, ""),
    ("800 in, 600 out", 800, 600, ""),
    ("400 in, 1400 out", 400, 1400, ""),
    ("100 in, 2000 out", 100, 2000, ""),
)

RECOVERY = Experiment(
    name="recovery",
    title="How a victim returns: recompute, swap, auto",
    asks="A full pool and no watermark: there are always victims. Dropped blocks keep their content until somebody "
    "else writes them; how much survives until the victim returns depends on how much the others grow "
    "meanwhile. Requests of equal weight, with a growing part of it decoded; swaps at 12 GB/s, 2 MiB a block. "
    "Which way back is cheaper?",
    options="--preset vllm --depth 1 --set watermark=0 --blocks 4096 --host-blocks 8192 --copy-gb-s 12 "
    "--kv-block-bytes 2097152",
    runs=tuple(
        Run(
            f"{label}, {policy}",
            f"--set recovery_policy={policy} {settings}".strip(),
            trace=made.decoding(prompt, outputs),
            line=policy,
            x=place,
        )
        for place, (label, prompt, outputs, settings) in enumerate(VICTIMS)
        for policy in ("recompute", "swap", "auto")
    ),
    columns=("survived", "preemptions", "replayed_each", "outputs_per_s", "makespan"),
    plots=(
        Plot("against", "Throughput, in the order of the table", ("outputs_per_s",), x="case", y="output tokens/s"),
    ),
    quick_requests=150,
    quick_runs=tuple(
        f"{case}, {policy}" for case in ("cache off", "800 in, 600 out") for policy in ("recompute", "swap")
    ),
    teaches="What survives in the cache falls from two thirds to an eighth as the others grow more between a victim's "
    "leaving and its return, and recompute pays for the rest. With much surviving, recompute wins: nothing is "
    "copied, and prefill is fast. With nothing or little surviving, swapping at 12 GB/s brings up to 4 % more "
    "throughput for the whole run, in spite of more preemptions. `auto` chooses well where the cache is off "
    "and where much survives. Where little does it is wrong: it takes what is in the cache when the victim "
    "leaves for what will be there when it returns, and recomputes although seven eighths get lost. For long "
    "answers in a small pool, swapping has to be chosen by hand.",
)
