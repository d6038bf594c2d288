"""`triptych bench api`: what streaming costs the API process, with a scheduler that is always ahead of it.

No scheduler and no runner: this process gives the tokens over the real link and reads the streams over raw sockets.
What is measured is the API process' own CPU time, which other work on the machine hardly moves.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.bench.api_flood import Flood
from ops.bench.api_prompts import KINDS, LongPrompts, long_request
from ops.bench.api_sample import Sample, Snapshot
from ops.bench.api_streams import StreamFailed, Streams, space_words
from ops.bench.api_vllm import running_vllm
from ops.bench.beside_vllm import add_options, parse, report_of
from ops.bench.processes import log_tail
from ops.bench.serve import Formatter, positive_float, positive_int, write_report
from ops.models import model_and_name
from protocol.messages import Limits
from protocol.settings import ENV_PREFIX

SCHEMA = "triptych.bench.api/1"
STREAMS = (1, 64, 256, 1024)
WINDOW = 4
WARM_UP_STEPS = 10
START_TIMEOUT_S = 60.0
STALL_S = 30.0
CONTEXT = 100_000_000
LONG_TOKENS = 100_000

DEFINITIONS = """definitions:
  one by one   a step gives each stream one token, and the next step comes when all streams have theirs: nothing can
               be put together, so that every token is an event and a write. The hardest case.
  4 at once    the same, with four tokens in a step for each stream.
  flood        steps of one token, up to 4 ahead of what was read: the API is never idle, and may put tokens together.
  vLLM         its API server with its own engine and scheduler, and no model: each step lasts --vllm-step-ms at least;
              with 0 its engine runs ahead, and what has not been sent yet is put together.
  tokens/CPU-s tokens by CPU time (user and system, all threads) of the API process alone. Medians over the rounds.
  tokens/s     the same by the clock. Only under `flood` is the API the bottleneck.
  writes       write calls of the API process, by its own account (/proc/PID/io), per event.
  latency      from the moment a step is handed to the API's link to the arrival of each stream's bytes at the client,
               at a fixed pace; reading the other streams first is in it. Again while another client posts prompts of
              100,000 tokens one after the other, which the scheduler refuses: only the API has work with them.

Exit code: 0 fine, 1 if a stream failed or a --require limit was missed, 2 for wrong options."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's name and tokens, and a prompt of `LONG_TOKENS` of them, as ids and as text."""

    model: str
    size: int
    words: list[int]
    long_ids: list[int]
    long_text: str


@dataclass(frozen=True, slots=True)
class Api:
    """A running API process, and the scheduler it believes in."""

    pid: int
    port: int
    vocabulary: Vocabulary
    flood: Flood


def load_vocabulary(model: str) -> Vocabulary:
    """What can be said with a model's tokenizer so that it can be counted."""
    from services.text.tokenizer import load_tokenizer

    path, name = model_and_name(model)
    tokenizer = load_tokenizer(path)
    words = space_words(tokenizer.token_bytes, tokenizer.vocab_size)
    long_ids = (words * (LONG_TOKENS // len(words) + 1))[:LONG_TOKENS]
    return Vocabulary(name, tokenizer.vocab_size, words, long_ids, tokenizer.decode(long_ids))


@contextmanager
def running_api(model: str, vocabulary: Vocabulary) -> Iterator[Api]:
    """An API process on a free port, told of a scheduler that is this process. StreamFailed if it doesn't start."""
    limits = Limits(vocabulary.model, 16, CONTEXT // 16, CONTEXT, vocabulary.size, 4096, 8192)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as scratch, open(f"{scratch}/log", "w+b") as log:
        flood = Flood(f"ipc://{scratch}/scheduler.sock", vocabulary.words, limits)
        command = [sys.executable, "-m", "ops.cli", "api", "--port", str(port), "--runtime-dir", scratch]
        command += ["--model", model, "--log-level", "warning"]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_listening(process, port, flood, Path(log.name))
            yield Api(process.pid, port, vocabulary, flood)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            flood.close()


def _wait_listening(process: subprocess.Popen[bytes], port: int, flood: Flood, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        flood.turn()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.05)
    raise StreamFailed(f"the API process didn't start; the end of its log:\n{log_tail(log)}")


class Round:
    """All streams of one case open, the steps under way. Ends with every stream complete and as long as it should."""

    def __init__(self, api: Api, count: int) -> None:
        self._api = api
        self._flood = api.flood
        self._count = count
        self._streams = Streams("127.0.0.1", api.port, api.vocabulary.model, count, CONTEXT // 2)
        self._streams.watch(api.flood.descriptor)
        self._moved = time.monotonic()
        self._seen = 0

    def __enter__(self) -> Round:
        while len(self._flood.ids) < self._count:
            self._turn(0.01)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._end()
        self._streams.close()

    def _turn(self, timeout_s: float, arrivals: list[float] | None = None) -> int:
        """Read and answer; how many tokens have arrived in all. StreamFailed if nothing has for long."""
        self._flood.turn()
        self._streams.read(timeout_s, arrivals)
        tokens, now = self._streams.tokens, time.monotonic()
        if tokens != self._seen or len(self._flood.ids) < self._count:
            self._seen, self._moved = tokens, now
        elif now - self._moved > STALL_S:
            raise StreamFailed(f"{tokens} of {self._flood.sent * self._count} tokens arrived, then none")
        return tokens

    def steps(self, steps: int, tokens: int, window: int) -> None:
        """That many steps, never more than `window` of them ahead of the slowest stream's reader."""
        for _ in range(steps):
            self._flood.step(tokens)
            while self._turn(0.001) < (self._flood.sent - (window - 1) * tokens) * self._count:
                pass
        while self._turn(0.001) < self._flood.sent * self._count:
            pass

    def measure(self, seconds: float, tokens: int, window: int) -> Sample:
        """Steps until the API process has used that much CPU time."""
        self.steps(WARM_UP_STEPS, tokens, window)
        per_look = max(1, 2048 // (self._count * tokens))
        first = Snapshot.of(self._api.pid, self._streams)
        while Snapshot.of(self._api.pid, self._streams).cpu_s - first.cpu_s < seconds:
            self.steps(per_look, tokens, window)
        return first.until(Snapshot.of(self._api.pid, self._streams))

    def latencies(self, seconds: float, pace_s: float) -> list[float]:
        """Seconds from each step to each stream's bytes, one step every `pace_s`."""
        self.steps(WARM_UP_STEPS, 1, 1)
        found: list[float] = []
        end = time.perf_counter() + seconds
        due = time.perf_counter()
        while due < end:
            while (left := due - time.perf_counter()) > 0:
                self._turn(left)
            arrivals: list[float] = []
            sent = time.perf_counter()
            self._flood.step(1)
            while self._turn(0.001, arrivals) < self._flood.sent * self._count:
                pass
            found += [arrival - sent for arrival in arrivals]
            due += pace_s
        return found

    def _end(self) -> None:
        expected = self._flood.sent
        self._flood.finish()
        while not all(stream.ended for stream in self._streams.all):
            self._turn(0.01)
        wrong = [stream.tokens for stream in self._streams.all if stream.tokens != expected]
        if wrong:
            raise StreamFailed(f"a stream of {expected} tokens had {wrong[0]} of them")


PEER_CASE = "vLLM"
CASES = {"one by one": (1, 1), "4 at once": (4, 1), "flood": (1, WINDOW)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every case at every number of streams, round after round, then the latency."""
    counts = options.streams or list(STREAMS)
    samples: dict[tuple[str, int], list[Sample]] = {(case, count): [] for count in counts for case in CASES}
    vocabulary = load_vocabulary(options.model)
    with ExitStack() as stack:
        peer = None
        if options.vllm_python:
            vllm = running_vllm(
                options.vllm_python, options.model_dir, vocabulary.words, options.vllm_step_ms, max(counts)
            )
            peer = stack.enter_context(vllm)
        api = stack.enter_context(running_api(options.model, vocabulary))
        for _ in range(options.rounds):
            for case, count in itertools.product(CASES, counts):
                with Round(api, count) as one:
                    samples[case, count].append(one.measure(options.seconds, *CASES[case]))
            if peer is not None:
                for count in counts:
                    sample = peer.measure(count, options.seconds, api.flood.turn)
                    samples.setdefault((PEER_CASE, count), []).append(sample)
        latencies = [measure_latency(api, options, kind) for kind in ("", *KINDS)]
    return {
        "schema": SCHEMA,
        "rounds": options.rounds,
        "cpu_seconds": options.seconds,
        "cases": [summary(case, count, taken) for (case, count), taken in samples.items()],
        "latency_streams": options.latency_streams,
        "pace_ms": options.pace_ms,
        "latencies": latencies,
    }


def measure_latency(api: Api, options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """What a step takes to the client, beside long prompts of a kind; "": without any."""
    known = api.vocabulary
    prompts = LongPrompts("127.0.0.1", api.port, long_request(kind, known.model, known.long_text, known.long_ids))
    with Round(api, options.latency_streams) as one, prompts if kind else nullcontext():
        found: list[float] = []
        while not found or (kind and not prompts.answers):
            found += one.latencies(options.latency_seconds, options.pace_ms / 1000)
    found.sort()
    return {
        "beside": kind,
        "prompts": len(prompts.answers),
        "median_us": statistics.median(found) * 1e6,
        "p99_us": found[int(0.99 * (len(found) - 1))] * 1e6,
        "most_us": found[-1] * 1e6,
    }


def summary(case: str, streams: int, samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians over the rounds of one case."""
    return {
        "case": case,
        "streams": streams,
        "tokens_per_cpu_s": statistics.median(one.tokens / one.cpu_s for one in samples),
        "least": min(one.tokens / one.cpu_s for one in samples),
        "most": max(one.tokens / one.cpu_s for one in samples),
        "tokens_per_s": statistics.median(one.tokens / one.wall_s for one in samples),
        "tokens_per_event": statistics.median(one.tokens / one.events for one in samples),
        "writes_per_event": statistics.median(one.writes / one.events for one in samples),
        "user_us_per_event": statistics.median(one.user_s / one.events * 1e6 for one in samples),
        "system_us_per_event": statistics.median(one.system_s / one.events * 1e6 for one in samples),
        "cpu_share": statistics.median(one.cpu_s / one.wall_s for one in samples),
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for a terminal."""
    titles = ["tokens/CPU-s", "least", "most", "tokens/s", "CPU", "per event:"]
    titles += ["tokens", "writes", "user us", "kernel us"]
    lines = [f"{'streams':>7}  {'tokens come':<12}" + "".join(f"{title:>13}" for title in titles)]
    for row in report["cases"]:
        counts = "".join(f"{row[key]:>13,.0f}" for key in ("tokens_per_cpu_s", "least", "most", "tokens_per_s"))
        lines.append(
            f"{row['streams']:>7}  {row['case']:<12}{counts}{row['cpu_share']:>13.0%}"
            f"{'':>13}{row['tokens_per_event']:>13.2f}{row['writes_per_event']:>13.3f}"
            f"{row['user_us_per_event']:>13.1f}{row['system_us_per_event']:>13.1f}"
        )
    title = f"{report['latency_streams']} streams, a step every {report['pace_ms']:g} ms, to the client's socket (us)"
    lines += ["", f"{title:<66}{'median':>9}{'p99':>9}{'most':>9}"]
    for row in report["latencies"]:
        beside = f"beside {row['prompts']} prompts of {LONG_TOKENS:,} tokens ({row['beside']})"
        lines.append(
            f"  {beside if row['beside'] else 'alone':<64}"
            f"{row['median_us']:>9.0f}{row['p99_us']:>9.0f}{row['most_us']:>9.0f}"
        )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych bench api`."""
    parser = argparse.ArgumentParser(
        prog="triptych bench api",
        description="Streams chat answers out of one API process as fast as it can, and measures what they cost it.",
        epilog=DEFINITIONS,
        formatter_class=Formatter,
    )
    counts = " ".join(map(str, STREAMS))
    parser.add_argument("--streams", type=positive_int, nargs="+", metavar="N", help=f"streams at once ({counts})")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="K", help="rounds of all cases")
    parser.add_argument("--seconds", type=positive_float, default=0.6, metavar="S", help="CPU time of a case's round")
    parser.add_argument("--latency-streams", type=positive_int, default=64, metavar="N", help="streams for latency")
    parser.add_argument("--pace-ms", type=positive_float, default=20.0, metavar="MS", help="a step for latency")
    parser.add_argument("--latency-seconds", type=positive_float, default=3.0, metavar="S", help="length of each")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer and template are used")
    parser.add_argument("--vllm-step-ms", type=float, default=50.0, metavar="MS", help="least time of vLLM's steps")
    parser.add_argument("--require", type=positive_float, metavar="R", help="fail below R tokens/CPU-s at 256 streams")
    add_options(parser, model_dir="vLLM")
    return parser


def main(argv: Sequence[str]) -> int:
    """Parses `argv`, measures, reports; returns the exit code."""
    parser = build_parser()
    options = parse(parser, argv)
    report = report_of(parser, options, run, StreamFailed)
    write_report(report, render(report), options.json)
    slow = [row for row in report["cases"] if row["streams"] == 256 and row["case"] != PEER_CASE]
    slow = [row for row in slow if options.require and row["tokens_per_cpu_s"] < options.require]
    for row in slow:
        problem = f"{row['case']}: {row['tokens_per_cpu_s']:.0f} tokens/CPU-s, {options.require:g} are required"
        print(f"triptych bench api: {problem}", file=sys.stderr)
    return 1 if slow else 0
