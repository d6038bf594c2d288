"""`triptych bench fidelity`: plays a trace against three real processes and in a replay, and compares the times."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from ops.bench.datasets import TraceDataset, Vocabulary
from ops.bench.http_client import HttpClient
from ops.bench.load import LoadResult, RequestShape, run_load
from ops.bench.processes import System, SystemFailed, system
from ops.bench.serve import BenchError, Formatter, positive_float, positive_int, wait_ready, write_report
from ops.calibrate import cli as calibrate
from ops.calibrate.fit import FitError, fit
from ops.calibrate.scatter import page
from ops.calibrate.steps import StepReader, StepsError
from ops.calibrate.sweep import FIRST_TOKEN_ID, Sweep, SweepError, plan
from ops.replay.fidelity import Fidelity, compare, observe, panels, predict, render, servable
from ops.replay.setups import settings_of
from ops.traces import TraceError, TraceRow, read_trace
from protocol.messages import Limits
from protocol.settings import SettingError, specs, to_text
from runner.config import RunnerConfig
from runner.sim import sim_cost
from runner.step_costs import MeasuredCost, StepCost, read_measured
from scheduler.config import PRESET_NAMES, SchedulerConfig
from scheduler.process import load_scheduler_class

VOCABULARY = Vocabulary(FIRST_TOKEN_ID, 30_000, text=False)

DEFINITIONS = """definitions:
  sim        the runner is simulated with a linear cost; the replay has the same cost. What differs is the clock and
             the sockets: three processes, HTTP, a client.
  model      the runner computes the real model; the replay has a cost model that was fitted to the same server just
             before (see `triptych calibrate`), or that of --cost.
  delivery   what a first token takes beside its steps: measured with lone requests before the trace, added to the
             predicted TTFT.
  off        predicted mean over measured mean, less one; typical: median over requests of |predicted/measured - 1|.

Both sides run the same rows with the same scheduler settings; recorded priorities and cancellations are left out.
Exit code: 0 fine, 1 if a run failed or --within was missed, 2 for wrong options."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the real side gave: its limits, the cost model that describes it, delivery time in ns, the answers."""

    rows: Sequence[TraceRow]
    limits: Limits
    cost: StepCost
    delivery_ns: float
    load: LoadResult


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych bench fidelity`."""
    parser = argparse.ArgumentParser(
        prog="triptych bench fidelity",
        description="Compares a replay with real processes on the same requests.",
        epilog=DEFINITIONS,
        formatter_class=Formatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Azure CSV, Mooncake or our own JSON lines; or .gz")
    parser.add_argument("--backend", choices=("sim", "model"), default="sim", help="what computes on the real side")
    parser.add_argument("--preset", choices=PRESET_NAMES, default="triptych", help="of the scheduler, on both sides")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the scheduler")

    load = parser.add_argument_group("load")
    load.add_argument("--limit", type=positive_int, default=200, metavar="N", help="only the first N rows")
    load.add_argument(
        "--time-scale", type=positive_float, default=1.0, metavar="X", help="times in the trace times this"
    )
    load.add_argument("--max-input", type=positive_int, metavar="TOKENS", help="cut prompts to this")
    load.add_argument("--max-output", type=positive_int, metavar="TOKENS", help="cut outputs to this")
    load.add_argument("--seed", type=int, default=0, help="of the prompts")

    sim = parser.add_argument_group("sim")
    sim.add_argument("--step-ms", type=positive_float, default=5.5, metavar="MS", help="fixed cost of a step")
    sim.add_argument("--token-us", type=float, default=40.0, metavar="US", help="cost of a computed token")
    sim.add_argument("--context-ns", type=float, default=44.0, metavar="NS", help="cost of an attended token")
    sim.add_argument("--row-us", type=float, default=2.0, metavar="US", help="cost of a row")
    sim.add_argument("--no-overlap", action="store_true", help="fixed and token cost add up")

    model = parser.add_argument_group("model")
    model.add_argument("--model", help="name or path; as for `triptych serve`")
    model.add_argument("--cost", type=Path, metavar="FILE", help="a cost model instead of calibrating")
    model.add_argument("--calibrate-s", type=positive_float, default=45.0, metavar="S", help="how long to calibrate")
    model.add_argument(
        "--serve", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server (dtype=float32)"
    )

    out = parser.add_argument_group("report")
    out.add_argument(
        "--within", type=positive_float, metavar="PERCENT", help="fail if mean TTFT or TPOT is off by more"
    )
    out.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")
    out.add_argument("--html", type=Path, metavar="FILE", help="write a page with the plots")
    return parser


def sim_config(options: argparse.Namespace) -> RunnerConfig:
    """The simulated runner that the options describe."""
    return RunnerConfig(
        backend="sim",
        sim_step_ms=options.step_ms,
        sim_token_us=options.token_us,
        sim_context_ns=options.context_ns,
        sim_row_us=options.row_us,
        sim_overlap=not options.no_overlap,
        sim_first_token_id=FIRST_TOKEN_ID,
    )


def serve_arguments(options: argparse.Namespace, settings: dict[str, Any]) -> list[str]:
    """Flags of the `triptych serve` that is measured."""
    flags = {"--preset": options.preset, "--log-level": "warning"}
    if options.backend == "sim":
        known = specs(RunnerConfig)
        wanted = sim_config(options)
        flags |= {
            spec.flag: to_text(spec, getattr(wanted, name))
            for name, spec in known.items()
            if spec.kind is not bool and getattr(wanted, name) != spec.default
        }
    elif options.model:
        flags["--model"] = options.model
    flags |= {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()}
    words = [word for pair in flags.items() for word in pair]
    if options.backend == "sim" and not options.no_overlap:
        words.append("--sim-overlap")
    for argument in options.serve:
        name, _, value = argument.partition("=")
        words += [f"--{name.replace('_', '-')}", value]
    return words


async def measure(options: argparse.Namespace, running: System, recorded: Sequence[TraceRow]) -> Observation:
    """Probes, calibrates where that is asked for, and plays the trace."""
    client = HttpClient(running.base_url, clock=time.monotonic)
    try:
        name = await wait_ready(client, 10.0)
        sweep = Sweep(client, name, StepReader(running.runtime_dir), time.time_ns() % 2**31)
        await sweep.probe()
        delivery = sweep.measured.delivery_ns()
        cost: StepCost
        if options.backend == "sim":
            cost = sim_cost(sim_config(options))
        elif options.cost:
            cost = read_measured(options.cost)
        else:
            await sweep.whole(plan(sweep.limits), options.calibrate_s)
            found = fit(sweep.measured.samples)
            cost = calibrate.to_cost(found, sweep.measured, sweep.limits)
            print(calibrate.render(cost, found, sweep.measured.samples), end="\n\n", file=sys.stderr)
        rows = servable(recorded, sweep.limits, options.max_input or 0, options.max_output or 0)
        if not rows:
            raise BenchError(f"{options.trace}: no row fits a context of {sweep.limits.max_model_len} tokens")
        result = await run_load(
            client,
            RequestShape("/v1/completions", name, ignore_eos=True),
            TraceDataset(rows, VOCABULARY, options.seed),
            [row.at_s for row in rows],
            clock=time.monotonic,
        )
        return Observation(rows, sweep.limits, cost, delivery, result)
    finally:
        client.close()


def run(options: argparse.Namespace) -> Fidelity:
    """Both sides of one trace. Raises SettingError, SystemFailed, BenchError, SweepError, StepsError, FitError."""
    settings = settings_of(options.set, ["served"])["served"]
    config = SchedulerConfig(**{**settings, "preset": options.preset})
    recorded = read_trace(options.trace, limit=options.limit, time_scale=options.time_scale)
    with system(serve_arguments(options, settings)) as running:
        seen = uvloop.run(measure(options, running, recorded))
    scheduler_cls = load_scheduler_class(config.scheduler_cls)
    predicted = predict(seen.rows, seen.limits, seen.cost, config, scheduler_cls, seen.delivery_ns)
    measured = observe(seen.load.records)
    notes: dict[str, float | int | str] = {
        "trace": f"{options.trace.name}, {len(seen.rows)} requests over {seen.rows[-1].at_s:.1f} s",
        "backend": f"{options.backend}, preset {options.preset}",
        "delivery": f"{seen.delivery_ns / 1e6:.2f} ms",
        "most in flight": seen.load.peak_in_flight,
    }
    if isinstance(seen.cost, MeasuredCost):
        notes["cost model"] = f"{seen.cost.steps} steps, error {seen.cost.error:.1%}, p90 {seen.cost.error_p90:.1%}"
    failed = len(seen.rows) - len(measured)
    return compare(predicted, measured, delivery_s=seen.delivery_ns / 1e9, failed=failed, notes=notes)


def missed(found: Fidelity, within: float | None) -> list[str]:
    """What is off by more than `within` percent, in words."""
    if within is None:
        return []
    pairs = (("mean TTFT", found.ttft), ("mean TPOT", found.tpot))
    return [
        f"{name} is off by {metric.off:+.1%}, allowed are {within:g} %"
        for name, metric in pairs
        if abs(metric.off) * 100 > within
    ]


def main(argv: Sequence[str]) -> int:
    """Parses `argv`, runs both sides, reports; returns the exit code."""
    options = build_parser().parse_args(list(argv))
    try:
        found = run(options)
    except (SettingError, TraceError, OSError) as error:
        print(f"triptych bench fidelity: {error}", file=sys.stderr)
        return 1 if isinstance(error, StepsError) else 2
    except (SystemFailed, BenchError, SweepError, FitError, ValueError) as error:
        print(f"triptych bench fidelity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    text = render(found)
    write_report(msgspec.to_builtins(found), text, options.json)
    if options.html:
        options.html.write_text(page("Predicted against measured", text, panels(found)), encoding="utf-8")
    problems = missed(found, options.within)
    for problem in problems:
        print(f"triptych bench fidelity: {problem}", file=sys.stderr)
    return 1 if problems else 0
