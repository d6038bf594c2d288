"""`triptych replay`: recorded traffic through the serving scheduler on a virtual clock, one preset or several."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from tqdm import tqdm

from ops.bench.serve import Formatter, non_negative_int, positive_float, positive_int
from ops.costs import positive
from ops.replay import report_html, report_text
from ops.replay.compare import compare
from ops.replay.engine import Engine, Observer, Observers, Setup, Stuck
from ops.replay.events import EventLog
from ops.replay.recorder import Recorder
from ops.replay.result import Report, RunResult
from ops.replay.setups import BANDWIDTH_GB_S, COSTS, MODEL, TFLOPS, Pool, setups_of, workload_of
from ops.replay.summary import DEFINITIONS, Objectives, summarise
from ops.replay.workload import Workload
from protocol.settings import SettingError
from runner.config import RunnerConfig
from scheduler.config import BATCH_NAMES, PRESET_NAMES
from scheduler.core import CoreScheduler
from scheduler.costs import NAMED_SHAPES

SHOW_PROGRESS_AFTER_S = 1.0

EPILOG = f"""{DEFINITIONS}

The queue has no length limit here unless --set max_num_queued_reqs=N gives it one: a replay is to show the wait, not
to turn it into errors. All other settings are a scheduler's defaults, two steps in flight included.

Same inputs, same bytes: neither the report nor a decision depends on the machine, the hour or --jobs.
Exit code: 0 fine, 1 if a scheduler class failed, 2 for wrong options or a trace that can't be read."""


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych replay`."""
    default = Pool()
    parser = argparse.ArgumentParser(
        prog="triptych replay",
        description="Replays a trace through the serving scheduler with a cost model in place of the computing.",
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Azure CSV, Mooncake or our own JSON lines; or .gz")

    who = parser.add_argument_group("who schedules")
    who.add_argument(
        "--preset",
        action="append",
        metavar="[NAME=]PRESET",
        help=f"one of {', '.join(PRESET_NAMES)} (triptych); repeat it to compare, the first is compared with",
    )
    who.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[NAME:]KEY=VALUE",
        help="a setting of the scheduler, of all or of one preset (`triptych scheduler --help` lists them)",
    )
    who.add_argument(
        "--scheduler-cls", default="scheduler.core:CoreScheduler", metavar="MODULE:CLASS", help="class that schedules"
    )
    who.add_argument("--batch", choices=BATCH_NAMES, help="what fills a step, instead of the presets' choice")
    who.add_argument(
        "--depth",
        type=positive_int,
        default=1,
        metavar="STEPS",
        help="steps in flight (default: 1, since a virtual clock has no host time to hide; serving has 2)",
    )
    who.add_argument("--seed", type=non_negative_int, default=0, help="of the random queue and of simulated tokens")

    machine = parser.add_argument_group("simulated machine")
    machine.add_argument(
        "--cost", default="linear", metavar="MODEL", help=f"{', '.join(COSTS)}, or a FILE of `triptych calibrate`"
    )
    machine.add_argument(
        "--cost-set", action="append", default=[], metavar="KEY=VALUE", help="a number of the cost model (token_ns=…)"
    )
    machine.add_argument("--model", metavar="NAME", help=f"roofline: {', '.join(NAMED_SHAPES)} ({MODEL})")
    machine.add_argument("--tflops", type=positive, metavar="T", help=f"roofline: TFLOP/s reached ({TFLOPS:g})")
    machine.add_argument("--bandwidth", type=positive, metavar="GB_S", help=f"roofline: memory ({BANDWIDTH_GB_S:g})")
    for flag, unit, text in (
        ("blocks", "N", "KV blocks, the null block not counted"),
        ("block-size", "TOKENS", "tokens per block"),
        ("max-num-seqs", "N", "requests in one step"),
        ("max-num-batched-tokens", "TOKENS", "tokens in one step"),
        ("max-model-len", "TOKENS", "longest prompt plus output; longer rows are dropped"),
    ):
        number = getattr(default, flag.replace("-", "_"))
        machine.add_argument(
            f"--{flag}", type=positive_int, metavar=unit, help=f"{text} ({number}, or the cost file's)"
        )
    swap = RunnerConfig()
    machine.add_argument(
        "--host-blocks", type=non_negative_int, default=0, metavar="N", help="host blocks for swapped-out KV (none)"
    )
    machine.add_argument(
        "--copy-gb-s", type=positive, metavar="GB_S", help="rate of swaps, whose time is added to their step (no time)"
    )
    machine.add_argument(
        "--kv-block-bytes",
        type=positive_int,
        default=swap.sim_kv_bytes_per_block,
        metavar="BYTES",
        help="what a swap copies per block",
    )

    load = parser.add_argument_group("load")
    pace = load.add_mutually_exclusive_group()
    pace.add_argument(
        "--time-scale", type=positive, metavar="X", help="times in the trace times this; 0.5 is twice as fast"
    )
    pace.add_argument("--rate", type=positive, metavar="PER_S", help="stretch the times to this mean rate")
    load.add_argument("--limit", type=positive_int, metavar="N", help="only the first N rows")
    load.add_argument("--until", type=positive_float, metavar="S", help="only what comes before this time, scaled")
    load.add_argument(
        "--repeat", type=positive_int, default=1, metavar="N", help="the trace N times, one after another"
    )
    load.add_argument(
        "--unknown-lengths",
        type=positive_int,
        metavar="MAX_TOKENS",
        help="every request asks for so many outputs, and ends where the record says: the scheduler isn't told",
    )

    out = parser.add_argument_group("report")
    unsaid = Objectives()
    told = "for the scheduler and the report; if not given, the report alone goes by"
    out.add_argument(
        "--slo-ttft", type=positive, metavar="S", help=f"objective for the first token, {told.format(unsaid.ttft_s)}"
    )
    out.add_argument(
        "--slo-tpot",
        type=positive,
        metavar="S",
        help=f"objective for the mean time per token, {told.format(unsaid.tpot_s)}",
    )
    out.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")
    out.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page with charts")
    out.add_argument("--details", action="store_true", help="one JSON row per request too")
    out.add_argument("--events", type=Path, metavar="FILE", help="one preset: write all events as JSON lines")
    out.add_argument("--digest", action="store_true", help="CRC-32 of all decisions, to compare two schedulers")
    out.add_argument("--jobs", type=positive_int, default=1, metavar="N", help="presets at a time, each in a process")
    out.add_argument("--no-progress", action="store_true", help="no progress bar (there is none off a terminal)")
    out.add_argument("--only", metavar="NAME", help=argparse.SUPPRESS)
    return parser


def replay(setup: Setup, workload: Workload, options: argparse.Namespace, *watching: Observer) -> RunResult:
    """Run one setup to its end, under the eyes of the report and of those `watching`.

    Raises Stuck for a scheduler that leaves requests hanging, SettingError for settings that it can't work with or an
    event log that can't be written.
    """
    recorder = Recorder(workload, digest=options.digest)
    with ExitStack() as stack:
        observers: list[Observer] = [recorder, *watching]
        if options.events is not None:
            file = stack.enter_context(_opened(options.events))
            observers.append(EventLog(file, workload))
        observer = Observers(*observers) if len(observers) > 1 else recorder
        try:
            engine = Engine(setup, workload, observer)
        except ValueError as error:
            raise SettingError(f"{setup.name}: {error}") from error
        stack.enter_context(_quiet())
        bar = stack.enter_context(_progress(options, setup.name, len(workload)))
        engine.run(lambda ended: bar.update(ended - bar.n))
    recorder.finish()
    unsaid = Objectives()
    objectives = Objectives(options.slo_ttft or unsaid.ttft_s, options.slo_tpot or unsaid.tpot_s)
    return summarise(recorder, setup, engine.scheduler, engine.limits, objectives, details=options.details)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise SettingError(f"--events: {error}") from error


def replay_in_processes(setups: Sequence[Setup], argv: Sequence[str], options: argparse.Namespace) -> list[RunResult]:
    """The same, each in an interpreter of its own, `--jobs` at a time. Raises what one of them said."""

    def one(setup: Setup) -> RunResult:
        with tempfile.TemporaryDirectory(prefix="triptych-replay-") as folder:
            path = Path(folder) / "report.json"
            command = [sys.executable, "-m", "ops.cli", "replay", *argv, "--no-progress", "--jobs", "1"]
            command += ["--only", setup.name, "--json", str(path)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr.strip().rpartition("\n")[2].removeprefix("triptych replay: ")
                kind = SettingError if done.returncode == 2 else Stuck
                raise kind(said or f"{setup.name}: exit code {done.returncode}")
            return msgspec.json.decode(path.read_bytes(), type=Report).runs[0]

    with ThreadPoolExecutor(options.jobs) as pool, _progress(options, "presets", len(setups), "run") as bar:
        results = []
        for result in pool.map(one, setups):
            results.append(result)
            bar.update()
        return results


@contextmanager
def _quiet() -> Iterator[None]:
    """A scheduler warns of each preemption; here they are counted."""
    logger = logging.getLogger("triptych")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _progress(options: argparse.Namespace, what: str, total: int, unit: str = "req") -> Any:
    # disable=None is tqdm's own test for a terminal.
    return tqdm(
        total=total, desc=what, unit=unit, delay=SHOW_PROGRESS_AFTER_S, disable=True if options.no_progress else None
    )


def run(argv: Sequence[str], options: argparse.Namespace) -> Report:
    """Replay all that the options ask for. Raises SettingError, Stuck."""
    from ops.cli import version

    workload, trace = workload_of(options)
    setups = setups_of(options, workload.vocab_size)
    if options.events is not None and (len(setups) > 1 or not issubclass(setups[0].scheduler_cls, CoreScheduler)):
        raise SettingError("--events: takes one preset, of a scheduler class that builds on CoreScheduler")
    if options.only:
        runs = [replay(setup, workload, options) for setup in setups if setup.name == options.only]
    elif options.jobs > 1 and len(setups) > 1:
        runs = replay_in_processes(setups, argv, options)
    else:
        runs = [replay(setup, workload, options) for setup in setups]
    return Report(trace=trace, runs=runs, words=compare(runs), version=version())


def main(argv: Sequence[str]) -> int:
    """Parses `argv`, replays, reports; returns the exit code."""
    options = build_parser().parse_args(list(argv))
    try:
        report = run(argv, options)
    except SettingError as error:
        print(f"triptych replay: {error}", file=sys.stderr)
        return 2
    except Stuck as error:
        print(f"triptych replay: {error}", file=sys.stderr)
        return 1
    try:
        if options.html is not None and not options.only:
            options.html.write_text(report_html.render(report), encoding="utf-8")
        write(report, options.json)
    except OSError as error:
        print(f"triptych replay: can't write the report: {error}", file=sys.stderr)
        return 1
    return 0


def write(report: Report, destination: str | None) -> None:
    """For "-" JSON to stdout and the table to stderr; else the table to stdout, and JSON to the named file if any."""
    encoded = msgspec.json.encode(report) + b"\n"
    print(report_text.render(report), file=sys.stderr if destination == "-" else sys.stdout)
    if destination == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(encoded)
        sys.stdout.buffer.flush()
    elif destination is not None:
        Path(destination).write_bytes(encoded)
