"""The fidelity harness: both sides run the same requests, and their times are joined right. No bound on the times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ops.bench import fidelity as command
from ops.bench.datasets import TraceDataset
from ops.bench.openai_stream import RequestRecord
from ops.replay.fidelity import Times, compare, observe, panels, predict, render, servable
from ops.traces import TraceRow, read_trace
from runner.config import RunnerConfig
from runner.sim import sim_limits
from runner.step_costs import LinearCost
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler

LIMITS = sim_limits(RunnerConfig(backend="sim"))
MS = 1_000_000
COST = LinearCost(10 * MS, 0, 0, 0, overlap=False)
"""Every step takes 10 ms."""


def row(at_ms: int, inputs: int = 20, outputs: int = 5, **changes: object) -> TraceRow:
    return TraceRow(at_ms * MS, inputs, outputs, **changes)  # type: ignore[arg-type]


def record(index: int, sent: float, first: float, last: float, outputs: int) -> RequestRecord:
    return RequestRecord(index, sent_at=sent, chunk_times=[first, last], finished_at=last, output_tokens=outputs)


# --- the predicted side ---------------------------------------------------------------------------------------


def test_a_lone_request_takes_its_steps_and_the_delivery() -> None:
    found = predict([row(0)], LIMITS, COST, SchedulerConfig(), CoreScheduler, delivery_ns=3 * MS)
    assert found == {0: Times(pytest.approx(0.013), pytest.approx(0.010), pytest.approx(0.053))}


def test_times_count_from_each_arrival_and_one_output_has_no_time_per_token() -> None:
    found = predict([row(0), row(1000, outputs=1)], LIMITS, COST, SchedulerConfig(), CoreScheduler, 0)
    assert found[1].ttft == pytest.approx(0.010)
    assert math.isnan(found[1].tpot)


def test_settings_of_the_scheduler_and_limits_of_the_server_hold_in_the_replay() -> None:
    rows = [row(0), row(0)]
    together = predict(rows, LIMITS, COST, SchedulerConfig(), CoreScheduler, 0)
    apart = predict(rows, LIMITS, COST, SchedulerConfig(max_num_seqs=1), CoreScheduler, 0)
    assert together[1].ttft == pytest.approx(together[0].ttft)
    assert apart[1].ttft > apart[0].e2e


def test_rows_are_cut_dropped_and_stripped_of_what_one_side_would_not_do() -> None:
    rows = [
        row(0, 500, 300, priority=4, tenant="t", deadline_ms=5, cancel_ns=7, token_ids=tuple(range(500))),
        row(1, LIMITS.max_model_len, 1),
        row(2, 5, 0),
    ]
    (kept, cut) = servable(rows, LIMITS, max_input=100, max_output=40)
    assert (kept.input_tokens, kept.output_tokens, len(kept.token_ids)) == (100, 40, 100)
    assert (kept.priority, kept.tenant, kept.deadline_ms, kept.cancel_ns) == (0, "", 0, 0)
    assert cut.at_ns == 1 * MS
    assert servable(rows, LIMITS)[0].input_tokens == 500
    assert len(servable(rows, LIMITS)) == 1, "the longest prompt leaves no room for its output"


# --- both sides -----------------------------------------------------------------------------------------------


def test_requests_are_joined_by_row_and_the_failed_are_left_out() -> None:
    broken = record(1, 0.0, 0.1, 0.2, 5)
    broken.fail("dropped", "closed")
    measured = observe([record(2, 5.0, 5.5, 6.5, 11), broken, record(0, 1.0, 1.2, 1.2, 1)])
    assert measured == {2: Times(0.5, pytest.approx(0.1), 1.5), 0: measured[0]}
    predicted = {0: Times(0.1, math.nan, 0.1), 1: Times(9, 9, 9), 2: Times(0.6, 0.11, 1.7), 3: Times(9, 9, 9)}
    found = compare(predicted, measured, delivery_s=0.0, failed=1)
    assert found.request == [0, 2]
    assert found.ttft.measured == pytest.approx((0.2 + 0.5) / 2)
    assert found.ttft.predicted == pytest.approx((0.1 + 0.6) / 2)
    assert found.ttft.off == pytest.approx(0.7 / 0.7 - 1)
    assert found.ttft.typical_off == pytest.approx((0.5 + 0.2) / 2)
    assert (found.tpot.count, found.tpot.off) == (1, pytest.approx(0.1))
    assert "1 requests failed" in render(found)
    assert [panel.title for panel in panels(found)] == ["TTFT", "TPOT"]


def test_sides_with_nothing_in_common_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="no request has both"):
        compare({0: Times(1, 1, 1)}, {1: Times(1, 1, 1)}, delivery_s=0.0)


def test_prompts_share_blocks_of_the_recorded_size_on_the_real_side_too() -> None:
    rows = [row(0, 40, hash_ids=(1, 2), block_tokens=16), row(0, 40, hash_ids=(1, 3), block_tokens=16)]
    dataset = TraceDataset(rows, command.VOCABULARY, seed=0)
    one, two = (dataset.request(index).prompt for index in range(2))
    assert len(one) == len(two) == 40
    assert one[:16] == two[:16] and one[16:32] != two[16:32] and one[32:] != two[32:]
    recorded = TraceDataset([row(0, 3, token_ids=(7, 8, 9))], command.VOCABULARY, seed=0)
    assert recorded.request(0).prompt == [7, 8, 9]


def test_only_a_mean_that_is_off_by_more_than_allowed_is_named() -> None:
    found = compare({0: Times(1.2, 1.0, 1)}, {0: Times(1.0, 0.99, 1)}, delivery_s=0.0)
    assert command.missed(found, None) == []
    assert command.missed(found, 25) == []
    assert command.missed(found, 5) == ["mean TTFT is off by +20.0%, allowed are 5 %"]


# --- real processes -------------------------------------------------------------------------------------------


def write_trace(path: Path, count: int) -> Path:
    lines = [
        {"at_s": 0.05 * i, "output_tokens": 3 + i % 4, "prompt_tokens": 20 + 7 * i, "hash_ids": [1]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_same_trace_runs_on_real_sockets_and_in_the_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 8)
    out, page = tmp_path / "report.json", tmp_path / "page.html"
    arguments = [str(trace), "--preset", "vllm", "--set", "max_num_seqs=4", "--json", str(out), "--html", str(page)]
    assert command.main(arguments) == 0
    found = json.loads(out.read_text())
    assert found["request"] == list(range(8))
    assert found["failed"] == 0
    for name in ("measured_ttft", "predicted_ttft", "measured_tpot", "predicted_tpot"):
        assert len(found[name]) == 8 and min(found[name]) > 0
    # The simulated steps of 5.5 ms bound both sides from below, whatever the machine does.
    assert min(found["predicted_ttft"]) > 0.0055
    assert found["tpot"]["count"] == 8
    assert page.read_text().count("<circle") == 16
    assert "mean TTFT" in capsys.readouterr().out
    assert len(read_trace(trace)) == 8


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["/nowhere.csv"], 2, "/nowhere.csv"),
        ([__file__], 2, "neither JSON"),
        (["x", "--set", "speed=9"], 2, "no setting 'speed'"),
    ],
)
def test_wrong_options_are_named_before_anything_is_started(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "system", None)
    assert command.main(arguments) == code
    assert said in capsys.readouterr().err


def test_the_real_server_gets_the_costs_and_settings_that_the_replay_has() -> None:
    options = command.build_parser().parse_args(["x", "--step-ms", "7", "--no-overlap", "--serve", "num_threads=1"])
    words = command.serve_arguments(options, {"watermark": 0.1})
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    assert pairs["--backend"] == "sim"
    assert (pairs["--sim-step-ms"], pairs["--sim-context-ns"], pairs["--watermark"]) == ("7.0", "44.0", "0.1")
    assert (pairs["--preset"], pairs["--num-threads"]) == ("triptych", "1")
    assert "--sim-overlap" not in words
    overlapping = command.build_parser().parse_args(["x"])
    assert command.serve_arguments(overlapping, {})[-1] == "--sim-overlap"
    real = command.serve_arguments(command.build_parser().parse_args(["x", "--backend", "model"]), {})
    assert not [word for word in real if word.startswith("--sim")]
