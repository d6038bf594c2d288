"""Drives a running Triptych with other people's clients and writes what came of it to docs/conformance.md.

    make conformance
    make conformance CONFORMANCE_ARGS="--only litellm openai"

Clients live in environments of their own below .venv-conformance, one for each file in `requirements/`. What isn't
installed is skipped, with the reason on record. The page is made from the last report of each file, with its date.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.harness import Server, running_server
from tests.outside.report import Suite, read, render

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORD = ROOT / "docs" / "conformance.md"
REPORTS = ROOT / ".venv-conformance" / "reports"
ENVIRONMENTS = ROOT / ".venv-conformance"
WEIGHTS = ENVIRONMENTS / "smollm2-hf"
OWN_ENVIRONMENT = {"test_instructor.py": "instructor"}
NARROW = ("--backend", "sim", "--sim-step-ms", "20", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
EXACT = ("--model", str(WEIGHTS), "--dtype", "float32", "--served-model-name", "smollm2-135m-instruct")


def main() -> int:
    """0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="CLIENT", help="as in tests/outside/test_CLIENT.py")
    options = parser.parse_args()
    files = [f for f in sorted(HERE.glob("test_*.py")) if not options.only or f.stem[5:] in options.only]
    if not files:
        parser.error(f"no such client: {' '.join(options.only)}")
    export_weights()
    REPORTS.mkdir(parents=True, exist_ok=True)
    with servers() as environment:
        suites = [drive(file, environment) for file in files]
    print(f"written: {RECORD.relative_to(ROOT)}")
    failed = sum(suite.count("failed") for suite in suites)
    print(f"{sum(suite.count('passed') for suite in suites)} passed, {failed} failed")
    return 1 if failed else 0


@contextlib.contextmanager
def servers() -> Iterator[dict[str, str]]:
    """The servers' ports, and more, for the clients' environment: one as `make serve`, one narrow, one in float32."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **env: str) -> Server:
            return stack.enter_context(running_server(*flags, env=env))

        open_to_all = start()
        narrow = start(*NARROW, TRIPTYCH_API_KEY="right-key")
        exact = start(*EXACT)
        yield {
            "CONFORMANCE_PORT": str(open_to_all.port),
            "CONFORMANCE_NARROW_PORT": str(narrow.port),
            "CONFORMANCE_EXACT_PORT": str(exact.port),
            "CONFORMANCE_WEIGHTS": str(WEIGHTS),
            "CONFORMANCE_ENVIRONMENTS": str(ENVIRONMENTS),
            "CONFORMANCE_REVISION": revision(),
        }


def drive(file: Path, environment: dict[str, str]) -> Suite:
    """Run one file's tests in its environment; what pytest reports of them."""
    report = REPORTS / f"{file.stem}.xml"
    report.unlink(missing_ok=True)
    python = ENVIRONMENTS / OWN_ENVIRONMENT.get(file.name, "clients") / "bin" / "python"
    if not python.exists():
        print(f"--- {file.name}: {python.relative_to(ROOT)} is not installed")
        return read(report, file.stem)
    options = ["-q", "--tb=short", "-W", "ignore", "-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE)]
    command = [str(python), "-m", "pytest", *options, f"--junitxml={report}", str(file)]
    print(f"--- {file.name}", flush=True)
    subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, check=False)
    every = [read(REPORTS / f"{each.stem}.xml", each.stem) for each in sorted(HERE.glob("test_*.py"))]
    RECORD.write_text(render(every), encoding="utf-8")
    return read(report, file.stem)


def export_weights() -> None:
    """The default model as a Hugging Face directory, once, for the clients that read nothing else."""
    if (WEIGHTS / "tokenizer_config.json").exists():
        return
    print("writing the model as a Hugging Face directory (once)", flush=True)
    command = [sys.executable, "-m", "ops.bench.export", "smollm2-135m-instruct", str(WEIGHTS)]
    subprocess.run(command, cwd=ROOT, check=True)


def revision() -> str:
    """The commit that was driven, `-dirty` if files were changed since; empty outside a git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
