"""`triptych bench serve`: options, readiness, warm-up, the measured run, and where the report goes."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from tqdm import tqdm

from ops.bench import report as reports
from ops.bench.datasets import Dataset, RandomDataset, TraceDataset, Vocabulary, arrival_times
from ops.bench.http_client import HttpClient, HttpError
from ops.bench.load import ENDPOINTS, LoadResult, RequestShape, http_error_message, run_load
from ops.traces import TraceError, read_trace

DEFINITIONS = """definitions:
  TTFT   from sending a request to its first chunk with output; a chunk with just a role or empty text has none.
  E2E    from sending a request to the last chunk (output or finish reason).
  TPOT   (E2E - TTFT) / (n - 1), n = completion tokens of the server's usage; requests of one token have none.
  ITL    gap between neighbouring chunks with output; each gap weighs 1 however many tokens the chunk held
         ("tokens per chunk" tells how many; where it isn't near 1, TPOT is the number per token).
  Send delay   how much later than planned a request was sent: the concurrency limit, or this process being too slow.
  Throughput counts complete answers only, tokens by the server's usage, over the time from first send to last answer.
  Goodput      complete answers that keep every limit, per second.

The API key is read from an environment variable, never from the command line, where other users could see it.
Exit code: 0 if any request completed, 1 if none did or the server can't be reached, 2 for wrong options."""


class BenchError(Exception):
    """The run can't start; the message is for the person at the terminal."""


def positive_int(text: str) -> int:
    """argparse type: an integer of 1 or more."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def non_negative_int(text: str) -> int:
    """argparse type: an integer of 0 or more."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive_float(text: str) -> float:
    """argparse type: a number above 0; `inf` is allowed."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def ratio(text: str) -> float:
    """argparse type: a number in [0, 1)."""
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def slo(text: str) -> tuple[str, float]:
    """argparse type: `metric:milliseconds`."""
    name, separator, limit = text.partition(":")
    if not separator or name not in reports.SLO_METRICS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(reports.SLO_METRICS)} with `:milliseconds`"
        )
    return name, positive_float(limit)


def percentile_list(text: str) -> tuple[float, ...]:
    """argparse type: comma-separated percentiles, each in [0, 100]."""
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} holds a value outside [0, 100]")
    return values


def json_object(text: str) -> dict[str, Any]:
    """argparse type: a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych bench serve`."""
    parser = argparse.ArgumentParser(
        prog="triptych bench serve",
        description="Drives an OpenAI-compatible server with streaming requests and reports latency and throughput.",
        epilog=DEFINITIONS,
        formatter_class=Formatter,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="address without the /v1 path")
    server.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="path that requests go to")
    server.add_argument("--model", help="model id; the first of /v1/models if not given")
    server.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the API key")
    server.add_argument("--ready-timeout", type=float, default=60, metavar="S", help="wait so long for /v1/models")
    server.add_argument("--request-timeout", type=positive_float, default=3600, metavar="S", help="limit per request")

    data = parser.add_argument_group("dataset")
    data.add_argument("--dataset", choices=("random", "trace"), default="random", help="where lengths come from")
    data.add_argument("--num-requests", type=positive_int, help="how many to send; 100, or the whole trace")
    data.add_argument("--prompt-kind", choices=("ids", "text"), help="token ids, or words; ids unless chatting")
    data.add_argument("--input-len", type=positive_int, default=128, metavar="TOKENS", help="random: prompt length")
    data.add_argument("--output-len", type=positive_int, default=128, metavar="TOKENS", help="random: max_tokens")
    data.add_argument("--range-ratio", type=ratio, default=0.0, metavar="R", help="random: uniform in [n(1-R), n(1+R)]")
    data.add_argument("--prefix-len", type=non_negative_int, default=0, metavar="TOKENS", help="random: shared prefix")
    data.add_argument("--token-low", type=non_negative_int, default=1000, help="smallest prompt token id")
    data.add_argument("--token-high", type=positive_int, default=30000, help="largest prompt token id plus 1")
    data.add_argument("--trace", type=Path, metavar="FILE", help="Azure CSV or Mooncake JSON lines, .gz or not")
    data.add_argument("--time-scale", type=positive_float, default=1.0, help="trace: times this; 0.5 is twice as fast")
    data.add_argument("--max-input-len", type=positive_int, metavar="TOKENS", help="trace: clip longer prompts")
    data.add_argument("--max-output-len", type=positive_int, metavar="TOKENS", help="trace: clip longer answers")
    data.add_argument("--seed", type=non_negative_int, default=0, help="of prompts, lengths and arrivals")

    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=positive_float, metavar="PER_S", help="arrivals per second; inf: at once")
    load.add_argument("--burstiness", type=positive_float, default=1.0, help="gamma shape; 1: Poisson, <1: bursts")
    load.add_argument(
        "--concurrency", type=positive_int, metavar="N", help="most requests in flight; no limit if unset"
    )
    load.add_argument("--warmup", type=non_negative_int, default=0, metavar="N", help="requests sent before, uncounted")
    load.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    load.add_argument("--ignore-eos", action="store_true", help="always produce the whole output length")
    load.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="merged into each body")

    out = parser.add_argument_group("report")
    out.add_argument("--percentiles", type=percentile_list, default=(90.0, 99.0), metavar="P,P", help="of each latency")
    out.add_argument("--goodput", type=slo, nargs="+", default=[], metavar="METRIC:MS", help="ttft, tpot, e2el limits")
    out.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")
    out.add_argument("--details", action="store_true", help="one JSON row per request too")
    out.add_argument("--no-progress", action="store_true", help="no progress bar (there is none off a terminal)")
    return parser


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults in the help, the definitions as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], {}) or action.default is argparse.SUPPRESS:
            return action.help
        return super()._get_help_string(action)


def build_dataset(options: argparse.Namespace) -> Dataset:
    """The dataset that the options name. Raises BenchError for options that don't fit together or a bad trace."""
    chat = options.endpoint == ENDPOINTS[1]
    if chat and options.prompt_kind == "ids":
        raise BenchError("--prompt-kind ids needs --endpoint /v1/completions: a chat message is text")
    if options.token_low >= options.token_high:
        raise BenchError(f"--token-low {options.token_low} is not below --token-high {options.token_high}")
    vocabulary = Vocabulary(options.token_low, options.token_high, text=chat or options.prompt_kind == "text")
    if options.dataset == "random":
        return RandomDataset(
            options.num_requests or 100,
            options.input_len,
            options.output_len,
            options.range_ratio,
            options.prefix_len,
            vocabulary,
            options.seed,
        )
    if options.trace is None:
        raise BenchError("--dataset trace needs --trace FILE")
    try:
        rows = read_trace(options.trace, limit=options.num_requests, time_scale=options.time_scale)
    except (OSError, TraceError) as error:
        raise BenchError(f"--trace: {error}") from error
    return TraceDataset(rows, vocabulary, options.seed, options.max_input_len, options.max_output_len)


def plan_arrivals(options: argparse.Namespace, dataset: Dataset) -> list[float]:
    """When each request is due (seconds): a given rate, else the trace's own times, else all at once."""
    if options.request_rate is None and isinstance(dataset, TraceDataset):
        return [row.at_s for row in dataset.rows]
    rate = options.request_rate or math.inf
    return list(map(float, arrival_times(len(dataset), rate, options.burstiness, options.seed)))


async def wait_ready(client: HttpClient, timeout_s: float) -> str:
    """Waits until /v1/models answers and returns the first model id. Raises BenchError with the last problem."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            response = await client.request("GET", "/v1/models")
            if response.status == 200:
                return str(msgspec.json.decode(response.body)["data"][0]["id"])
            problem = f"HTTP {response.status}: {http_error_message(response.body)}"
            final = response.status in (401, 403)
        except HttpError as error:
            problem, final = str(error), False
        except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
            problem, final = f"not a model list: {error!r}", True
        if final or time.monotonic() >= deadline:
            raise BenchError(f"the server is not ready: GET /v1/models: {problem}")
        await asyncio.sleep(0.25)


def api_headers(variable: str) -> dict[str, str]:
    """The Authorization header if the environment variable holds a key."""
    key = os.environ.get(variable)
    return {"Authorization": f"Bearer {key}"} if key else {}


async def measure(options: argparse.Namespace, dataset: Dataset) -> LoadResult:
    """Waits for the server, warms it up, and runs the load."""
    client = HttpClient(options.base_url, api_headers(options.api_key_env))
    try:
        first_model = await wait_ready(client, options.ready_timeout)
        options.model = options.model or first_model
        shape = RequestShape(
            options.endpoint, options.model, options.temperature, options.ignore_eos, extra=options.extra_body
        )
        await warm_up(client, shape, dataset, options)
        with _progress(options, "requests", len(dataset)) as bar:
            return await run_load(
                client,
                shape,
                dataset,
                plan_arrivals(options, dataset),
                max_in_flight=options.concurrency,
                timeout_s=options.request_timeout,
                on_done=lambda record: bar.update(),
            )
    finally:
        client.close()


async def warm_up(client: HttpClient, shape: RequestShape, dataset: Dataset, options: argparse.Namespace) -> None:
    """Sends the warm-up requests. Their prompts differ from the measured ones: no prefix gets cached for those."""
    if not options.warmup:
        return
    assert isinstance(dataset, RandomDataset | TraceDataset)
    other = replace(dataset, seed=dataset.seed + 1_000_003)
    with _progress(options, "warm-up", options.warmup) as bar:
        result = await run_load(
            client,
            shape,
            other,
            [0.0] * options.warmup,
            max_in_flight=options.concurrency or 16,
            timeout_s=options.request_timeout,
            on_done=lambda record: bar.update(),
        )
    if all(record.error is not None for record in result.records):
        failed = result.records[0]
        raise BenchError(f"all {options.warmup} warm-up requests failed: {failed.error}: {failed.error_message}")


def _progress(options: argparse.Namespace, what: str, total: int) -> Any:
    # disable=None is tqdm's own test for a terminal.
    return tqdm(total=total, desc=what, unit="req", disable=True if options.no_progress else None)


def main(argv: Sequence[str]) -> int:
    """Parses `argv`, runs, reports; returns the exit code."""
    options = build_parser().parse_args(list(argv))
    try:
        dataset = build_dataset(options)
    except BenchError as error:
        print(f"triptych bench serve: {error}", file=sys.stderr)
        return 2
    try:
        result = uvloop.run(measure(options, dataset))
    except (BenchError, ValueError) as error:
        print(f"triptych bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    config: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    config["goodput"] = dict(options.goodput)
    report = reports.build_report(
        result, percentiles=options.percentiles, slos=config["goodput"], config=_finite(config)
    )
    if options.details:
        report["requests"] = reports.details(result)
    write_report(report, reports.render(report), options.json)
    return 0 if report["completed"] else 1


def write_report(report: dict[str, Any], text: str, destination: str | None) -> None:
    """For "-" JSON to stdout and the table to stderr; else the table to stdout, and JSON to the named file if any."""
    encoded = json.dumps(report, indent=2, allow_nan=False)
    if destination == "-":
        print(text, file=sys.stderr)
        print(encoded)
        return
    print(text)
    if destination is not None:
        Path(destination).write_text(encoded + "\n", encoding="utf-8")


def _finite(config: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: an infinite rate or burstiness becomes the word."""
    return {name: "inf" if isinstance(value, float) and math.isinf(value) else value for name, value in config.items()}
