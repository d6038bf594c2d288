"""`triptych replay`: traces of every format, settings and their errors, the same bytes for the same inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from harness import ROOT

from ops.replay.cli import main
from ops.replay.result import Report
from runner.step_costs import MeasuredCost
from tests.ops.replay_kit import CONVERSATION, TRACES, one, replayed, write_lines

SHORT = (str(CONVERSATION), "--limit", "40", "--time-scale", "0.2", "--blocks", "400")


def triptych(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "ops.cli", *arguments], capture_output=True, cwd=ROOT, timeout=200)


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    for path in paths:
        assert (
            main([*SHORT, "--preset", "vllm", "--preset", "sglang", "--digest", "--details", "--json", str(path)]) == 0
        )
    assert paths[0].read_bytes() == paths[1].read_bytes()
    report = msgspec.json.decode(paths[0].read_bytes(), type=Report)
    assert [run.name for run in report.runs] == ["vllm", "sglang"]
    assert report.runs[0].decisions["all"] != report.runs[1].decisions["all"]


def test_processes_side_by_side_give_the_same_bytes_too() -> None:
    arguments = ("replay", *SHORT, "--preset", "vllm", "--preset", "small=vllm", "--set", "small:max_num_seqs=4")
    alone, together = (triptych(*arguments, "--json", "-", "--jobs", jobs) for jobs in ("1", "2"))
    assert alone.returncode == together.returncode == 0, together.stderr
    assert alone.stdout == together.stdout
    assert alone.stderr == together.stderr
    assert msgspec.json.decode(alone.stdout, type=Report).runs[1].peak_rows == 4


def test_what_a_process_side_by_side_says_is_said_once(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ("replay", *SHORT, "--preset", "vllm", "--preset", "sglang", "--jobs", "2", "--html", str(page))
    wrong = triptych(*arguments, "--set", "sglang:tenant_weights=a")
    assert (wrong.returncode, wrong.stdout) == (2, b"")
    assert wrong.stderr == b"triptych replay: sglang: tenant_weights: 'a' is not tenant=weight with a weight above 0\n"
    assert not page.exists()


def test_every_format_of_trace_is_replayed(tmp_path: Path) -> None:
    row = {"at_s": 0.5, "prompt_tokens": 30, "output_tokens": 4, "prefix": [[7, 20]], "tenant": "a"}
    mooncake = {"timestamp": 20, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    plain = tmp_path / "azure.csv"
    plain.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,4\n")
    traces = {
        plain: 1,
        write_lines(tmp_path / "own.jsonl", row, {"at_s": 0, "token_ids": [1, 2, 3], "output_tokens": 2}): 2,
        write_lines(tmp_path / "own.jsonl.gz", row): 1,
        write_lines(tmp_path / "mooncake.jsonl", mooncake, mooncake): 2,
        TRACES / "mooncake_conversation_200.jsonl.gz": 200,
    }
    for trace, count in traces.items():
        report = replayed(trace, "--cost", "tick")
        assert report.trace["requests"] == report.runs[0].completed == count, trace


def test_a_trace_can_be_scaled_cut_and_repeated() -> None:
    base = replayed(*SHORT, "--preset", "vllm")
    span = float(base.trace["span_s"])
    slow = replayed(*SHORT[:3], "--time-scale", 0.4)
    assert float(slow.trace["span_s"]) == pytest.approx(2 * span, rel=0.01)
    assert replayed(*SHORT[:3], "--rate", 5).runs[0].offered_per_s == pytest.approx(5)
    assert 0 < int(replayed(*SHORT, "--until", span / 2).trace["requests"]) < 40
    assert int(replayed(*SHORT, "--repeat", 3).trace["requests"]) == 120


def test_rows_that_no_context_holds_are_dropped_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--max-model-len", "600"]) == 0
    report = replayed(*SHORT, "--max-model-len", 600)
    assert int(report.trace["dropped"]) + int(report.trace["requests"]) == 40
    assert f"{report.trace['dropped']} rows dropped" in " ".join(capsys.readouterr().out.split())


def test_a_setting_goes_to_all_presets_or_to_one() -> None:
    settings = ("--set", "max_num_seqs=7", "--set", "b:watermark=0.2", "--set", "b:max-num-seqs=3")
    first, second = replayed(*SHORT, "--preset", "a=vllm", "--preset", "b=vllm", *settings).runs
    assert (first.limits["max_num_seqs"], second.limits["max_num_seqs"]) == (7, 3)
    assert "watermark" not in first.settings
    assert second.settings["watermark"] == "0.2"


def test_one_preset_may_be_allowed_more_than_the_others() -> None:
    first, second = replayed(
        *SHORT, "--preset", "a=vllm", "--preset", "b=vllm", "--set", "b:max_num_batched_tokens=9000"
    ).runs
    assert (first.limits["max_num_batched_tokens"], second.limits["max_num_batched_tokens"]) == (8192, 9000)


def test_a_cost_model_is_chosen_and_changed(tmp_path: Path) -> None:
    linear = one(*SHORT)
    tick = one(*SHORT, "--cost", "tick", "--cost-set", "tick_ns=1000000")
    assert tick.mean_step_ms == 1.0
    assert one(*SHORT, "--cost-set", "fixed_ns=50000000").mean_step_ms > linear.mean_step_ms
    roofline = one(*SHORT, "--cost", "roofline", "--model", "llama-3-70b", "--bandwidth", 8000)
    assert roofline.cost["weight_bytes"] == 140e9
    assert roofline.mean_step_ms > 140 / 8 - 0.1
    measured = MeasuredCost(
        fixed_ns=2e6, token_ns=1e5, context_ns=0, row_ns=0, overlap=False, steps=9, error=0.1, num_blocks=301
    )
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode(measured))
    run = one(CONVERSATION, "--limit", 20, "--cost", path)
    assert (run.cost["model"], run.limits["blocks"]) == ("measured", 300)
    assert one(CONVERSATION, "--limit", 20, "--cost", path, "--blocks", 500).limits["blocks"] == 500


def test_the_objectives_judge_and_are_told_only_when_given() -> None:
    unsaid = one(*SHORT)
    assert (unsaid.goodput.slo_ttft_s, unsaid.goodput.slo_tpot_s) == (2.0, 0.05)
    assert "slo_ttft_s" not in unsaid.settings
    said = one(*SHORT, "--slo-ttft", 1, "--slo-tpot", 0.02)
    assert (said.goodput.slo_ttft_s, said.goodput.slo_tpot_s) == (1.0, 0.02)
    assert (said.settings["slo_ttft_s"], said.settings["slo_tpot_s"]) == ("1.0", "0.02")


def test_a_scheduler_class_of_someones_own_is_replayed() -> None:
    arguments = (*SHORT, "--max-num-seqs", 2, "--preset", "vllm")
    ours = one(*arguments)
    theirs = one(*arguments, "--scheduler-cls", "tests.conformance.newest_first:NewestFirst")
    assert theirs.strategies["queue"] == "newest-first"
    assert theirs.scheduler.endswith("newest_first:NewestFirst")
    assert theirs.completed == ours.completed == 40
    assert theirs.latency.queue_s.max > ours.latency.queue_s.max


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "watermrk=0.1"], "--set: the scheduler has no setting 'watermrk'. Did you mean watermark?"),
        (["--set", "watermark"], "--set: 'watermark' is not key=value"),
        (["--set", "watermark=2"], "--set watermark: got '2', allowed is a number from 0 to 0.9"),
        (["--set", "vlm:watermark=0"], "there is no preset 'vlm' here. Did you mean vllm?"),
        (["--set", "preset=sglang"], "a preset is chosen with --preset"),
        (["--set", "metrics_port=9"], "the scheduler has no setting 'metrics_port'"),
        (["--set", "tenant_weights=a", "--set", "queue_policy=fair"], "vllm: tenant_weights: 'a' is not tenant=weight"),
        (["--preset", "vlm"], "--preset: 'vlm' is not one of"),
        (["--preset", "vllm"], "the name 'vllm' is empty, has a colon or is there twice"),
        (["--cost", "liner"], "Did you mean linear?"),
        (["--cost-set", "a_ns=3"], "this model has no number 'a_ns', it has fixed_ns"),
        (["--cost-set", "fixed_ns=-1"], "--cost-set fixed_ns: got '-1'"),
        (["--model", "llama-3-8b"], "--model needs --cost roofline"),
        (["--cost", "roofline", "--model", "gpt"], "--model: 'gpt' is not one of"),
        (["--scheduler-cls", "nowhere:Nobody"], "--scheduler-cls: scheduler_cls 'nowhere:Nobody'"),
        (["--max-model-len", "1"], "none of its 40 rows can be replayed"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--preset", "vllm", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("triptych replay: ")
    assert error.count("\n") == 1
    assert said in error


def test_a_trace_that_is_none_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", {"at_s": 0, "output_tokens": 3, "prompt": "x"})
    wrong_cost = tmp_path / "cost.json"
    wrong_cost.write_text("{}")
    for arguments, said in (
        ([str(tmp_path / "none.csv")], "none.csv"),
        ([str(bad)], "bad.jsonl:1: "),
        ([*SHORT, "--cost", str(wrong_cost)], "not a cost model"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


def test_a_report_that_cant_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--html", str(tmp_path / "no" / "page.html")]) == 1
    assert "can't write the report" in capsys.readouterr().err


def test_the_command_is_listed_and_explains_its_figures() -> None:
    assert b"\n  replay " in triptych("--help").stdout
    told = triptych("replay", "--help")
    assert told.returncode == 0
    assert b"Goodput" in told.stdout
    assert b"--unknown-lengths" in told.stdout
