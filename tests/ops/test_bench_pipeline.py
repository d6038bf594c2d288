"""The pipeline bench: its window and its sums on hand-made records, and one small run of the three real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench import pipeline
from ops.bench.load import LoadResult
from ops.bench.openai_stream import RequestRecord
from ops.bench.pipeline import CpuSample, MeasurementError, build_report, missed, steady_window, tokens_between
from ops.bench.processes import SystemFailed, cpu_seconds, system


def stream(first: float, gap: float, chunks: int, first_chunk_tokens: int = 1) -> RequestRecord:
    times = [first + gap * number for number in range(chunks)]
    totals = [first_chunk_tokens + number for number in range(chunks)]
    return RequestRecord(
        0, finished_at=times[-1], chunk_times=times, chunk_tokens=totals, prompt_tokens=4, output_tokens=totals[-1]
    )


def test_the_steady_window_starts_with_the_last_stream_and_ends_with_the_first() -> None:
    assert steady_window([stream(0.0, 1.0, 10), stream(3.0, 1.0, 10)]) == (3.0, 9.0)


def test_streams_that_never_ran_together_or_failed_are_no_measurement() -> None:
    with pytest.raises(MeasurementError, match="ended before"):
        steady_window([stream(0.0, 1.0, 3), stream(5.0, 1.0, 3)])
    broken = stream(0.0, 1.0, 3)
    broken.fail("dropped", "closed")
    with pytest.raises(MeasurementError, match="1 of 2 streams failed; the first: dropped: closed"):
        steady_window([stream(0.0, 1.0, 3), broken])


def test_tokens_in_a_window_are_counted_by_the_running_usage_wherever_the_large_chunks_are() -> None:
    even, late_start = stream(0.0, 1.0, 10), stream(0.0, 1.0, 10, first_chunk_tokens=30)
    assert tokens_between(even, 2.0, 6.0) == tokens_between(late_start, 2.0, 6.0) == 4
    assert tokens_between(even, -1.0, 99.0) == 10
    assert tokens_between(late_start, -1.0, 99.0) == 39


def test_the_report_compares_with_what_the_steps_allow_and_counts_cpu_in_the_window_only() -> None:
    records = [stream(0.0, 0.02, 101), stream(0.0, 0.02, 101)]  # half of what 10 ms steps allow
    samples = [
        CpuSample(at, {"api": at * 0.5 + (9 if at < 0 else 0), "client": 0.0}) for at in (-1.0, 0.5, 1.0, 1.5, 9.0)
    ]
    report = build_report(LoadResult(records, 2.0, 2), samples, streams=2, step_ms=10.0, idle=None)
    assert report["allowed_tokens_per_s"] == 200
    assert report["streamed_tokens_per_s"] == pytest.approx(100)
    assert report["ratio"] == pytest.approx(0.5)
    assert report["cpu"]["api"]["percent_of_core"] == pytest.approx(50)
    assert report["cpu"]["api"]["us_per_token"] == pytest.approx(5000, rel=0.02)
    assert "50.0%" in pipeline.render(report)
    with pytest.raises(MeasurementError, match="too short"):
        build_report(LoadResult(records, 2.0, 2), samples[:2], streams=2, step_ms=10.0, idle=None)


def test_required_limits_are_named_when_missed() -> None:
    report = {"ratio": 0.94, "idle": {"total_percent": 2.5}}
    assert missed(report, 0.9, 3.0) == []
    assert missed(report, None, None) == []
    assert [problem.split(" ")[0] for problem in missed(report, 0.95, 2.0)] == ["ratio", "idle"]


def test_cpu_time_of_a_process_grows_and_a_missing_process_is_an_error() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) == before:
        sum(range(10_000))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        cpu_seconds(gone.pid)


def test_a_system_that_can_not_start_is_reported_with_its_log() -> None:
    with pytest.raises(SystemFailed, match="no-such-flag"), system(["--no-such-flag", "1"]):
        pass


def test_a_process_that_dies_during_the_measurement_ends_it_with_the_log() -> None:
    with (
        pytest.raises(SystemFailed, match=r"is gone; the end of the log:\n.*starting"),
        system(["--backend", "sim"]) as running,
    ):
        os.kill(running.pids["scheduler"], signal.SIGKILL)
        while True:
            running.cpu_seconds()


def test_three_real_processes_stream_every_token_and_are_gone_afterwards(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    arguments = ["--streams", "4", "--step-ms", "10", "--seconds", "2", "--idle", "0.2", "--json", str(out)]
    assert pipeline.main(arguments) == 0
    report = json.loads(out.read_text())
    assert report["output_tokens"] == 4 * 200
    assert report["allowed_tokens_per_s"] == 400
    assert report["ratio"] > 0
    assert set(report["cpu"]) == {"api", "scheduler", "runner", "client"}
    assert set(report["idle"]["percent_of_core"]) == {"api", "scheduler", "runner"}
    own = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in Path(own).read_text().split()]
    assert not [command for command in commands if b"ops.cli" in command]


def test_an_idle_limit_without_an_idle_measurement_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        pipeline.main(["--require-idle", "2"])
    assert caught.value.code == 2
