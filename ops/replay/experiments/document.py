"""From outcomes to what a person reads: the pictures, the tables, the document."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path

from ops.calibrate.scatter import Panel
from ops.calibrate.scatter import svg as scatter
from ops.replay.experiments import plot
from ops.replay.experiments.figures import FIGURES
from ops.replay.experiments.running import Outcome, of_plot
from ops.replay.experiments.spec import Experiment, Plot

WIDTH = 120
COMMAND = "python -m ops.replay.experiments"

HEAD = f"""# Experiments

What the scheduler's choices are worth, by replay: the serving scheduler on a virtual clock, with the cost of an 8B
model on one 80 GB GPU (`triptych replay --help`). All of it is deterministic; times are virtual; load 1.0 is what the
machine can just do.

`{COMMAND} --all` (`make experiments`) runs everything, half an hour on one core, and writes
this file. `--quick` is a short form that takes seconds. Beside the plots, `docs/experiments/NAME.json` has all figures
of each run, and the `triptych replay` command that repeats it.

"""


def pictures(experiment: Experiment, outcome: Outcome) -> dict[str, str]:
    """The plots as SVG, by file name."""
    return {
        f"{experiment.name}-{number}.svg": _drawn(one, outcome) for number, one in enumerate(experiment.plots, start=1)
    }


def _drawn(one: Plot, outcome: Outcome) -> str:
    y = one.y or (FIGURES[one.figures[0]].heading if one.figures and one.figures[0] in FIGURES else "")
    if one.kind == "bars":
        told = [run for run in outcome.runs if all(name in run.figures for name in one.figures)]
        heights = {FIGURES[name].heading: [run.figures[name] for run in told] for name in one.figures}
        return plot.bars(one.title, y, [run.label for run in told], heights)
    if one.kind == "pairs":
        pairs = [pair for run in outcome.runs for pair in run.pairs]
        panel = Panel(one.title, one.y, [real for _, real in pairs], [predicted for predicted, _ in pairs])
        return scatter(panel).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"
    return plot.lines(one.title, one.x or "s", y, of_plot(one, outcome), dots=one.kind == "against")


def table(experiment: Experiment, outcome: Outcome) -> str:
    """The figures as a Markdown table, a row per run."""
    headings = [FIGURES[name].heading for name in experiment.columns]
    rows = [f"| | {' | '.join(headings)} |", f"|---|{'---|' * len(headings)}"]
    for run in outcome.runs:
        cells = [FIGURES[name].text(run.figures[name]) if name in run.figures else "–" for name in experiment.columns]
        rows.append(f"| {run.label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def section(experiment: Experiment, outcome: Outcome) -> str:
    """One experiment as the document has it."""
    images = "\n".join(
        f"![{one.title}](experiments/{experiment.name}-{number}.svg)"
        for number, one in enumerate(experiment.plots, start=1)
    )
    return (
        f"## {experiment.title}\n\n{_filled(experiment.asks)}\n\n    {COMMAND} {experiment.name}\n\n"
        f"{images}\n\n{table(experiment, outcome)}\n\n{_filled(experiment.teaches)}\n"
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def document(experiments: Mapping[str, Experiment], outcomes: Mapping[str, Outcome]) -> str:
    """The whole file, of the experiments that have an outcome."""
    return HEAD + "\n".join(section(one, outcomes[name]) for name, one in experiments.items() if name in outcomes)


def write_atomically(path: Path, text: str | bytes) -> None:
    """Whoever reads meanwhile sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(text.encode() if isinstance(text, str) else text)
    draft.replace(path)
