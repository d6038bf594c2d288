"""The experiments in their short form: each shows the effect it is about, and the document has them all."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ops.replay.experiments import plot
from ops.replay.experiments.__main__ import DOCUMENT, OUT, main, read
from ops.replay.experiments.catalogue import EXPERIMENTS
from ops.replay.experiments.document import COMMAND, document, pictures, table
from ops.replay.experiments.figures import FIGURES, anchors
from ops.replay.experiments.peaks import real_peak
from ops.replay.experiments.running import Outcome, Told, points_of, ran, run_experiment
from ops.replay.experiments.spec import TRACES, Made


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An experiment's short form, run once."""
    traces = tmp_path_factory.mktemp("traces")
    found: dict[str, Outcome] = {}

    def outcome(name: str) -> Outcome:
        if name not in found:
            found[name] = run_experiment(EXPERIMENTS[name], traces, quick=True)
        return found[name]

    return outcome


def by_label(outcome: Outcome) -> dict[str, dict[str, float]]:
    return {told.label: told.figures for told in outcome.runs}


def test_a_watermark_of_204_blocks_lasts_40_streams_for_82_steps(outcomes: Any) -> None:
    runs = by_label(outcomes("runway"))
    assert runs["watermark 0.01"]["runway"] == pytest.approx(204 / 2.5, abs=1)
    assert runs["watermark 0.02"]["runway"] == pytest.approx(409 / 2.5, abs=1)


def test_preemptions_fall_off_a_cliff_and_throughput_down_a_slope(outcomes: Any) -> None:
    runs = by_label(outcomes("watermark"))
    assert runs["0, cache off"]["preemptions"] > runs["0.16, cache off"]["preemptions"] == 0
    assert runs["0.01, cache on"]["outputs_per_s"] > runs["0.16, cache on"]["outputs_per_s"]
    assert runs["0, cache off"]["replayed"] > 2 * runs["0, cache on"]["replayed"]


def test_a_watermark_and_few_slots_both_stop_a_storm_but_only_one_keeps_the_throughput(outcomes: Any) -> None:
    runs = by_label(outcomes("storm"))
    storm, marked = runs["watermark 0, load 1.4"], runs["watermark 0.02, load 1.4"]
    slots, uncached = runs["max_num_seqs 32, load 1.4"], runs["cache off, load 1.4"]
    assert storm["preemptions"] > 100
    assert marked["preemptions"] < 0.1 * storm["preemptions"]
    assert marked["requests_per_s"] >= 0.98 * storm["requests_per_s"]
    assert slots["preemptions"] == 0
    assert slots["requests_per_s"] < 0.95 * storm["requests_per_s"]
    assert uncached["replayed"] > 2 * storm["replayed"]


@pytest.mark.parametrize(
    ("label", "requests", "steps"), [("watermark 0.02, load 1.4", 2500, 10_000), ("cache off, load 1.0", 400, 1000)]
)
def test_the_storm_is_vllms_own_decision_for_decision(label: str, requests: int, steps: int) -> None:
    """Its first steps; the document has the whole runs."""
    storm = EXPERIMENTS["storm"]
    run = next(run for run in storm.runs if run.label == label)
    one, _ = ran(TRACES / str(storm.trace), f"{storm.options} {run.options} --limit {requests}", run)
    marks = {step: crc for step, crc in anchors()[run.anchor]["decision_crc32_at_step"].items() if int(step) <= steps}
    assert str(steps) in marks
    assert {step: one.result.decisions[step] for step in marks} == marks


def test_less_conservative_admission_retracts_more_and_lets_more_in(outcomes: Any) -> None:
    runs = by_label(outcomes("conservativeness"))
    assert runs["0.3"]["preemptions"] > runs["2"]["preemptions"]
    assert runs["0.3"]["used"] > runs["2"]["used"]


def test_a_confident_forecast_preempts_less_than_none_and_wastes_less_than_credit(outcomes: Any) -> None:
    runs = by_label(outcomes("forecast"))
    sure, bold = runs["forecast, confidence 0.99"], runs["forecast, confidence 0.5"]
    assert sure["preemptions"] < 0.2 * runs["optimistic, watermark 0"]["preemptions"]
    assert sure["requests_per_s"] > 1.05 * runs["credit"]["requests_per_s"]
    assert sure["above"] < bold["above"]
    assert 0.8 < sure["bias"] < bold["bias"] < 1.2


def test_a_victim_loses_what_the_others_have_overwritten_unless_it_was_swapped(outcomes: Any) -> None:
    runs = by_label(outcomes("recovery"))
    assert runs["cache off, recompute"]["survived"] == 0
    assert 0 < runs["800 in, 600 out, recompute"]["survived"] < 0.8
    for case in ("cache off", "800 in, 600 out"):
        assert runs[f"{case}, swap"]["survived"] == 1
        assert runs[f"{case}, swap"]["replayed"] == 0
    assert runs["cache off, swap"]["outputs_per_s"] > runs["cache off, recompute"]["outputs_per_s"]


def test_the_longest_prefix_first_finds_more_in_the_cache_until_the_queue_is_long(outcomes: Any) -> None:
    runs = by_label(outcomes("prefixes"))
    flipping, steady = runs["lpm, 24/s"], runs["lpm without the flip, 24/s"]
    assert flipping["waiting_peak"] > 128
    assert steady["hit_rate"] > flipping["hit_rate"] > runs["fcfs, 24/s"]["hit_rate"]


def test_the_age_bound_ends_starvation(outcomes: Any) -> None:
    runs = by_label(outcomes("starvation"))
    for order, figure in (("shortest-prefill", "long_max"), ("priority", "batch_max")):
        assert runs[f"{order}, 10 s"][figure] < 15 < 30 < runs[f"{order}, no bound"][figure]


def test_a_heavy_tenant_pays_for_its_own_overload_under_fair_service(outcomes: Any) -> None:
    runs = by_label(outcomes("fairness"))
    assert runs["fair"]["light_p99"] < 0.2 * runs["fcfs"]["light_p99"]
    assert runs["fair"]["heavy_p99"] < 1.1 * runs["fcfs"]["heavy_p99"]
    assert runs["fair, heavy=40"]["light_p99"] > runs["fcfs"]["light_p99"]


def test_objectives_are_kept_for_many_under_overload(outcomes: Any) -> None:
    for figures in by_label(outcomes("objectives")).values():
        assert figures["goodput"] > 0.5


def test_each_part_is_needed(outcomes: Any) -> None:
    runs = by_label(outcomes("parts"))
    for part in ("no on-time order", "no pacing", "neither"):
        assert runs[f"code, {part}"]["goodput"] < 0.5 * runs["code, all parts"]["goodput"]


def test_the_late_are_served_sooner_with_less_patience(outcomes: Any) -> None:
    runs = by_label(outcomes("late"))
    assert runs["late_patience=1"]["goodput"] <= runs["late_patience=3"]["goodput"]
    assert (
        runs["late_patience=1"]["e2e_ratio" if "e2e_ratio" in runs["late_patience=1"] else "e2e_max"]
        <= (runs["late_patience=3"]["e2e_max"])
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_plots_are_well_formed_and_stand_alone(name: str, outcomes: Any) -> None:
    drawn = pictures(EXPERIMENTS[name], outcomes(name))
    assert len(drawn) == len(EXPERIMENTS[name].plots)
    for text in drawn.values():
        root = ET.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "href" not in text
        assert {child.tag.rpartition("}")[2] for child in root} & {"polyline", "circle", "rect"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_table_has_a_row_per_run_and_known_columns(name: str, outcomes: Any) -> None:
    experiment = EXPERIMENTS[name]
    lines = table(experiment, outcomes(name)).splitlines()
    assert len(lines) == 2 + len(outcomes(name).runs)
    assert set(experiment.columns) <= set(FIGURES)


def test_the_document_is_what_the_stored_outcomes_make() -> None:
    found = {name: read(OUT, name) for name in EXPERIMENTS}
    assert all(outcome is not None and not outcome.quick for outcome in found.values())
    assert DOCUMENT.read_text(encoding="utf-8") == document(EXPERIMENTS, found)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_document_has_each_experiments_command_plots_and_lesson(name: str) -> None:
    text, experiment = DOCUMENT.read_text(encoding="utf-8"), EXPERIMENTS[name]
    assert f"{COMMAND} {name}\n" in text
    assert experiment.teaches
    assert experiment.teaches in " ".join(text.split())
    for picture in pictures(experiment, Outcome(name, False, [])):
        assert f"(experiments/{picture})" in text
        assert (OUT / picture).exists()


def test_stored_runs_are_those_of_the_catalogue() -> None:
    for name, experiment in EXPERIMENTS.items():
        outcome = read(OUT, name)
        assert outcome is not None
        assert [told.label for told in outcome.runs] == [run.label for run in experiment.runs]
        for told, run in zip(outcome.runs, experiment.runs, strict=True):
            assert told.command.endswith(f"{experiment.options} {run.options}".strip())


def test_the_command_writes_figures_and_pictures_and_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["runway", "--quick", "--out", str(tmp_path), "--traces", str(tmp_path / "traces")]
    assert main(asked) == 0
    assert "steps until the first preemption" in capsys.readouterr().out
    assert (tmp_path / "runway-1.svg").exists()
    stored = read(tmp_path, "runway")
    assert stored is not None
    assert stored.quick
    stored.runs[0].figures["runway"] = -5.0
    (tmp_path / "runway.json").write_bytes(msgspec.json.encode(stored))
    assert main([*asked, "--resume"]) == 0
    again = read(tmp_path, "runway")
    assert again is not None
    assert again.runs[0].figures["runway"] == -5.0


def test_an_unknown_experiment_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["strom"])
    assert refused.value.code == 2
    assert "storm" in capsys.readouterr().err


def test_made_traces_are_the_same_every_time() -> None:
    made = {run.trace for one in EXPERIMENTS.values() for run in one.runs if isinstance(run.trace, Made)}
    made |= {one.trace for one in EXPERIMENTS.values() if isinstance(one.trace, Made)}
    assert len({one.name for one in made}) >= 8
    for one in made:
        assert one.lines(40) == one.lines(40)


def test_a_real_peak_is_where_growth_and_ends_balance() -> None:
    known, ends = np.array([16, 16], np.int32), np.array([24, 116], np.int64)
    assert real_peak(known, ends, 4) == 29  # the long one alone, at its end: 115 tokens
    assert real_peak(known, np.array([24, 24], np.int64), 4) == 2 * 6  # both hold 23 tokens just before they end


def test_a_chart_without_points_is_still_a_picture() -> None:
    ET.fromstring(plot.lines("nothing & nobody", "x", "y", {}))
    ET.fromstring(plot.bars("nothing", "y", [], {}))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.0007), (3, 170_000), (5, 5)])
def test_axis_marks_are_few_round_and_within(low: float, high: float) -> None:
    marks = plot.rounds(low, high)
    assert 1 <= len(marks) <= plot.MOST_TICKS + 2
    assert all(low - 1e-9 <= mark <= high * (1 + 1e-9) for mark in marks)


def test_series_are_told_by_bin_middles() -> None:
    told = Told("a", "", {}, width_s=2.0, series={"ratio": [1.0, 0.5]})
    assert points_of(told, "ratio") == [(1.0, 1.0), (3.0, 0.5)]


@pytest.mark.parametrize("high", [0.0007, 0.94, 1.0, 11.4, 1079.0, 170_000.0])
def test_an_axis_ends_at_a_label_that_nothing_drawn_is_above(high: float) -> None:
    top = plot.ceiling(high)
    assert high <= top * (1 + 1e-9) and top <= 1.7 * high
    assert plot.ticks(top)[-1] == pytest.approx(top)
