"""What the figures of a replay count: ends of all kinds, tokens by their use, lives of requests."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.replay.recorder import MOST_BINS, Bins
from ops.replay.result import CURVE_POINTS, RunResult
from ops.replay.summary import percentiles
from tests.ops.replay_kit import CONVERSATION, TRACES, one, replayed, write_lines

PRESSED = (CONVERSATION, "--time-scale", 0.2, "--blocks", 600, "--limit", 120)


def test_a_percentile_is_the_value_at_that_share_of_the_sorted_ones() -> None:
    found = percentiles(np.array([5.0, 1.0, np.nan, 4.0, 2.0, 3.0]))
    assert (found.mean, found.p50, found.p90, found.max, found.count) == (3.0, 3.0, 5.0, 5.0, 5)
    assert percentiles(np.array([np.nan])).count == 0


def test_latencies_of_one_request_follow_from_its_steps(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", {"at_s": 3, "prompt_tokens": 10, "output_tokens": 4})
    run = one(trace, "--cost", "tick", "--details")
    assert run.requests is not None
    assert (run.requests.ttft_s, run.requests.tpot_ms, run.requests.e2e_s) == ([1.0], [1000.0], [4.0])
    assert (run.steps, run.makespan_s, run.tokens.prefill, run.tokens.decode) == (4, 4.0, 10, 3)


def test_what_delivery_was_measured_to_take_is_part_of_what_a_client_waits_and_of_its_objective(tmp_path: Path) -> None:
    trace = write_lines(
        tmp_path / "t.jsonl", *({"at_s": at, "prompt_tokens": 10, "output_tokens": 4} for at in (0, 3, 3.1))
    )
    runs = []
    for delivery_ns in (0, 400_000_000):
        numbers = {"fixed_ns": 5e6, "token_ns": 1e6, "context_ns": 0.0, "row_ns": 0.0, "overlap": False}
        path = tmp_path / f"cost-{delivery_ns}.json"
        path.write_text(json.dumps({**numbers, "steps": 10, "error": 0.0, "delivery_ns": delivery_ns}))
        run = one(trace, "--cost", path, "--details", "--slo-ttft", 0.3, "--slo-tpot", 1)
        assert run.requests is not None and sum(run.series.completed) == 3
        runs.append((run, run.requests))
    (plain, before), (shifted, after) = runs
    assert after.ttft_s == pytest.approx([time + 0.4 for time in before.ttft_s])
    assert after.e2e_s == pytest.approx([time + 0.4 for time in before.e2e_s])
    assert after.tpot_ms == before.tpot_ms
    assert (plain.goodput.share, shifted.goodput.share) == (1.0, 0.0)


def test_a_single_output_has_no_time_per_token_and_misses_none(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", {"at_s": 0, "prompt_tokens": 10, "output_tokens": 1})
    run = one(trace, "--cost", "tick", "--slo-ttft", 2, "--slo-tpot", 0.001)
    assert (run.latency.tpot_ms.count, run.goodput.tpot_share, run.goodput.share) == (0, 1.0, 1.0)


def test_a_request_that_was_cancelled_or_refused_counts_as_missing(tmp_path: Path) -> None:
    trace = write_lines(
        tmp_path / "t.jsonl",
        {"at_s": 0, "prompt_tokens": 10, "output_tokens": 3},
        {"at_s": 0, "prompt_tokens": 10, "output_tokens": 50, "cancel_at_s": 4.5},
        {"at_s": 0, "prompt_tokens": 900, "output_tokens": 3},
        {"at_s": 0, "prompt_tokens": 10, "output_tokens": 3, "cancel_at_s": 100},
    )
    run = one(trace, "--cost", "tick", "--blocks", 40, "--slo-ttft", 9, "--slo-tpot", 9, "--details")
    assert run.requests is not None
    assert run.requests.end[:2] == ["length", "aborted"]
    assert run.requests.end[2] not in ("length", "stopped", "aborted", "")
    assert sum(run.ends.values()) == run.num_requests == 4
    assert run.completed == 2 == run.latency.e2e_s.count == run.latency.ttft_s.count
    assert run.goodput.share == run.goodput.ttft_share == run.goodput.tpot_share == 0.5
    assert run.cancels_ignored == 1
    assert run.requests.e2e_s[1] == -1.0


def test_a_full_queue_refuses_where_it_is_given_a_limit(tmp_path: Path) -> None:
    rows = [{"at_s": 0, "prompt_tokens": 10, "output_tokens": 5}] * 6
    trace = write_lines(tmp_path / "t.jsonl", *rows)
    arguments = (trace, "--cost", "tick", "--max-num-seqs", 1)
    assert one(*arguments).ends == {"length": 6}
    assert one(*arguments, "--set", "max_num_queued_reqs=2").ends["queue_full"] > 0


@pytest.mark.parametrize("preset", ["vllm", "sglang", "triptych"])
@pytest.mark.parametrize("lengths", [(), ("--unknown-lengths", 600)])
def test_every_computed_token_has_a_use(preset: str, lengths: tuple[Any, ...]) -> None:
    run = one(*PRESSED, "--preset", preset, *lengths)
    tokens = run.tokens
    assert tokens.scheduled == tokens.prefill + tokens.decode + tokens.replayed + tokens.wasted
    assert tokens.prefill == tokens.prompt - tokens.cached
    assert tokens.decode == tokens.outputs - run.completed
    assert (tokens.replayed > 0) == (run.preemptions > 0)


def test_steps_past_an_end_that_was_not_known_are_wasted() -> None:
    known, unknown = (one(*PRESSED, "--depth", 2, *more) for more in ((), ("--unknown-lengths", 600)))
    assert known.tokens.wasted == 0
    assert known.ends == {"length": 120}
    assert unknown.tokens.wasted > 0
    assert unknown.ends == {"stopped": 120}
    assert known.tokens.outputs == unknown.tokens.outputs


def test_work_for_requests_that_left_is_still_accounted_for(tmp_path: Path) -> None:
    rows = [
        {"at_s": i * 0.01, "prompt_tokens": 300, "output_tokens": 60, "cancel_at_s": 0.05 + i * 0.02 if i % 3 else 0.0}
        for i in range(40)
    ]
    run = one(write_lines(tmp_path / "t.jsonl", *rows), "--blocks", 120, "--unknown-lengths", 200)
    tokens = run.tokens
    assert run.ends["aborted"] > 5
    assert tokens.scheduled == tokens.prefill + tokens.decode + tokens.replayed + tokens.wasted
    assert min(tokens.prefill, tokens.decode, tokens.wasted) > 0


def lives(run: RunResult) -> dict[int, list[str]]:
    return {lane.id: [state for state, _, _ in lane.spans] for lane in run.lanes}


def test_a_life_is_unbroken_from_arrival_to_end() -> None:
    run = one(*PRESSED, "--preset", "vllm", "--set", "watermark=0", "--details")
    assert run.requests is not None
    assert len(run.lanes) == 120
    end = dict(
        zip(run.requests.id, map(sum, zip(run.requests.arrival_s, run.requests.e2e_s, strict=True)), strict=True)
    )
    for lane in run.lanes:
        assert lane.spans[0][1] == pytest.approx(run.requests.arrival_s[lane.id])
        assert lane.spans[-1][2] == pytest.approx(end[lane.id])
        assert all(before[2] == after[1] for before, after in pairwise(lane.spans))
        assert all(begin < end for _, begin, end in lane.spans)
        assert lane.why[0].startswith(f"Request {lane.id} ")
    suspended = {index for index, states in lives(run).items() if "preempted" in states}
    assert suspended == {index for index, times in zip(run.requests.id, run.requests.preemptions, strict=True) if times}
    assert suspended


def test_series_add_up_to_the_totals() -> None:
    run = one(*PRESSED, "--preset", "vllm", "--set", "watermark=0")
    series, width = run.series, run.series.width_s
    assert sum(series.arrived) == sum(series.completed) == 120
    assert sum(series.in_slo) == round(run.goodput.share * 120)
    assert sum(series.preemptions) == run.preemptions > 0
    widths = [width] * (len(series.used) - 1) + [run.makespan_s - width * (len(series.used) - 1)]
    for levels, mean in ((series.used, run.mean_used), (series.waiting, run.mean_waiting)):
        area = sum(level * one for level, one in zip(levels, widths, strict=True))
        assert area / run.makespan_s == pytest.approx(mean, rel=1e-4)
    assert max(series.held["blocks"]) <= 1


def test_curves_rise_from_the_least_to_the_most() -> None:
    run = one(*PRESSED)
    for curve, tail in ((run.curves.ttft_s, run.latency.ttft_s), (run.curves.tpot_ms, run.latency.tpot_ms)):
        assert len(curve) == CURVE_POINTS
        assert curve == sorted(curve)
        assert curve[-1] == pytest.approx(tail.max, rel=1e-5)


def test_bins_double_when_the_run_outgrows_them_and_keep_their_sums() -> None:
    bins = Bins(width_ns=10)
    for now in range(0, 40 * MOST_BINS, 7):
        bins.add("events", now, 1)
    bins.spread("level", 5, 40 * MOST_BINS, 2.0)
    assert bins.width_ns == 40
    assert bins.used == MOST_BINS
    assert sum(bins.sums["events"]) == len(range(0, 40 * MOST_BINS, 7))
    assert sum(bins.sums["level"]) == 2.0 * (40 * MOST_BINS - 5)
    assert bins.sums["level"][3] == 2.0 * 40


def test_prompts_that_share_blocks_are_found_in_the_cache() -> None:
    rate = ("--rate", 1)
    shared = one(TRACES / "mooncake_conversation_200.jsonl.gz", *rate, "--limit", 60)
    apart = one(
        TRACES / "mooncake_conversation_200.jsonl.gz", *rate, "--limit", 60, "--set", "enable_prefix_caching=no"
    )
    assert shared.tokens.cached > 0 == apart.tokens.cached
    assert shared.tokens.scheduled < apart.tokens.scheduled


def test_requests_at_once_have_no_rate(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", *[{"at_s": 5, "prompt_tokens": 4, "output_tokens": 2}] * 3)
    report = replayed(trace)
    assert report.runs[0].offered_per_s == 0.0
    assert report.runs[0].completed == 3
