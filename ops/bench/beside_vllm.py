"""The options of benchmarks that can measure vLLM beside us, and how such a benchmark ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser, *, model_dir: str) -> None:
    """`--vllm-python` and `--model-dir`, the directory for what `model_dir` says, and `--json` for the report."""
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="interpreter that has vLLM: compare with it")
    parser.add_argument("--model-dir", type=Path, metavar="DIR", help=f"Hugging Face directory for {model_dir}")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options in `argv`. Ends the process with 2 if they don't fit together."""
    options = parser.parse_args(list(argv))
    if options.vllm_python and not options.model_dir:
        parser.error("--vllm-python needs --model-dir (python -m ops.bench.export makes one)")
    return options


def report_of(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    run: Callable[[argparse.Namespace], Mapping[str, Any]],
    failure: type[Exception],
) -> Mapping[str, Any]:
    """What `run` measured. Ends the process with 1 and a line if it raises `failure`, with 130 if it is interrupted."""
    try:
        return run(options)
    except failure as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
