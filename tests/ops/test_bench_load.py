"""A run of the load generator: what it asks, how many at once, and how failures are counted."""

from __future__ import annotations

import asyncio
import json

from ops.bench.datasets import RandomDataset, Vocabulary
from ops.bench.http_client import HttpClient
from ops.bench.load import RequestShape, run_load
from tests.ops.http_kit import CHUNKED, Exchange, openai_like, run, sse

SHAPE = RequestShape("/v1/completions", "tiny", ignore_eos=True, extra={"top_k": 3})
WORDS = Vocabulary(10, 1000, text=False)


def dataset(count: int, outputs: int = 3) -> RandomDataset:
    return RandomDataset(count, 5, outputs, 0.0, 0, WORDS, seed=1)


def test_every_way_to_fail_is_counted_by_kind_and_disturbs_no_other_request() -> None:
    served = 0

    async def handler(exchange: Exchange) -> None:
        nonlocal served
        served += 1
        which = served
        if which == 1:
            error = b'{"error": {"message": "queue full", "type": "overloaded", "code": null}}'
            await exchange.send(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(error) + error)
        elif which == 2:
            await exchange.send(CHUNKED)
            await exchange.chunk(sse({"choices": [{"text": "a"}]}))
            exchange.close()
        elif which == 3:
            await exchange.send(CHUNKED)
            await exchange.chunk(sse({"error": {"message": "lost", "code": "engine_dead"}}, "[DONE]"))
            await exchange.send(b"0\r\n\r\n")
        else:
            await openai_like(exchange)

    async def use(url: str) -> None:
        client = HttpClient(url)
        result = await run_load(client, SHAPE, dataset(5), [0.0] * 5, max_in_flight=1)
        assert [record.error for record in result.records] == [
            "http_503",
            "dropped",
            "in_band:engine_dead",
            None,
            None,
        ]
        assert result.records[0].error_message == "overloaded: queue full"
        assert [record.output_tokens for record in result.records[3:]] == [3, 3]
        client.close()

    run(handler, use)


def test_a_stream_that_stops_coming_is_a_timeout_and_its_connection_is_not_used_again() -> None:
    never = asyncio.Event()
    seen: list[int] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange.connection)
        await exchange.send(CHUNKED)
        await exchange.chunk(sse({"choices": [{"text": "a"}]}))
        await never.wait()

    async def use(url: str) -> None:
        client = HttpClient(url)
        result = await run_load(client, SHAPE, dataset(2), [0.0] * 2, max_in_flight=1, timeout_s=0.1)
        assert [record.error for record in result.records] == ["timeout", "timeout"]
        assert seen == [1, 2]
        client.close()
        never.set()

    run(handler, use)


def test_concurrency_is_a_bound_that_is_reached_and_never_passed() -> None:
    in_flight = peak = 0
    full = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        if in_flight == 4:
            full.set()
        await full.wait()
        in_flight -= 1
        await openai_like(exchange)

    async def use(url: str) -> None:
        client = HttpClient(url)
        result = await run_load(client, SHAPE, dataset(12), [0.0] * 12, max_in_flight=4)
        assert all(record.error is None for record in result.records)
        assert (peak, result.peak_in_flight) == (4, 4)
        client.close()

    run(handler, use)


def test_bodies_ask_for_usage_and_carry_the_shape_of_the_run() -> None:
    body = json.loads(SHAPE.body(dataset(1).request(0)))
    assert len(body.pop("prompt")) == 5
    assert body == {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": 3,
    }
    chat = RandomDataset(1, 5, 3, 0.0, 0, Vocabulary(0, 1, text=True), seed=1).request(0)
    messages = json.loads(RequestShape("/v1/chat/completions", "m").body(chat))["messages"]
    assert [message["role"] for message in messages] == ["user"]
    assert len(messages[0]["content"].split()) == 5
