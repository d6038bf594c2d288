"""The report's figures against those that vLLM's own scheduler left behind on the same traffic and cost."""

from __future__ import annotations

import gzip
import json
import os
from typing import Any

import pytest
from harness import ROOT

from ops.replay.result import Percentiles, RunResult
from tests.ops.replay_kit import TRACES, one

GOLDEN = ROOT / "tests" / "data" / "golden" / "vllm_replay.json.gz"


with gzip.open(GOLDEN) as file:
    RECORDED: dict[str, Any] = json.load(file)


def replayed_as(recorded: dict[str, Any]) -> RunResult:
    """The same inputs under the `vllm` preset."""
    trace, params = recorded["input"], recorded["params"]
    return one(
        *(TRACES / f"{trace['trace']}.gz", "--preset", "vllm", "--depth", 1, "--digest"),
        *("--time-scale", trace["scale_pm"] / 1000, "--set", f"watermark={params['watermark']}"),
        *("--set", f"enable_prefix_caching={str(params['prefix_caching']).lower()}"),
        *("--blocks", params["blocks"], "--block-size", params["block_size"], "--slo-ttft", 2, "--slo-tpot", 0.05),
        *("--max-num-seqs", params["max_num_seqs"], "--max-num-batched-tokens", params["max_num_batched_tokens"]),
    )


def decisions_of(recorded: dict[str, Any]) -> dict[str, int]:
    return {**recorded["decision_crc32_at_step"], "all": recorded["decision_crc32"]}


@pytest.fixture(scope="module")
def anchor() -> dict[str, Any]:
    found: dict[str, Any] = RECORDED["main_azure_2023_code_1.0"]
    return found


@pytest.fixture(scope="module")
def ours(anchor: dict[str, Any]) -> RunResult:
    return replayed_as(anchor)


@pytest.mark.skipif(
    "ANCHORS" not in os.environ, reason="takes five minutes: ANCHORS=1 make test TEST_ARGS='-n 2 -k recorded_run'"
)
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_every_decision_of_every_recorded_run_is_the_same(name: str) -> None:
    assert replayed_as(RECORDED[name]).decisions == decisions_of(RECORDED[name])


def approx(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def matches(found: Percentiles, wanted: dict[str, float], unit: float) -> None:
    for name in ("mean", "p50", "p90", "p99", "max"):
        assert getattr(found, name) * unit == approx(wanted[name]), name


def test_every_decision_is_the_same(ours: RunResult, anchor: dict[str, Any]) -> None:
    assert ours.decisions == decisions_of(anchor)


def test_what_was_offered_and_done_is_the_same(ours: RunResult, anchor: dict[str, Any]) -> None:
    assert (ours.num_requests, ours.completed) == (anchor["input"]["requests"], anchor["completed"])
    assert ours.offered_per_s == approx(anchor["input"]["offered_req_s"])
    assert (ours.makespan_s, ours.busy_s) == (approx(anchor["makespan_s"]), approx(anchor["busy_s"]))
    assert ours.requests_per_s == approx(anchor["req_s"])
    assert ours.output_tokens_per_s == approx(anchor["out_tok_s"])
    assert ours.prompt_tokens_per_s == approx(anchor["prompt_tok_s"])


def test_latencies_are_the_same(ours: RunResult, anchor: dict[str, Any]) -> None:
    matches(ours.latency.ttft_s, anchor["ttft_ms"], 1e3)
    matches(ours.latency.tpot_ms, anchor["tpot_ms"], 1)
    matches(ours.latency.max_itl_ms, anchor["itl_max_ms"], 1)
    matches(ours.latency.e2e_s, anchor["e2e_ms"], 1e3)


def test_gaps_between_tokens_are_the_same(ours: RunResult, anchor: dict[str, Any]) -> None:
    wanted = anchor["itl_all_ms"]
    found = {name: getattr(ours.latency.itl_ms, name) for name in ("p50", "p90", "p99", "p999", "count")}
    assert found == {name: wanted[name] for name in found}


def test_goodput_is_the_same(ours: RunResult, anchor: dict[str, Any]) -> None:
    wanted, found = anchor["goodput"], ours.goodput
    assert (found.share, found.per_s) == (approx(wanted["share"]), approx(wanted["req_s"]))
    assert (found.ttft_share, found.tpot_share) == (approx(wanted["ttft_ok_share"]), approx(wanted["tpot_ok_share"]))


def test_tokens_are_the_same(ours: RunResult, anchor: dict[str, Any]) -> None:
    wanted, found = anchor["tokens"], ours.tokens
    assert found.scheduled == wanted["scheduled"]
    assert found.decode == wanted["decode_useful"]
    assert found.prefill + found.replayed == wanted["prefill_computed"]
    assert found.prefill == wanted["prefill_needed_after_first_hits"]
    assert found.replayed == wanted["recompute_waste"]
    assert (found.prompt, found.cached) == (wanted["prompt_total"], wanted["prompt_hit_first_admission"])
    assert found.wasted == 0


def test_steps_rows_and_preemptions_are_the_same(ours: RunResult, anchor: dict[str, Any]) -> None:
    assert (ours.steps, ours.mean_step_ms) == (anchor["steps"], approx(anchor["mean_step_ms"]))
    assert (ours.mean_rows, ours.peak_rows) == (approx(anchor["rows"]["mean"]), anchor["rows"]["peak"])
    assert ours.preemptions == anchor["preemptions"]
    assert ours.preempted_requests == anchor["preempted_requests"]
    assert ours.max_preemptions == anchor["preemptions_max_one_request"]


def test_levels_read_now_and_then_come_to_the_same_means(ours: RunResult, anchor: dict[str, Any]) -> None:
    """The recorded means are over the time in which steps ran, ours are over the whole run."""
    idle = anchor["makespan_s"] / anchor["busy_s"]
    assert ours.mean_used * idle == pytest.approx(anchor["kv"]["mean_time_weighted"], rel=0.002)
    assert ours.mean_waiting * idle == pytest.approx(anchor["waiting"]["mean_time_weighted"], rel=0.002)
    assert ours.peak_used == pytest.approx(anchor["kv"]["peak"], rel=0.01)
    assert ours.peak_waiting == pytest.approx(anchor["waiting"]["peak"], rel=0.01)
