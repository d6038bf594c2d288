"""Sends planned requests at their times and records what came back. Knows nothing of statistics or of the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ops.bench.datasets import Dataset, PlannedRequest
from ops.bench.http_client import Clock, HttpClient, HttpError
from ops.bench.openai_stream import RequestRecord, StreamReader, error_code

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What all requests of a run have in common. `extra` is merged into each body last."""

    endpoint: str
    model: str
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, planned: PlannedRequest) -> bytes:
        """The JSON body of one streaming request that asks for usage."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": planned.output_tokens,
            "temperature": self.temperature,
        }
        if self.endpoint == "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": planned.prompt}]
        else:
            body["prompt"] = planned.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | dict(self.extra))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Records in the order of their index, and the span (seconds) from the first send to the last answer's end."""

    records: list[RequestRecord]
    duration_s: float
    peak_in_flight: int


async def send_one(
    client: HttpClient,
    shape: RequestShape,
    planned: PlannedRequest,
    record: RequestRecord,
    timeout_s: float,
    clock: Clock,
) -> None:
    """Sends one request and fills `record`; every failure ends up in the record, none is raised."""
    reader = StreamReader(record)
    body = shape.body(planned)
    record.sent_at = record.finished_at = clock()
    try:
        async with asyncio.timeout(timeout_s):
            response = await client.request("POST", shape.endpoint, body, sink=reader)
    except TimeoutError:
        record.fail("timeout", f"no complete answer in {timeout_s:g} s")
    except HttpError as error:
        record.fail(error.kind, str(error))
    else:
        if response.status == 200:
            reader.close()
        else:
            record.fail(f"http_{response.status}", http_error_message(response.body))


async def run_load(
    client: HttpClient,
    shape: RequestShape,
    dataset: Dataset,
    due: Sequence[float],
    *,
    max_in_flight: int | None = None,
    timeout_s: float = 3600.0,
    clock: Clock = time.perf_counter,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> LoadResult:
    """Sends request i at `due[i]` seconds from now (ascending), with at most `max_in_flight` at once (None: no bound).

    A request that is late, because the bound holds it or this process can't keep up, is sent as soon as possible, and
    its record's `planned_at` still says when it was due.
    """
    slots = asyncio.Semaphore(max_in_flight or max(1, len(due)))
    records = [RequestRecord(index) for index in range(len(due))]
    in_flight = peak = 0
    start = clock()

    async def one(record: RequestRecord, planned: PlannedRequest) -> None:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        try:
            await send_one(client, shape, planned, record, timeout_s, clock)
        finally:
            in_flight -= 1
            slots.release()
        on_done(record)

    async with asyncio.TaskGroup() as tasks:
        for record in records:
            record.planned_at = start + due[record.index]
            planned = dataset.request(record.index)
            if (wait := record.planned_at - clock()) > 0:
                await asyncio.sleep(wait)
            await slots.acquire()
            tasks.create_task(one(record, planned))
    end = clock()
    first_send = min((record.sent_at for record in records), default=start)
    return LoadResult(records, end - first_send, peak)


def http_error_message(body: bytes) -> str:
    """A person's line out of an error body: `code: message` for OpenAI's shape, else the start of the body."""
    try:
        error = msgspec.json.decode(body)["error"]
        return f"{error_code(error)}: {error['message']}"
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
