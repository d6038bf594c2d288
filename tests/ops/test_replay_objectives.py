"""The default preset told its objectives: who is on time, who is late, and that the late end too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ops.replay.result import RunResult
from tests.ops.replay_kit import CONVERSATION, TRACES, replayed, write_lines

CODE = TRACES / "azure_2023_code.csv.gz"
OBJECTIVES = ("--slo-ttft", 2, "--slo-tpot", 0.05, "--unknown-lengths", 8192, "--depth", 1)


def both(trace: Path, *options: object) -> tuple[RunResult, RunResult]:
    """The same trace under the `vllm` preset and under the default one with objectives."""
    vllm, ours = replayed(trace, "--preset", "vllm", "--preset", "triptych", *OBJECTIVES, *options).runs
    return vllm, ours


def in_time(run: RunResult) -> float:
    assert run.goodput is not None
    return run.goodput.share


def test_decodes_keep_their_pace_while_a_long_prompt_is_computed(tmp_path: Path) -> None:
    streams = [{"at_s": 0, "prompt_tokens": 200, "output_tokens": 20}] * 20
    trace = write_lines(tmp_path / "t.jsonl", *streams, {"at_s": 0.02, "prompt_tokens": 40_000, "output_tokens": 2})
    vllm, ours = both(trace)
    assert vllm.latency.max_itl_ms.p50 > 300
    assert ours.latency.tpot_ms.max <= 50
    assert in_time(ours) >= 20 / 21 > in_time(vllm)


def test_the_slack_of_early_tokens_is_spent_when_prefill_waits(tmp_path: Path) -> None:
    """A stream that is far ahead of its objective lets a step be long; one that has just begun doesn't."""
    early = {"at_s": 0, "prompt_tokens": 200, "output_tokens": 400}
    trace = write_lines(tmp_path / "t.jsonl", early, {"at_s": 1.5, "prompt_tokens": 30_000, "output_tokens": 2})
    _, ours = both(trace)
    assert ours.latency.max_itl_ms.max > 150
    assert ours.latency.tpot_ms.max <= 50
    assert in_time(ours) == 1.0


def test_a_prompt_that_can_not_be_on_time_does_not_make_others_late(tmp_path: Path) -> None:
    long = [{"at_s": 0.0, "prompt_tokens": 100_000, "output_tokens": 4}] * 3
    short = [{"at_s": 0.01 * n, "prompt_tokens": 300, "output_tokens": 4} for n in range(1, 60)]
    vllm, ours = both(write_lines(tmp_path / "t.jsonl", *long, *short))
    assert in_time(vllm) == 0.0
    assert in_time(ours) == pytest.approx(59 / 62)
    assert ours.completed == 62


def test_under_overload_many_more_are_on_time_and_all_end_within_the_bound_of_the_late() -> None:
    vllm, ours = both(CODE, "--limit", 900, "--time-scale", 0.15)
    assert in_time(ours) > 0.5 > 0.05 > in_time(vllm)
    assert ours.completed == vllm.completed == 900
    assert ours.requests_per_s >= 0.97 * vllm.requests_per_s
    assert ours.latency.e2e_s.max <= 1.25 * vllm.latency.e2e_s.max


@pytest.mark.parametrize("times", [1, 13, 100])
def test_a_device_many_times_slower_than_a_large_gpu_is_paced_as_well(tmp_path: Path, times: int) -> None:
    """Twice what it can do comes, and a step of that length holds 170 tokens of prefill; the first is larger."""
    draw = random.Random(3)
    rows = [
        {"at_s": n * 0.0085 * times, "prompt_tokens": draw.randint(40, 760) if n else 600, "output_tokens": 12}
        for n in range(200)
    ]
    each = {"token_ns": 42_000, "fixed_ns": 600_000, "context_ns": 80, "row_ns": 8_000}
    ours = replayed(
        *(write_lines(tmp_path / "t.jsonl", *rows), "--preset", "triptych", "--unknown-lengths", 8192, "--depth", 2),
        *("--slo-ttft", 0.08 * times, "--slo-tpot", 0.008 * times),
        *(part for name, ns in each.items() for part in ("--cost-set", f"{name}={ns * times}")),
    ).runs[0]
    assert ours.completed == 200
    assert in_time(ours) > 0.5


def test_late_requests_go_first_once_they_have_waited_their_bound(tmp_path: Path) -> None:
    """Short prompts that come for ever, faster than they can be served, don't keep a long one out for ever."""
    long = {"at_s": 0.0, "prompt_tokens": 60_000, "output_tokens": 2}
    short = [{"at_s": 0.02 * n, "prompt_tokens": 520, "output_tokens": 2} for n in range(4000)]
    ours = replayed(
        write_lines(tmp_path / "t.jsonl", *short[:10], long, *short[10:]),
        *("--preset", "triptych", "--set", "late_grace_s=10", *OBJECTIVES),
    ).runs[0]
    assert ours.completed == 4001
    assert ours.latency.e2e_s.max < 40
    assert in_time(ours) > 0.5


def test_without_objectives_the_default_preset_decides_as_plain_first_come_mixed_steps_do() -> None:
    options = ("--limit", 120, "--time-scale", 0.1, "--blocks", 500, "--digest")
    ours, plain = replayed(
        *(CONVERSATION, *options, "--preset", "triptych", "--preset", "plain=triptych"),
        *("--set", "plain:queue_policy=fcfs", "--set", "plain:batch_policy=mixed"),
    ).runs
    assert ours.preemptions > 0
    assert ours.decisions == plain.decisions


@pytest.mark.parametrize(
    "policy", [("queue_policy", "fcfs"), ("batch_policy", "mixed"), ("admission_policy", "credit")]
)
def test_each_part_works_beside_others_in_place_of_the_rest(policy: tuple[str, str]) -> None:
    run = replayed(
        *(CODE, "--limit", 200, "--time-scale", 0.15, "--preset", "triptych", *OBJECTIVES),
        *("--set", f"{policy[0]}={policy[1]}"),
    ).runs[0]
    assert run.completed == 200
