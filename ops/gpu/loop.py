"""Phase `loop`: the real scheduler and the real runner process in steady decode. Does the device ever wait?

A bare client stands for the API: no HTTP, no text. What is measured is the loop that every token goes round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from ops.gpu.report import Checks, Wrong
from ops.gpu.roofline import IDLE_GOAL
from ops.gpu.setting import Setting
from protocol import wire
from protocol.channels import ClientChannel, new_instance
from protocol.columns import pack_i32, u64
from protocol.messages import (
    Goodbye,
    Hello,
    Outputs,
    RequestStatus,
    SamplingParams,
    SchedulerStatus,
    SchedulerToApi,
    Submit,
)

POLL_MS = 50
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What runs: streams at once, their prompts and outputs in tokens."""

    shape: str = "llama-3-8b"
    streams: tuple[int, ...] = (64, 256)
    prompt: int = 512
    output: int = 400
    step_tokens: int = 8192
    start_s: float = 60.0


FULL, SMALL = Sizes(), Sizes("tiny", (3,), 20, 40, 64)


def run(checks: Checks, setting: Setting, sizes: Sizes = FULL) -> None:
    """Start both processes, drive each number of streams, stop them, read what the runner saw."""
    report: dict[str, Any] = {}
    with checks.attempt("scheduler and runner serve") as found, tempfile.TemporaryDirectory(prefix="gc-") as place:
        out = Path(place) / "report.json"
        with processes(setting, sizes, place, out) as client:
            began = time.monotonic()
            client.wait_ready(min(sizes.start_s, checks.left_s))
            found.numbers["start_s"] = time.monotonic() - began
            for streams in sizes.streams:
                rate = client.drive(streams, sizes.prompt, sizes.output, checks.left_s - STOP_S)
                found.numbers[f"tokens_per_s_{streams}"] = rate
        found.need(out.is_file(), "the runner left no report")
        report = json.loads(out.read_text())
    tell(checks, report)


def tell(checks: Checks, report: dict[str, dict[str, Any]]) -> None:
    """The runner's report, a result for each number of streams."""
    for rows, numbers in report.items():
        if "error" in numbers:
            with checks.attempt(f"steady decode, {rows} streams"):
                raise Wrong(numbers["error"])
        else:
            idle = numbers.pop("idle")
            checks.goal(f"device idle, {rows} streams", idle, IDLE_GOAL, most=True, **numbers)


@contextmanager
def processes(setting: Setting, sizes: Sizes, place: str, out: Path) -> Iterator[Client]:
    """A client of a scheduler over the timed runner; both are stopped in the end, the runner first."""
    runner = [sys.executable, "-m", "ops.gpu.loop_runner", "--runtime-dir", place, "--out", str(out)]
    runner += ["--shape", sizes.shape, "--rows", *map(str, sizes.streams), "--module", setting.module.__name__]
    runner += ["--length", str(sizes.prompt + sizes.output + 1), "--step-tokens", str(sizes.step_tokens)]
    runner += [] if setting.on_gpu else ["--host"]
    scheduler = [sys.executable, "-m", "ops.cli", "scheduler", "--runtime-dir", place, "--log-level", "warning"]
    scheduler += ["--max-num-seqs", str(max(sizes.streams))]
    os.chmod(place, 0o700)
    children: list[subprocess.Popen[bytes]] = []
    context: zmq.Context[Any] = zmq.Context()
    client = Client(context, f"ipc://{place}/scheduler.sock", children)
    try:
        for words in (runner, scheduler):
            children.append(subprocess.Popen(words, stdout=sys.stderr))
        yield client
    finally:
        client.close()
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            try:
                child.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        context.term()


class Client:
    """What an API process is to a scheduler, reduced to requests and their tokens."""

    def __init__(self, context: zmq.Context[Any], address: str, children: list[subprocess.Popen[bytes]]) -> None:
        instance = new_instance()

        def hello() -> Hello:
            return Hello("api", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, instance)

        self._channel: ClientChannel[Any] = ClientChannel(context, address, SchedulerToApi, hello)
        self._children = children
        self._next_id = 1
        self._runner = ""

    def close(self) -> None:
        """Say goodbye."""
        self._channel.leave(Goodbye("shutdown", "done"))
        self._channel.close()

    def wait_ready(self, limit_s: float) -> None:
        """Until the scheduler says that its runner is ready. Wrong if that takes too long."""
        ends = time.monotonic() + limit_s
        while self._runner != "ready":
            self._turn(ends, "the runner is not ready")

    def drive(self, streams: int, prompt: int, output: int, limit_s: float) -> float:
        """Run so many requests at once to their end; tokens per second from the last first token to the first end.

        Wrong if one fails, or all together take too long.
        """
        ends, vocabulary = time.monotonic() + limit_s, 300
        params = SamplingParams(output, temperature=0.0, ignore_eos=True, seed=1)
        open_ids = set(range(self._next_id, self._next_id + streams))
        self._next_id += streams
        for request in open_ids:  # no two prompts share a block
            tokens = pack_i32([1 + (request + index * (1 + request % 7)) % vocabulary for index in range(prompt)])
            self._channel.send(Submit(request, tokens, params, arrival_ns=time.time_ns()))
        started: set[int] = set()
        began, counted, rate = 0.0, 0, 0.0
        while open_ids:
            for outputs in self._turn(ends, f"{len(open_ids)} of {streams} streams have not ended"):
                now, ids = time.monotonic(), u64(outputs.ids).tolist()
                if began and not rate:
                    counted += len(ids)
                started.update(ids)
                if not began and len(started) == streams:
                    began = now
                for rejected in outputs.rejected:
                    raise Wrong(f"a request was refused: {rejected.message}")
                for finished in outputs.finished:
                    if finished.status != RequestStatus.LENGTH:
                        raise Wrong(f"a request ended as {finished.status.name}: {finished.message}")
                    open_ids.discard(finished.id)
                    if began and not rate and now > began:
                        rate = counted / (now - began)
        return rate

    def _turn(self, ends: float, what: str) -> list[Outputs]:
        """Wait a moment for messages. Wrong, in these words, if the time is over or a process has ended."""
        for child in self._children:
            if child.poll() is not None:
                raise Wrong(f"process {child.pid} ended with status {child.returncode}")
        if time.monotonic() > ends:
            raise Wrong(f"{what} in time")
        self._channel.tick()
        self._channel.socket.poll(POLL_MS)
        messages = self._channel.receive()
        for message in messages:
            if isinstance(message, SchedulerStatus):
                self._runner = message.runner
        return [message for message in messages if isinstance(message, Outputs)]
