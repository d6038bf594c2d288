"""The GPU check's command, report and arithmetic: everything that needs neither a GPU nor tensors."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ops import gpu_check
from ops.gpu import loop, roofline, timing
from ops.gpu.report import (
    FAILED,
    MEASURED,
    MET,
    MISSED,
    OK,
    SKIPPED,
    Result,
    Skipped,
    as_json,
    exit_status,
    table,
)
from scheduler.costs import NAMED_SHAPES
from tests.ops.gpu_kit import Collected

LLAMA = NAMED_SHAPES["llama-3-8b"]


def test_a_check_that_raises_fails_and_the_next_one_goes_on() -> None:
    checks = Collected()
    with checks.attempt("first"):
        raise ZeroDivisionError("by nothing")
    with checks.attempt("second") as found:
        found.within("error", 0.5, 1.0)
        found.within("error", 0.25, 1.0)
    with checks.attempt("third"):
        raise Skipped("no such thing here")
    assert checks.outcomes() == {"first": FAILED, "second": OK, "third": SKIPPED}
    assert checks.of("first").detail.startswith("ZeroDivisionError: by nothing (test_gpu_check.py:")
    assert checks.of("second").numbers == {"error": 0.5}
    assert checks.of("third").detail == "no such thing here"


def test_a_number_beyond_its_limit_or_no_number_at_all_is_wrong() -> None:
    checks = Collected()
    for value in (2.0, float("nan")):
        with checks.attempt(f"{value}") as found:
            found.within("error", value, 1.0)
    assert [result.outcome for result in checks.results] == [FAILED, FAILED]
    assert checks.of("2.0").detail == "error is 2, at most 1 was expected"


def test_a_missed_goal_is_told_apart_from_a_failed_check() -> None:
    checks = Collected()
    checks.goal("fast", 0.5, 0.85, ms=3.0)
    checks.goal("faster", 0.9, 0.85)
    checks.goal("idle", 0.02, 0.03, most=True)
    checks.measured("rate", numbers=1.0)
    assert list(checks.outcomes().values()) == [MISSED, MET, MET, MEASURED]
    assert checks.of("fast").detail == "50.0%, goal ≥ 85%" and checks.of("fast").numbers == {"ms": 3.0, "fraction": 0.5}
    assert exit_status(checks.results) == 0
    with checks.attempt("wrong") as found:
        found.need(False, "it is wrong")
    assert exit_status(checks.results) == 1
    assert exit_status([]) == 1, "nothing was checked"


def test_the_table_and_the_json_hold_every_result() -> None:
    results = [Result("a", "one", OK, "", {"error": 0.123456}), Result("b", "two", MISSED, "50.0%, goal ≥ 85%")]
    assert table(results).splitlines() == [
        "a",
        "  one  ok           error 0.1235",
        "",
        "b",
        "  two  goal missed  50.0%, goal ≥ 85%",
        "",
        "1 ok, 1 goal missed",
    ]
    report = json.loads(json.dumps(as_json(results, 2.0)))
    assert report["schema"] == "triptych.gpu_check/1" and report["counts"]["goal missed"] == 1
    assert [Result(**one) for one in report["results"]] == results
    with pytest.raises(ValueError, match="'fine' is no outcome"):
        Result("a", "b", "fine")


def test_a_decode_step_reads_weights_once_and_each_row_s_keys_and_values() -> None:
    """Llama-3-8B by hand: 6.98e9 weights in layers, 0.525e9 in the head; 131,072 bytes of KV a token."""
    layers, head = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336), 4096 * 128_256
    assert roofline.decode_bytes(LLAMA, 1, 0) == 2 * (layers + head + 4096) + 2 * 131_072
    grown = roofline.decode_bytes(LLAMA, 64, 8192) - roofline.decode_bytes(LLAMA, 64, 0)
    assert grown == 64 * 8192 * 131_072


def test_prefill_counts_what_is_computed_and_no_embedding() -> None:
    layers, head = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336), 4096 * 128_256
    attention = 2 * 32 * 128 * 32 * 2048**2
    assert roofline.prefill_work(LLAMA, 2048) == 2 * layers * 2048 + 2 * head + attention


def test_fractions_are_of_the_measured_ceilings() -> None:
    most = roofline.Ceilings(bytes_per_s=4e12, flops_per_s=800e12)
    seconds = roofline.decode_bytes(LLAMA, 64, 1024) / 4e12
    assert roofline.decode_fraction(LLAMA, 64, 1024, 2 * seconds, most) == pytest.approx(0.5)
    seconds = roofline.prefill_work(LLAMA, 8192) / 800e12
    assert roofline.prefill_fraction(LLAMA, 8192, 1.25 * seconds, most) == pytest.approx(0.8)


def test_points_that_no_memory_holds_are_left_out() -> None:
    points = [(1, 100), (4, 100), (1, 1000)]
    assert roofline.that_fit(points, 12, 16, blocks=1 + 7) == [(1, 100)]
    assert roofline.that_fit(points, 13, 16, blocks=1 + 7) == []
    assert roofline.that_fit(points, 12, 16, blocks=1 + 64) == points


def replayed(*rows: int) -> list[timing.Replayed]:
    return [timing.Replayed(count, index, 1e-4 * (1 + index)) for index, count in enumerate(rows)]


def test_idle_is_the_gap_that_the_device_s_own_work_does_not_explain() -> None:
    steps = replayed(1, 4, 4, 4, 4, 2)
    spans = [(10.0 * index, 10.0 * index + 8) for index in range(6)]
    found = timing.steady(steps, spans, rows=4, settle=1)
    assert (found.steps, found.period, found.gap) == (2, 10.0, 2.0)
    assert found.launch == pytest.approx(4.5e-4)
    assert found.idle(unavoidable=0.5) == pytest.approx(0.15) and found.idle(unavoidable=3.0) == 0.0


def test_steps_that_something_else_ran_between_are_no_neighbours() -> None:
    steps = [*replayed(4, 4, 4), timing.Replayed(4, 7, 1e-4), timing.Replayed(4, 8, 1e-4)]
    spans = [(float(index), index + 0.75) for index in range(9)]
    assert timing.steady(steps, spans, 4, settle=0).steps == 3
    with pytest.raises(ValueError, match="no two recorded steps of 5 rows"):
        timing.steady(steps, spans, 5)


def test_a_runner_that_saw_no_steady_decode_is_a_failed_check() -> None:
    checks = Collected()
    loop.tell(checks, {"64": {"error": "no two steps"}, "8": {"idle": 0.01, "steps": 3}})
    assert checks.outcomes() == {"steady decode, 64 streams": FAILED, "device idle, 8 streams": MET}


def options_of(*words: str) -> Namespace:
    return gpu_check.build_parser().parse_args(words)


def test_phases_are_chosen_by_name() -> None:
    assert [phase.name for phase in gpu_check.selected([], [])] == [
        *("load", "kernels", "operations", "model", "ceilings", "speed", "loop")
    ]
    assert [phase.name for phase in gpu_check.selected(["speed", "ceilings", "load"], ["load"])] == [
        "ceilings",
        "speed",
    ]
    for words in (["--only", "everything"], ["--budget-s", "soon"], ["--only", "load", "--skip", "load"]):
        with pytest.raises(SystemExit) as stopped:
            gpu_check.main(words)
        assert stopped.value.code == 2


def test_all_phases_fit_eight_minutes() -> None:
    assert gpu_check.BUDGET_S < 8 * 60
    assert sum(phase.budget_s for phase in gpu_check.PHASES) <= gpu_check.BUDGET_S


def test_later_phases_are_told_what_earlier_ones_measured(tmp_path: Path) -> None:
    told: list[dict[str, float]] = []

    def run(phase: Any, given: Any, options: Any, env: Any, limit: float, emit: Callable[[Result], None]) -> None:
        told.append(dict(given))
        emit(Result(phase.name, "rate", MEASURED, "", {"bytes_per_s": 4.0}))

    options = options_of("--pack", str(tmp_path), "--json", str(tmp_path / "report.json"))
    results = gpu_check.check(options, gpu_check.selected(["ceilings", "speed"], []), run)
    assert told == [{}, {"ceilings.bytes_per_s": 4.0}] and len(results) == 2
    assert json.loads((tmp_path / "report.json").read_text())["counts"]["measured"] == 2


def test_a_phase_without_time_is_not_run_and_fails_the_check(tmp_path: Path) -> None:
    options = options_of("--pack", str(tmp_path), "--budget-s", "4")

    def run(*anything: Any) -> None:
        raise AssertionError("it was run")

    results = gpu_check.check(options, gpu_check.selected(["load"], []), run)
    assert [result.detail for result in results] == ["not run: no time was left"] and exit_status(results) == 1


def results_of(phase: str, limit_s: float, tmp_path: Path) -> list[Result]:
    found: list[Result] = []
    chosen = next(one for one in gpu_check.PHASES if one.name == phase)
    options = options_of("--pack", str(tmp_path))
    gpu_check.run_phase(chosen, {}, options, dict(os.environ), limit_s, found.append)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_phase_s_process_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    (result,) = results_of("ceilings", 60.0, tmp_path)
    assert (result.phase, result.outcome) == ("ceilings", FAILED)
    assert result.detail == f"torch {torch.__version__} sees no GPU here"


def test_a_phase_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    (result,) = results_of("ceilings", 0.05, tmp_path)
    assert (result.name, result.outcome) == ("time", FAILED) and result.detail == "not done after 0 s: ended"
    assert time.monotonic() - began < 30


def test_a_phase_whose_process_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert [result.detail for result in results_of("load", 30.0, tmp_path)] == ["ended with status 1"]
