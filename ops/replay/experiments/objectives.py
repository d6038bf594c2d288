"""The default preset told its objectives: against vLLM's recorded runs, and what each of its parts is worth."""

from __future__ import annotations

from ops.replay.experiments.spec import Experiment, Plot, Run

CODE, CONV = "azure_2023_code", "azure_2023_conv"
MOONCAKE, SYNTHETIC = "mooncake_conversation", "mooncake_synthetic"
SCALES = {
    CODE: (0.368, 0.221, 0.158),
    CONV: (0.616, 0.370, 0.264),
    MOONCAKE: (4.142, 2.485, 1.775),
    SYNTHETIC: (4.092, 2.455, 1.754),
}
LOADS = (0.6, 1.0, 1.4)
USUAL_PATIENCE = 1.57
FILES = {CODE: "csv", CONV: "csv", MOONCAKE: "jsonl", SYNTHETIC: "jsonl"}
TOLD = "--slo-ttft 2 --slo-tpot 0.05 --unknown-lengths 8192 --depth 1"


def file_of(trace: str) -> str:
    return f"{trace}.{FILES[trace]}.gz"


def _at(trace: str, load: float) -> str:
    return f"--time-scale {SCALES[trace][LOADS.index(load)]}"


def _main(trace: str, load: float) -> Run:
    name = trace.replace("azure_2023_", "azure ").replace("_", " ")
    return Run(
        f"{name}, {load}",
        _at(trace, load),
        trace=file_of(trace),
        line=name,
        x=load,
        anchor=f"main_{trace}_{load}",
    )


def _part(label: str, settings: str, trace: str, load: float) -> Run:
    name = trace.removeprefix("azure_2023_")
    options = " ".join(f"--set {setting}" for setting in settings.split())
    return Run(
        f"{name}, {label}",
        f"{_at(trace, load)} {options}".strip(),
        trace=file_of(trace),
        line=name,
        anchor=f"main_{trace}_{load}",
    )


PARTS = (
    ("all parts", ""),
    ("no on-time order", "queue_policy=fcfs"),
    ("no pacing", "batch_policy=mixed"),
    ("neither", "queue_policy=fcfs batch_policy=mixed"),
    ("forecast admission", "admission_policy=forecast"),
)

OBJECTIVES = Experiment(
    name="objectives",
    title="Objectives: how many requests are on time, by load",
    asks="Of vLLM's 12 recorded runs on four traces, at 0.6, 1.0 and 1.4 of what the machine can do: how many "
    "requests does the default preset serve within 2 s to the first token and 50 ms a token, when it is told "
    "these objectives but no output length? What does it cost in throughput, and for those that are late?",
    options=TOLD,
    runs=tuple(_main(trace, load) for trace in SCALES for load in LOADS),
    columns=("goodput", "vllm_goodput", "rate_ratio", "e2e_ratio", "completed", "preemptions"),
    plots=(
        Plot("against", "Share of requests within the objectives", ("goodput",), x="load"),
        Plot("against", "The same under vLLM's recorded decisions", ("vllm_goodput",), x="load"),
    ),
    quick="--limit 600",
    quick_runs=("azure code, 1.4", "mooncake synthetic, 1.0"),
    teaches="Order and pacing decide: the machine does the same work in the same time (requests/s never below 0.998 "
    "of vLLM's, 3 % above it where prefixes are shared), and half to nine tenths of the requests that first "
    "come, first served makes late almost to the last one are on time. What can't be on time is served later, "
    "not never: all complete, and the longest wait is mostly shorter than vLLM's. It falls short in one "
    "place, the conversation trace at 1.0: 85 % on time where order alone would allow 96 %, since nobody is to "
    "wait more than a quarter longer than vLLM's last. There prompts are short and nearly all could be on time, "
    "so that what is late has "
    "little to be paid with; the last experiment shows that trade.",
)

PARTS_OF_IT = Experiment(
    name="parts",
    title="Ablations: what each part of the default preset is worth",
    asks="The same at load 1.0 on the two Azure traces, with one part at a time replaced by what vLLM does there.",
    options=TOLD,
    runs=tuple(
        _part(label, settings, trace, 1.0)
        for trace in (CODE, CONV)
        for label, settings in PARTS
        if trace == CONV or label != "forecast admission"
    ),
    columns=("goodput", "rate_ratio", "e2e_ratio", "ttft_p50", "tpot_p99", "preemptions"),
    plots=(Plot("bars", "Share of requests within the objectives, load 1.0", ("goodput",)),),
    quick="--limit 600",
    quick_runs=tuple(f"code, {label}" for label, _ in PARTS[:4]),
    teaches="Pacing comes first: without it decodes ride whole prefill steps (TPOT 340 ms on code), nobody keeps 50 "
    "ms, and the on-time order has no learned step cost to judge by, so that it is first come, first served: "
    '"no pacing" and "neither" are the same run. Pacing alone keeps the streams\' pace, but as soon as a queue '
    "has built up everybody is late for the first token. The order on top of it is worth half of all "
    "requests. Neither costs throughput. Forecast admission has nothing to do on the full pool under these "
    "loads.",
)

LATE = Experiment(
    name="late",
    title="The late: how long they may wait, and what that buys the others",
    asks="The conversation trace at load 1.0. What is late gets a share of the machine so that it ends too. "
    "`late_patience` is how many times the worst first-come wait it may wait at most, `late_share` the most "
    "it gets of a step while it may wait.",
    options=f"{TOLD} {_at(CONV, 1.0)}",
    trace=file_of(CONV),
    runs=(
        *(
            Run(
                f"late_patience={patience:g}",
                f"--set late_patience={patience:g}" if patience != USUAL_PATIENCE else "",
                line="late_patience",
                x=patience,
                anchor=f"main_{CONV}_1.0",
            )
            for patience in (1.0, USUAL_PATIENCE, 2.0, 3.0, 5.0)
        ),
        Run("late_share=0.5", "--set late_share=0.5", anchor=f"main_{CONV}_1.0"),
    ),
    columns=("goodput", "e2e_ratio", "rate_ratio", "ttft_p50", "ttft_p99"),
    plots=(
        Plot("against", "Within the objectives, by patience", ("goodput",), x="late_patience", y="share of requests"),
        Plot("against", "Longest E2E ÷ vLLM's, by patience", ("e2e_ratio",), x="late_patience"),
    ),
    quick="--limit 900 --time-scale 0.25",
    quick_runs=("late_patience=1", "late_patience=3"),
    teaches="Work is conserved: an order moves lateness about, and the backlog at the peak is what it is. Those who "
    "are late wait (their backlog) ÷ (their share of the machine). To keep the longest E2E within a quarter "
    "of what first come, first served gives, the late must get 60 % of the machine and more at the peak, and "
    "what is left bounds how many are on time: 85 % over this hour. Letting the late wait longer buys the "
    "rest: 92 % at 1.8 times the longest E2E, 94 % at 2.5 times, near what order alone allows (0.96 by a "
    "fluid estimate). So nine in ten on time and nobody more than a quarter later than under first come can't "
    "both be had on this trace; `late_patience` chooses. `late_share` is the worse lever: at 0.5 it buys as "
    "many on time as a patience of 2 does, for a longer wait.",
)
