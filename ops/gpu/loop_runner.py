"""A runner process with a random model whose recorded steps are timed: what phase `loop` puts under a real scheduler.

Started by that phase. It serves like any runner until it is told to stop, then writes what it saw as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from statistics import median

from ops.gpu.random_model import random_model
from ops.gpu.stepping import ahead, arrival, step
from ops.gpu.timing import MarkedCuda, MarkedDevice, MarkedHost, TimedExecutor, spans_of, steady
from runner.config import RunnerConfig
from runner.cuda.executor import DeviceExecutor
from runner.cuda.library import load_flashinfer
from runner.cuda.load import Builder
from runner.main import run
from runner.pool import PoolSize
from runner.sizing import warm_up
from scheduler.costs import NAMED_SHAPES, ModelShape

PAGE = 16
TINY = ModelShape(2, 64, 2, 1, 64, 96, 400)
SHAPES = {**NAMED_SHAPES, "tiny": TINY}
TRIES = 5


def build(options: argparse.Namespace, config: RunnerConfig, device: MarkedDevice) -> DeviceExecutor:
    """The executor with graphs for the numbers of rows that will be measured, and pages for the largest."""
    module = load_flashinfer() if options.module == "flashinfer" else importlib.import_module(options.module)
    model = random_model(SHAPES[options.shape], options.length, module, device.torch)
    blocks = max(options.rows) * -(-options.length // PAGE)
    blocks += blocks // 20 + 2  # more than the scheduler's watermark keeps free
    return Builder(config, model, device, module).build(PoolSize(blocks, options.length, 0), sorted(options.rows))


def unavoidable_gap(executor: DeviceExecutor, device: MarkedDevice, rows: int) -> float:
    """Seconds between two replays when the next step waits for the device already: what the device does in between."""
    counts = dict.fromkeys(range(rows), 1)
    news = [arrival(row, [1, 2, 3], 1 + 2 * row, 2 * PAGE, PAGE) for row in range(rows)]
    ahead(executor, [step(1, dict.fromkeys(range(rows), 3), arrivals=news), step(2, counts), step(3, counts)])
    gaps = []
    for number in range(TRIES):
        device.hold_up()
        first = len(device.marks)
        ahead(executor, [step(4 + 2 * number, counts), step(5 + 2 * number, counts)])
        (_, ended), (began, _) = spans_of(device.marks[first:])
        gaps.append(began - ended)
    executor.clear()
    return median(gaps)


def serve(options: argparse.Namespace) -> int:
    """Build, measure what no host can avoid, serve, write the report; the runner's exit code."""
    config = RunnerConfig(
        device="cuda" if not options.host else "cpu",
        runtime_dir=options.runtime_dir,
        block_size=PAGE,
        max_num_seqs=max(options.rows),
        max_num_batched_tokens=options.step_tokens,
        max_model_len=options.length,
        log_level="warning",
    )
    device: MarkedDevice = MarkedHost() if options.host else MarkedCuda()
    inner = build(options, config, device)
    warm_up(inner)
    unavoidable = {rows: unavoidable_gap(inner, device, rows) for rows in options.rows}
    device.marks.clear()
    timed = TimedExecutor(inner, device)
    status = run(config, lambda config: timed)  # all else is the runner's own start
    spans = spans_of(device.marks)
    report: dict[str, dict[str, float | str]] = {}
    for rows in options.rows:
        try:
            found = steady(timed.steps, spans, rows)
        except ValueError as error:
            report[str(rows)] = {"error": str(error)}
            continue
        report[str(rows)] = {
            "steps": found.steps,
            "period_ms": found.period * 1e3,
            "gap_us": found.gap * 1e6,
            "unavoidable_us": unavoidable[rows] * 1e6,
            "launch_us": found.launch * 1e6,
            "idle": found.idle(unavoidable[rows]),
        }
    options.out.write_text(json.dumps(report))
    return status


def main() -> int:
    """Parse and serve; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.gpu.loop_runner", description=__doc__)
    parser.add_argument("--runtime-dir", required=True, help="for sockets")
    parser.add_argument("--out", type=Path, required=True, help="where the report is written at the end")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="decode rows that will be measured")
    parser.add_argument("--length", type=int, default=2048, help="longest prompt plus output")
    parser.add_argument("--step-tokens", type=int, default=8192, help="tokens in one step at most")
    parser.add_argument("--module", default="flashinfer", help="flashinfer, or what stands in for it")
    parser.add_argument("--host", action="store_true", help="compute on the CPU")
    return serve(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
