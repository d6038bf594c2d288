"""`python -m ops.gpu_check`: does the runner compute right on this GPU, and how near to its ceilings?

One command for a machine with one GPU, torch and no network; what else is needed comes in the pack (`make gpu-pack`).
Each phase runs in a process of its own: a fault of the device, or a hang, ends that phase and no other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.gpu.report import FAILED, Checks, Result, as_json, exit_status, table
from ops.gpu.unpack import environment, unpack

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 460.0


@dataclass(frozen=True, slots=True)
class Phase:
    """`module` has `run(checks, setting)`; it may take `budget_s`."""

    name: str
    module: str
    budget_s: float
    help: str


PHASES = (
    Phase("load", "ops.gpu.load", 30, "what is there: versions, device, compiled kernels"),
    Phase("kernels", "ops.gpu.kernels", 60, "attention against float64"),
    Phase("operations", "ops.gpu.operations", 50, "norms, rotary embedding, linears and sampling against float64"),
    Phase("model", "ops.gpu.model", 80, "a real model against the CPU's numbers; graphs, swap, seeds, pipelining"),
    Phase("ceilings", "ops.gpu.ceilings", 25, "memory bandwidth and matrix rate"),
    Phase("speed", "ops.gpu.speed", 110, "decode and prefill of Llama-3-8B's shape with random weights"),
    Phase("loop", "ops.gpu.loop", 90, "host time and device idle with the real scheduler in the loop"),
)


def selected(only: Sequence[str], skip: Sequence[str]) -> list[Phase]:
    """The phases to run, in order."""
    return [phase for phase in PHASES if (not only or phase.name in only) and phase.name not in skip]


def numbers_of(results: Sequence[Result]) -> dict[str, float]:
    """What later phases are told: each number as "phase.number", the last one of that name."""
    return {f"{result.phase}.{name}": value for result in results for name, value in result.numbers.items()}


def run_phase(
    phase: Phase,
    given: Mapping[str, float],
    options: argparse.Namespace,
    env: dict[str, str],
    limit_s: float,
    emit: Callable[[Result], None],
) -> None:
    """Run one phase in its own process, passing on each result as it comes. What is late is ended."""
    read, write = os.pipe()
    words = [sys.executable, "-m", "ops.gpu_check", "--worker", phase.name, "--report-fd", str(write)]
    words += ["--given", json.dumps(dict(given)), "--pack", str(options.pack), "--budget-s", f"{limit_s:.1f}"]
    # A phase may start processes of its own: with a session for all of them they end together.
    child = subprocess.Popen(words, env=env, cwd=ROOT, pass_fds=(write,), stdout=sys.stderr, start_new_session=True)
    os.close(write)
    try:
        finished = _pass_on(read, time.monotonic() + limit_s, emit)
        status = child.wait(timeout=5) if finished else None
    except subprocess.TimeoutExpired:
        status = None
    finally:
        os.close(read)
        _end(child)
    if status is None:
        emit(Result(phase.name, "time", FAILED, f"not done after {limit_s:.0f} s: ended", seconds=limit_s))
    elif status:
        emit(Result(phase.name, "process", FAILED, f"ended with status {status}"))


def _pass_on(read: int, deadline: float, emit: Callable[[Result], None]) -> bool:
    """Emit the results that come by lines of JSON. False if the deadline came before the end."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            data = os.read(read, 65536)
            if not data:
                return True
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                emit(Result(**json.loads(line)))
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """End whatever is left of a phase."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it has ended
    child.wait()


def work(options: argparse.Namespace) -> int:
    """A phase's process: run it, write each result as a line of JSON."""
    phase = next(phase for phase in PHASES if phase.name == options.worker)
    with os.fdopen(options.report_fd, "w") as out:

        def emit(result: Result) -> None:
            print(json.dumps(asdict(result)), file=out, flush=True)

        checks = Checks(phase.name, emit, options.budget_s - 3)  # ends by itself rather than being ended
        with checks.attempt("phase ran to its end") as found:
            import torch

            from ops.gpu.setting import Setting
            from runner.cuda.device import CudaDevice
            from runner.cuda.library import load_flashinfer

            found.need(torch.cuda.is_available(), f"torch {torch.__version__} sees no GPU here")
            setting = Setting(CudaDevice(), load_flashinfer(), options.pack, json.loads(options.given))
            importlib.import_module(phase.module).run(checks, setting)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    names = [phase.name for phase in PHASES]
    listed = "\n".join(f"  {phase.name:<11} {phase.help} (up to {phase.budget_s:.0f} s)" for phase in PHASES)
    parser = argparse.ArgumentParser(
        prog="python -m ops.gpu_check",
        description=__doc__,
        epilog=f"phases:\n{listed}\n\nExit status: 1 if a check failed, whatever the goals; 2 for wrong options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="PHASE", help="run these alone")
    parser.add_argument("--skip", nargs="+", default=[], choices=names, metavar="PHASE", help="leave these out")
    parser.add_argument("--pack", type=Path, default=ROOT / "build" / "gpu", help="what `make gpu-pack` made")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON, after every result")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help="seconds for all phases together")
    for internal in ("--worker", "--given"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    parser.add_argument("--report-fd", type=int, default=-1, help=argparse.SUPPRESS)
    return parser


def check(options: argparse.Namespace, phases: Sequence[Phase], run: Callable[..., None] = run_phase) -> list[Result]:
    """Run the phases one after the other within the budget. The JSON file always holds what is known so far."""
    began, results = time.monotonic(), list[Result]()

    def emit(result: Result) -> None:
        results.append(result)
        print(table([result]).splitlines()[1], file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(as_json(results, time.monotonic() - began), indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as site:
        unpack(options.pack, Path(site))
        env = environment(Path(site), ROOT, dict(os.environ))
        for phase in phases:
            limit = min(phase.budget_s, options.budget_s - (time.monotonic() - began))
            print(f"{phase.name}: up to {max(limit, 0):.0f} s", file=sys.stderr, flush=True)
            if limit < 5:
                emit(Result(phase.name, "time", FAILED, "not run: no time was left"))
                continue
            run(phase, numbers_of(results), options, env, limit, emit)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, report; the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.pack = options.pack.resolve()
    if options.worker:
        return work(options)
    phases = selected(options.only, options.skip)
    if not phases:
        parser.error("--only and --skip leave no phase")
    results = check(options, phases)
    print(table(results))
    return exit_status(results)


if __name__ == "__main__":
    sys.exit(main())
