"""`triptych bench pipeline`: what the three processes let through, when the runner itself is ideal.

The runner is the simulated one: every step takes the same time and gives each stream one token, so `streams` times
steps per second is all that can arrive at a client. What is missing from that was lost in scheduling, links and HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from ops.bench.datasets import RandomDataset, Vocabulary
from ops.bench.http_client import HttpClient
from ops.bench.load import LoadResult, RequestShape, run_load
from ops.bench.openai_stream import RequestRecord
from ops.bench.processes import System, SystemFailed, cpu_seconds, system
from ops.bench.serve import BenchError, Formatter, positive_float, positive_int, wait_ready, write_report

SCHEMA = "triptych.bench.pipeline/1"
BLOCK_TOKENS = 16
FIRST_TOKEN_ID = 1000  # above special ids, which would stream as empty text
SAMPLE_INTERVAL_S = 0.25
SETTLE_S = 1.0

DEFINITIONS = """definitions:
  allowed     streams x 1000 / step time: the tokens per second that the steps can give.
  streamed    tokens per second at the HTTP client, from the moment when all streams have had their first chunk to the
              moment when the first one ends, counted by the running usage in each chunk.
  CPU         user and system time of each process in that window, per streamed token and as a share of one core.
  idle        the same share over --idle seconds without any request, after the load.

Exit code: 0 fine, 1 if a stream failed or a --require limit was missed, 2 for wrong options."""


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU seconds by process at a time of the load generator's clock."""

    at: float
    seconds: Mapping[str, float]


class MeasurementError(Exception):
    """The run gave nothing to measure; the message says why."""


def tokens_between(record: RequestRecord, start: float, end: float) -> int:
    """Tokens of one stream that arrived in (start, end], by the running usage of its chunks."""

    def tokens_at(moment: float) -> int:
        chunks = bisect_right(record.chunk_times, moment)
        return record.chunk_tokens[chunks - 1] if chunks else 0

    return tokens_at(end) - tokens_at(start)


def steady_window(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """From the last stream's first chunk to the first stream's end. MeasurementError if there is no such time."""
    failed = [record for record in records if record.error is not None or not record.chunk_times]
    if failed:
        raise MeasurementError(
            f"{len(failed)} of {len(records)} streams failed; the first: {failed[0].error}: {failed[0].error_message}"
        )
    start = max(record.chunk_times[0] for record in records)
    end = min(record.finished_at for record in records)
    if end <= start:
        raise MeasurementError(
            "the first stream ended before the last one began; use more --seconds or fewer --streams"
        )
    return start, end


def cpu_window(samples: Sequence[CpuSample], start: float, end: float) -> tuple[CpuSample, CpuSample]:
    """The outermost two samples inside [start, end]. Raises MeasurementError if there are less than two."""
    times = [sample.at for sample in samples]
    first, last = bisect_left(times, start), bisect_right(times, end) - 1
    if last <= first:
        raise MeasurementError("the steady part is too short to sample CPU times; use more --seconds")
    return samples[first], samples[last]


def build_report(
    result: LoadResult, samples: Sequence[CpuSample], *, streams: int, step_ms: float, idle: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The report as JSON-ready values. Raises MeasurementError if the run has no steady part."""
    start, end = steady_window(result.records)
    allowed = streams * 1000 / step_ms
    streamed = sum(tokens_between(record, start, end) for record in result.records) / (end - start)
    before, after = cpu_window(samples, start, end)
    span = after.at - before.at
    tokens = sum(tokens_between(record, before.at, after.at) for record in result.records)
    cpu = {
        name: {
            "us_per_token": (after.seconds[name] - before.seconds[name]) / tokens * 1e6,
            "percent_of_core": (after.seconds[name] - before.seconds[name]) / span * 100,
        }
        for name in after.seconds
    }
    chunks = sum(len(record.chunk_times) for record in result.records)
    output_tokens = sum(record.output_tokens for record in result.records)
    return {
        "schema": SCHEMA,
        "streams": streams,
        "step_ms": step_ms,
        "allowed_tokens_per_s": allowed,
        "streamed_tokens_per_s": streamed,
        "ratio": streamed / allowed,
        "window_s": end - start,
        "output_tokens": output_tokens,
        "tokens_per_chunk": output_tokens / chunks,
        "whole_run_tokens_per_s": output_tokens / result.duration_s,
        "cpu": cpu,
        "idle": idle,
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for a terminal."""
    lines = [
        f"{report['streams']} streams, {report['step_ms']:g} ms a step, steady for {report['window_s']:.1f} s",
        f"{'allowed by the steps (tok/s)':<34}{report['allowed_tokens_per_s']:>12.0f}",
        f"{'streamed to the client (tok/s)':<34}{report['streamed_tokens_per_s']:>12.0f}",
        f"{'ratio':<34}{report['ratio']:>12.1%}",
        f"{'tokens per chunk':<34}{report['tokens_per_chunk']:>12.2f}",
        "",
        f"{'CPU':<14}{'us per token':>16}{'% of a core':>16}",
    ]
    lines += [f"{n:<14}{c['us_per_token']:>16.2f}{c['percent_of_core']:>16.1f}" for n, c in report["cpu"].items()]
    if idle := report["idle"]:
        parts = ", ".join(f"{name} {share:.2f}" for name, share in idle["percent_of_core"].items())
        lines += ["", f"idle for {idle['seconds']:g} s: {idle['total_percent']:.2f} % of a core in all ({parts})"]
    return "\n".join(lines)


def serve_arguments(streams: int, step_ms: float, prompt_len: int, output_len: int) -> list[str]:
    """Flags of `triptych serve` for a simulated runner that holds all streams at once."""
    length = prompt_len + output_len
    blocks = streams * (-(-length // BLOCK_TOKENS) + 1) + 1
    options = {
        "backend": "sim",
        "sim-step-ms": step_ms,
        "sim-first-token-id": FIRST_TOKEN_ID,
        "sim-max-model-len": length + BLOCK_TOKENS,
        "sim-num-blocks": int(blocks * 1.1) + 1,  # more than the watermark keeps free
        "block-size": BLOCK_TOKENS,
        "max-num-seqs": streams,
        "log-level": "warning",
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


async def load(running: System, streams: int, prompt_len: int, output_len: int) -> tuple[LoadResult, list[CpuSample]]:
    """Runs all streams to their end while sampling CPU times; this process counts as `client`."""
    client = HttpClient(running.base_url)
    samples: list[CpuSample] = []

    async def sample() -> None:
        while True:
            samples.append(CpuSample(time.perf_counter(), running.cpu_seconds() | {"client": time.process_time()}))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    sampler = asyncio.create_task(sample())
    try:
        running_usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        shape = RequestShape("/v1/completions", await wait_ready(client, 10.0), ignore_eos=True, extra=running_usage)
        dataset = RandomDataset(
            streams, prompt_len, output_len, 0.0, 0, Vocabulary(FIRST_TOKEN_ID, 30_000, text=False), seed=0
        )
        result = await run_load(client, shape, dataset, [0.0] * streams)
        if sampler.done():
            await sampler  # it ends early only because a process was gone
        return result, samples
    finally:
        sampler.cancel()
        client.close()


def measure_idle(running: System, seconds: float) -> dict[str, Any]:
    """CPU shares over `seconds` without requests, after a moment to settle."""
    time.sleep(SETTLE_S)
    start, before, supervisor = time.perf_counter(), running.cpu_seconds(), cpu_seconds(running.supervisor)
    time.sleep(seconds)
    span, after = time.perf_counter() - start, running.cpu_seconds()
    shares = {role: (after[role] - before[role]) / span * 100 for role in after}
    return {
        "seconds": span,
        "percent_of_core": shares,
        "total_percent": sum(shares.values()),
        "supervisor_percent": (cpu_seconds(running.supervisor) - supervisor) / span * 100,
    }


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych bench pipeline`."""
    parser = argparse.ArgumentParser(
        prog="triptych bench pipeline",
        description="Starts the three processes with a simulated runner and measures what reaches an HTTP client.",
        epilog=DEFINITIONS,
        formatter_class=Formatter,
    )
    parser.add_argument("--streams", type=positive_int, default=256, help="streams at once")
    parser.add_argument("--step-ms", type=positive_float, default=10.0, metavar="MS", help="time of a simulated step")
    parser.add_argument("--seconds", type=positive_float, default=10.0, metavar="S", help="length of each stream")
    parser.add_argument("--prompt-len", type=positive_int, default=16, metavar="TOKENS", help="prompt tokens")
    parser.add_argument("--idle", type=positive_float, metavar="S", help="also measure idle CPU for so long")
    parser.add_argument("--require-ratio", type=positive_float, metavar="R", help="fail below this streamed / allowed")
    parser.add_argument("--require-idle", type=positive_float, metavar="PERCENT", help="fail above this idle share")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Starts the system, measures, stops it; the report. Raises SystemFailed, MeasurementError or BenchError."""
    output_len = max(2, round(options.seconds * 1000 / options.step_ms))
    arguments = serve_arguments(options.streams, options.step_ms, options.prompt_len, output_len)
    with system(arguments) as running:
        result, samples = uvloop.run(load(running, options.streams, options.prompt_len, output_len))
        idle = measure_idle(running, options.idle) if options.idle else None
    return build_report(result, samples, streams=options.streams, step_ms=options.step_ms, idle=idle)


def missed(report: Mapping[str, Any], min_ratio: float | None, max_idle: float | None) -> list[str]:
    """The required limits that the report misses, in words."""
    problems = []
    if min_ratio is not None and report["ratio"] < min_ratio:
        problems.append(f"ratio {report['ratio']:.3f} is below the required {min_ratio:g}")
    if max_idle is not None and report["idle"]["total_percent"] > max_idle:
        problems.append(f"idle share {report['idle']['total_percent']:.2f} % is above the required {max_idle:g} %")
    return problems


def main(argv: Sequence[str]) -> int:
    """Parses `argv`, measures, reports; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(list(argv))
    if options.require_idle is not None and options.idle is None:
        parser.error("--require-idle needs --idle")
    try:
        report = run(options)
    except (SystemFailed, MeasurementError, BenchError) as error:
        print(f"triptych bench pipeline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    write_report(report, render(report), options.json)
    problems = missed(report, options.require_ratio, options.require_idle)
    for problem in problems:
        print(f"triptych bench pipeline: {problem}", file=sys.stderr)
    return 1 if problems else 0
