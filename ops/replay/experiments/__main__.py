"""`python -m ops.replay.experiments NAME…`: runs experiments, writes their JSON and pictures, and the document."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ops.replay.experiments.catalogue import EXPERIMENTS
from ops.replay.experiments.document import document, pictures, table, write_atomically
from ops.replay.experiments.running import Outcome, run_experiment
from ops.replay.experiments.spec import ROOT, Experiment

OUT = ROOT / "docs" / "experiments"
DOCUMENT = ROOT / "docs" / "experiments.md"


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m ops.replay.experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--quick", action="store_true", help="a short form that shows the direction; no document")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where JSON and SVG go")
    parser.add_argument("--resume", action="store_true", help="keep what DIR has of runs by the same command")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where made-up traces are kept (not at all)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs what is asked for; the exit code."""
    parser = build_parser()
    options = parser.parse_args(list(argv))
    names = list(EXPERIMENTS) if options.all else options.names
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"there is no experiment {unknown[0]!r}, but {', '.join(EXPERIMENTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="triptych-traces-") as folder:
        traces = options.traces or Path(folder)
        traces.mkdir(parents=True, exist_ok=True)
        for name in names:
            one(EXPERIMENTS[name], options, traces)
    if options.out == OUT and not options.quick:
        found = {name: read(OUT, name) for name in EXPERIMENTS}
        outcomes = {name: outcome for name, outcome in found.items() if outcome is not None}
        write_atomically(DOCUMENT, document(EXPERIMENTS, outcomes))
    return 0


def one(experiment: Experiment, options: argparse.Namespace, traces: Path) -> None:
    """Run it, keep what it came to, show its table."""
    path = options.out / f"{experiment.name}.json"

    def keep(outcome: Outcome) -> None:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n")
        print(f"{experiment.name}: {len(outcome.runs)} of {len(experiment.runs)} runs", file=sys.stderr)

    stored = [read(options.out, name) for name in EXPERIMENTS] if options.resume else []
    known = {told.command: told for outcome in stored if outcome is not None for told in outcome.runs}
    outcome = run_experiment(experiment, traces, quick=options.quick, known=known, after=keep)
    for name, picture in pictures(experiment, outcome).items():
        write_atomically(options.out / name, picture)
    print(f"{experiment.title}\n{table(experiment, outcome)}\n")


def read(folder: Path, name: str) -> Outcome | None:
    """What an experiment came to the last time, if anything."""
    path = folder / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Outcome) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
