"""Replays for tests: small traces on disk, and the command's own way from options to a report."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from harness import ROOT

from ops.replay.cli import build_parser, run
from ops.replay.result import Report, RunResult

TRACES = ROOT / "tests" / "data" / "traces"
CONVERSATION = TRACES / "azure_2023_conv_300.csv.gz"


def write_lines(path: Path, *rows: dict[str, Any]) -> Path:
    """A trace of our own format; gzip if the name says so."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def replayed(*arguments: object) -> Report:
    """The report of `triptych replay ARGUMENTS`, in this process."""
    argv = [str(argument) for argument in arguments]
    return run(argv, build_parser().parse_args(argv))


def one(*arguments: object) -> RunResult:
    """The result of the only run."""
    (result,) = replayed(*arguments).runs
    return result
