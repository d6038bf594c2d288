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
USUAL_PATIENCE = 1.18
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
    quick="--limit 300",
    quick_runs=("azure code, 1.4", "mooncake synthetic, 1.0"),
    teaches="Order and pacing decide: the machine does the same work in the same time (requests/s never below "
    "vLLM's, 3 % above it where prefixes are shared), and half to nine tenths of the requests that first "
    "come, first served makes late almost to the last one are on time. What can't be on time is served later, "
    "not never: all complete, and the longest wait is mostly shorter than vLLM's. It falls short in one "
    "place, the conversation trace at 1.0: 86 % on time where 90 % were asked for, with the longest E2E 14 % above "
    "vLLM's where 25 % were allowed. Knowing the future, 90.0 % would be possible within that; the last experiment "
    "shows how that was found, and what a longer wait buys.",
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
    "`late_patience` is how many times the worst first-come wait it may wait at most, `late_urgency` the power of "
    "(its age / that) by which its share grows until then, `late_share` the most that share comes to.",
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
            for patience in (1.0, USUAL_PATIENCE, 2.0, 3.0)
        ),
        *(
            Run(setting, f"--set {setting}", anchor=f"main_{CONV}_1.0")
            for setting in ("late_grace_s=30", "late_ahead=0", "late_ahead=0.3", "late_ahead=1", "late_share=0.5")
        ),
    ),
    columns=("goodput", "e2e_ratio", "rate_ratio", "ttft_p50", "ttft_p99"),
    plots=(
        Plot("against", "Within the objectives, by patience", ("goodput",), x="late_patience", y="share of requests"),
        Plot("against", "Longest E2E ÷ vLLM's, by patience", ("e2e_ratio",), x="late_patience"),
    ),
    quick="--limit 900 --time-scale 0.25",
    quick_runs=("late_patience=1", "late_patience=3"),
    teaches="Work is conserved: whatever the order, the backlog W at a time is the same, and all of it is late. If "
    "nobody waits longer than H, what became late within the last H adds up to W. So there is a least share of late "
    "requests for each H. A linear program that knows every arrival and every length beforehand finds it (`python -m "
    "ops.replay.bound tests/data/traces/azure_2023_conv.csv.gz --time-scale 0.37 --slo-tpot 0.046 --longest-e2e 219`): "
    "with the longest E2E a quarter above vLLM's (219 s) at most 90.0 % of this hour can be on time, with 400 s 94.6. "
    "The 90 % that were asked for are what clairvoyance comes to; without it, it is 86 %. A share that grows with the "
    "8th power of age holds the late until they must be served, and is worth 4 to 5 points over the power 1.5 at the "
    "same patience, for a longest E2E 7 % longer. A patience of 1.38 instead of 1.27 was measured to reach 87.7 % "
    "here, at 1.24 times vLLM's longest E2E; at load 1.4 it makes that 1.35 times. A patience of 3 gives 94 % to those "
    "who accept two and a half times the longest E2E. A smaller `late_share` costs 1.6 points and gains nothing.",
)
