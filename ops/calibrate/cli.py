"""`triptych calibrate`: loads a running server, fits a cost model to its steps, and says how far it can be trusted."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from tqdm import tqdm

from ops.bench.http_client import HttpClient
from ops.bench.serve import BenchError, Formatter, api_headers, positive_float, positive_int, wait_ready
from ops.calibrate.fit import Fit, FitError, Samples, fit, predict
from ops.calibrate.scatter import Panel, page
from ops.calibrate.steps import StepReader, StepsError, find_runtime_dir
from ops.calibrate.sweep import BATCHES, PROMPTS, Measured, Run, Sweep, SweepError, plan
from protocol.messages import Limits
from runner.step_costs import MeasuredCost

READY_TIMEOUT_S = 10.0
BAR = "{l_bar}{bar}| {n:.0f}/{total:.0f} s"

DEFINITIONS = """definitions:
  step      ns = fixed + token·T + context·C + row·R, or max(fixed, token·T) + context·C + row·R, whichever predicts
            better: T tokens computed, C tokens in the KV of the step's R rows afterwards.
  error     mean absolute error over the mean step, on every fourth run, which the fit hasn't seen; p90: nine in ten
            steps are predicted closer than this. Steps that were disturbed are left out of the fit, not of the error.
  pause     from the end of a step to the start of the next, where that waited already: added to each step.
  delivery  what a first token takes beside its steps on an idle server, from the HTTP client to the runner and back.

It needs the server's private directory, where the runner tells its steps; run it beside nothing else.
Exit code: 0 fine, 1 if the server can't be measured, 2 for wrong options."""


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych calibrate`."""
    parser = argparse.ArgumentParser(
        prog="triptych calibrate",
        description="Measures the steps of a running server and writes the cost model for `triptych replay --cost`.",
        epilog=DEFINITIONS,
        formatter_class=Formatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address, without the /v1 path")
    parser.add_argument("--runtime-dir", metavar="DIR", help="its private directory; the newest `triptych serve`'s")
    parser.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the API key")
    parser.add_argument("--seconds", type=positive_float, default=45.0, metavar="S", help="how long to load it")
    parser.add_argument(
        "--max-batch", type=positive_int, default=BATCHES[-1], metavar="N", help="largest number of requests at once"
    )
    parser.add_argument(
        "--max-prompt", type=positive_int, default=PROMPTS[-1], metavar="TOKENS", help="longest prompt of the sweep"
    )
    parser.add_argument("--out", type=Path, default=Path("cost.json"), metavar="FILE", help="where the model goes")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also a page with the plot")
    parser.add_argument("--seed", type=int, help="of prompts and order (default: the clock)")
    return parser


async def measure(options: argparse.Namespace, runtime_dir: str) -> tuple[Measured, Limits]:
    """Probe, then sweep. Raises BenchError, StepsError or SweepError if the server can't be measured."""
    client = HttpClient(options.url, api_headers(options.api_key_env), clock=time.monotonic)
    try:
        model = await wait_ready(client, READY_TIMEOUT_S)
        seed = time.time_ns() % 2**31 if options.seed is None else options.seed
        sweep = Sweep(client, model, StepReader(runtime_dir), seed)
        runs = plan(
            sweep.limits,
            [batch for batch in BATCHES if batch <= options.max_batch],
            [prompt for prompt in PROMPTS if prompt <= options.max_prompt] or [options.max_prompt],
        )
        if not runs:
            raise SweepError("no request of the sweep fits the server; lower --max-prompt")
        await sweep.probe()
        with tqdm(total=options.seconds, disable=None, bar_format=BAR) as bar:

            def on_run(run: Run, left: float) -> None:
                bar.set_description(f"{run.batch} x {run.prompt} tokens")
                bar.update(options.seconds - left - bar.n)

            await sweep.whole(runs, options.seconds, on_run)
        return sweep.measured, sweep.limits
    finally:
        client.close()


def to_cost(found: Fit, measured: Measured, limits: Limits) -> MeasuredCost:
    """What goes into the file."""
    return MeasuredCost(
        fixed_ns=found.cost.fixed_ns,
        token_ns=found.cost.token_ns,
        context_ns=found.cost.context_ns,
        row_ns=found.cost.row_ns,
        overlap=found.cost.overlap,
        steps=found.steps,
        error=found.error,
        error_p90=found.error_p90,
        model=limits.model,
        dtype=limits.dtype,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        pause_ns=measured.pause_ns(),
        delivery_ns=measured.delivery_ns(),
    )


def render(cost: MeasuredCost, found: Fit, samples: Samples) -> str:
    """The model, its error, and measured against predicted by size of step."""
    join = "max(fixed, token·T)" if cost.overlap else "fixed + token·T"
    lines = [
        f"{cost.model} ({cost.dtype}), {cost.steps:,} steps; {found.trimmed:.1%} were disturbed",
        f"a step takes {join} + context·C + row·R",
        f"  fixed      {cost.fixed_ns / 1e6:10.3f} ms",
        f"  token      {cost.token_ns / 1e3:10.3f} us",
        f"  context    {cost.context_ns:10.3f} ns",
        f"  row        {cost.row_ns / 1e3:10.3f} us",
        f"  pause      {cost.pause_ns / 1e3:10.3f} us",
        f"  delivery   {cost.delivery_ns / 1e6:10.3f} ms",
        f"error on runs that the fit hasn't seen: {cost.error:.1%} of the mean step, p90 {cost.error_p90:.1%}",
        "",
        f"{'tokens':>12}{'rows':>8}{'steps':>8}{'measured ms':>14}{'predicted ms':>14}{'off':>9}",
    ]
    return "\n".join([*lines, *_by_size(samples, predict(found.cost, samples))])


def _by_size(samples: Samples, predicted: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[str]:
    """Lines by powers of two of the tokens, decodes alone apart from steps with prefill; medians."""
    lines = []
    decode = samples.tokens == samples.rows
    for kind in (True, False):
        of_kind = decode == kind
        for power in range(18):
            chosen = of_kind & (samples.tokens >= 2**power) & (samples.tokens < 2 ** (power + 1))
            if chosen.any():
                ms, guess = (float(np.median(ns[chosen])) / 1e6 for ns in (samples.ns, predicted))
                span = f"{int(samples.tokens[chosen].min())}-{int(samples.tokens[chosen].max())}"
                rows = f"{int(samples.rows[chosen].min())}-{int(samples.rows[chosen].max())}"
                steps = int(chosen.sum())
                lines.append(f"{span:>12}{rows:>8}{steps:>8}{ms:>14.2f}{guess:>14.2f}{guess / ms - 1:>+9.1%}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Parses `argv`, measures, fits, writes; returns the exit code."""
    options = build_parser().parse_args(list(argv))
    try:
        runtime_dir = find_runtime_dir(options.runtime_dir, os.environ)
        measured, limits = uvloop.run(measure(options, runtime_dir))
        samples = measured.samples
        found = fit(samples)
    except (BenchError, StepsError, SweepError, FitError, ValueError) as error:
        print(f"triptych calibrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    cost = to_cost(found, measured, limits)
    text = render(cost, found, samples)
    print(text)
    try:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(cost), indent=1) + b"\n")
        if options.page:
            panel = Panel("Steps", "ms", (samples.ns / 1e6).tolist(), (predict(found.cost, samples) / 1e6).tolist())
            options.page.write_text(page(f"Steps of {limits.model}", text, [panel]), encoding="utf-8")
    except OSError as error:
        print(f"triptych calibrate: {error}", file=sys.stderr)
        return 1
    print(f"\nwritten to {options.out}")
    return 0
