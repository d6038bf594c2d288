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
    plots=(Plot("against", "Share of requests within the objectives", ("goodput", "vllm_goodput"), x="load"),),
    quick="--limit 600",
    quick_runs=("azure code, 1.4", "mooncake synthetic, 1.0"),
    teaches="",
)

PARTS_OF_IT = Experiment(
    name="parts",
    title="Ablations: what each part of the default preset is worth",
    asks="The same at load 1.0 on the two Azure traces, with one part at a time replaced by what vLLM does there.",
    options=TOLD,
    runs=tuple(_part(label, settings, trace, 1.0) for trace in (CODE, CONV) for label, settings in PARTS),
    columns=("goodput", "rate_ratio", "e2e_ratio", "ttft_p50", "tpot_p99", "preemptions"),
    plots=(Plot("bars", "Share of requests within the objectives, load 1.0", ("goodput",)),),
    quick="--limit 600",
    quick_runs=tuple(f"code, {label}" for label, _ in PARTS[:4]),
    teaches="",
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
                f"--set late_patience={patience:g}",
                line="late_patience",
                x=patience,
                anchor=f"main_{CONV}_1.0",
            )
            for patience in (1.0, 1.3, 1.6, 2.0, 3.0, 5.0)
        ),
        *(
            Run(f"late_share={share:g}", f"--set late_share={share:g}", anchor=f"main_{CONV}_1.0")
            for share in (0.3, 0.6)
        ),
    ),
    columns=("goodput", "e2e_ratio", "rate_ratio", "ttft_p50", "ttft_p99"),
    plots=(
        Plot("against", "Within the objectives, by patience", ("goodput",), x="late_patience", y="share of requests"),
        Plot("against", "Longest E2E ÷ vLLM's, by patience", ("e2e_ratio",), x="late_patience"),
    ),
    quick="--limit 900 --time-scale 0.25",
    quick_runs=("late_patience=1", "late_patience=3"),
    teaches="",
)
