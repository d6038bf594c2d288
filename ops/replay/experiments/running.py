"""Runs an experiment: its replays one after another, and of each what the table and the plots need, as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ops.replay import cli
from ops.replay.experiments.figures import FIGURES, Ran, anchor_of
from ops.replay.experiments.spec import ROOT, TRACES, Experiment, Made, Plot, Run
from ops.replay.setups import setups_of, workload_of

THINNING = 4


class Told(msgspec.Struct):
    """What one run came to. `series` are over bins of `width_s`; `command` repeats the run."""

    label: str
    command: str
    figures: dict[str, float]
    line: str = ""
    x: float = 0.0
    width_s: float = 0.0
    series: dict[str, list[float]] = {}
    pairs: list[tuple[float, float]] = []


class Outcome(msgspec.Struct):
    """What an experiment came to; the JSON beside its plots."""

    name: str
    quick: bool
    runs: list[Told]


def run_experiment(
    experiment: Experiment,
    traces: Path,
    *,
    quick: bool = False,
    known: Mapping[str, Told] | None = None,
    after: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """All runs of an experiment. Made traces are written to the folder `traces`.

    A short form is compared with no recorded run, since it isn't the same. Runs that are in `known`, by their command,
    aren't repeated. `after` is called after each.
    """
    outcome = Outcome(experiment.name, quick, [])
    for run in experiment.runs:
        if quick and experiment.quick_runs and run.label not in experiment.quick_runs:
            continue
        trace = _trace(run.trace or experiment.trace, traces, experiment.quick_requests if quick else 0)
        options = " ".join(part for part in (experiment.options, run.options, experiment.quick * quick) if part)
        told = (known or {}).get(command_of(trace, options))
        if told is None or not set(_over_time(experiment)) <= set(told.series):
            told = _told(experiment, replace(run, anchor="") if quick else run, trace, options)
        outcome.runs.append(msgspec.structs.replace(told, label=run.label, line=run.line, x=run.x))
        after(outcome)
    return outcome


def command_of(trace: Path, options: str) -> str:
    """The same run by `triptych replay`; a made trace by its name alone, wherever it was written."""
    where = trace.relative_to(ROOT) if trace.is_relative_to(ROOT) else Path(trace.name)
    return f"triptych replay {where} {options}"


def ran(trace: Path, options: str, run: Run) -> tuple[Ran, list[tuple[float, float]]]:
    """One replay, and the pairs of its watcher."""
    parsed = cli.build_parser().parse_args([str(trace), *shlex.split(options), "--details", "--no-progress"])
    workload, _ = workload_of(parsed)
    (setup,) = setups_of(parsed, workload.vocab_size)
    watcher = run.watch(workload) if run.watch is not None else None
    result = cli.replay(setup, workload, parsed, *([watcher] if watcher is not None else []))
    if watcher is None:
        return Ran(result, workload.rows, anchor_of(run.anchor), {}), []
    return Ran(result, workload.rows, anchor_of(run.anchor), watcher.figures()), watcher.pairs()


def _told(experiment: Experiment, run: Run, trace: Path, options: str) -> Told:
    one, pairs = ran(trace, options, run)
    figures = {name: figure.of(one) for name, figure in FIGURES.items()}
    series = one.result.series
    return Told(
        label=run.label,
        command=command_of(trace, options),
        figures={name: float(value) for name, value in figures.items() if value is not None},
        width_s=series.width_s * THINNING,
        series={name: thinned(getattr(series, name)) for name in _over_time(experiment)},
        pairs=pairs,
    )


def _over_time(experiment: Experiment) -> list[str]:
    return [name for plot in experiment.plots if plot.kind == "time" for name in plot.figures]


def thinned(values: Sequence[float]) -> list[float]:
    """Means of neighbours: a plot has no room for all bins."""
    parts = (values[start : start + THINNING] for start in range(0, len(values), THINNING))
    return [float(f"{sum(part) / len(part):.4g}") for part in parts]


def _trace(trace: Made | str, folder: Path, quick_requests: int) -> Path:
    if isinstance(trace, str):
        return TRACES / trace
    path = folder / f"{trace.name}.jsonl"
    if not path.exists():
        lines = trace.lines(quick_requests or trace.requests)
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def points_of(told: Told, name: str) -> list[tuple[float, float]]:
    """A series as (time, value); a bin stands at its middle."""
    values = told.series[name]
    return [(told.width_s * (index + 0.5), float(value)) for index, value in enumerate(values)]


def of_plot(plot: Plot, outcome: Outcome) -> dict[str, list[tuple[float, float]]]:
    """The lines of a plot that has any: name to points."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for told in outcome.runs:
        for name in plot.figures:
            if plot.kind == "time":
                lines[told.label] = points_of(told, name)
            elif name in told.figures and told.line:
                heading = told.line if len(plot.figures) == 1 else f"{told.line}: {FIGURES[name].heading}"
                lines.setdefault(heading, []).append((told.x, told.figures[name]))
    return {name: sorted(points) for name, points in lines.items()}
