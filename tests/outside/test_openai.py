"""The official openai client where it is trying: retries, timeouts, cancelled streams, helpers."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from place import MODEL, PARIS, QUESTION, USER, Place, full, full_until_refused, wait_until

openai = pytest.importorskip("openai")
from pydantic import BaseModel, Field  # noqa: E402

CLIENTS = ("openai",)
ENDLESS: dict[str, Any] = {"model": MODEL, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]


def client(place: Place, kind: Any = None, **changes: Any) -> Any:
    """The client, without retries unless they are asked for."""
    fields: dict[str, Any] = {"base_url": place.base, "api_key": place.key, "max_retries": 0, "timeout": 60}
    return (kind or openai.OpenAI)(**{**fields, **changes})


def idle(place: Place) -> None:
    """Wait until nothing is left at the server."""
    wait_until(lambda: place.live() == (0, 0), "the requests to end")


def test_a_503_is_retried_after_the_time_that_the_server_names(narrow: Place) -> None:
    with full(narrow), pytest.raises(openai.InternalServerError) as raised:
        client(narrow).completions.create(model=MODEL, prompt="x")
    assert raised.value.status_code == 503 and int(raised.value.response.headers["retry-after"]) >= 1
    with full_until_refused(narrow):
        answer = client(narrow, max_retries=5).chat.completions.create(model=MODEL, messages=USER, max_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_a_stream_is_retried_before_it_begins(narrow: Place) -> None:
    with full_until_refused(narrow):
        stream = client(narrow, max_retries=5).chat.completions.create(
            model=MODEL, messages=USER, max_tokens=5, stream=True
        )
        assert list(stream)[-1].choices[0].finish_reason == "length"


def test_a_timeout_ends_the_request_at_the_server(narrow: Place) -> None:
    with pytest.raises(openai.APITimeoutError):
        client(narrow, timeout=0.5).completions.create(prompt="x", **ENDLESS)
    idle(narrow)


def test_a_stream_that_is_left_ends_the_request_at_the_server(narrow: Place) -> None:
    with client(narrow).completions.create(prompt="x", stream=True, **ENDLESS) as stream:
        next(iter(stream))
    idle(narrow)


def test_cancelled_async_streams_end_their_requests_at_the_server(server: Place) -> None:
    async def main() -> None:
        async with client(server, openai.AsyncOpenAI) as asked:
            started = asyncio.Semaphore(0)

            async def read() -> None:
                stream = await asked.chat.completions.create(messages=USER, stream=True, **ENDLESS)
                async for _ in stream:
                    started.release()

            tasks = [asyncio.create_task(read()) for _ in range(8)]
            for _ in tasks:
                await started.acquire()
            for task in tasks[:7]:
                task.cancel()
            done = await asyncio.gather(*tasks[:7], return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in done)
            assert not tasks[7].done(), "its neighbour goes on"
            tasks[7].cancel()

    asyncio.run(main())
    idle(server)


def test_the_streaming_helper_follows_chunks_to_a_parsed_object(server: Place) -> None:
    with client(server).chat.completions.stream(
        model=MODEL, messages=USER, response_format=Person, temperature=0, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Person)


def test_the_streaming_helper_follows_tool_calls(server: Place) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    with client(server).chat.completions.stream(
        model=MODEL, messages=USER, tools=tools, tool_choice="required", temperature=0, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert all(isinstance(call.function.parsed_arguments, GetWeather) for call in message.tool_calls)


def test_responses_are_parsed_followed_up_and_deleted(server: Place) -> None:
    asked = client(server).responses
    parsed = asked.parse(model=MODEL, input=QUESTION, text_format=Person, temperature=0, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Person)
    first = asked.create(model=MODEL, input=QUESTION, temperature=0)
    second = asked.create(model=MODEL, input="And of Italy?", previous_response_id=first.id, max_output_tokens=20)
    assert first.output_text == PARIS and second.previous_response_id == first.id
    assert [item.type for item in asked.input_items.list(second.id)].count("message") == 3
    asked.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        asked.retrieve(first.id)


def test_raw_and_streaming_responses_carry_the_request_id(server: Place) -> None:
    raw = client(server).chat.completions.with_raw_response.create(model=MODEL, messages=USER, max_tokens=1)
    assert raw.headers["x-request-id"] and raw.parse()._request_id == raw.headers["x-request-id"]
    with client(server).chat.completions.with_streaming_response.create(
        model=MODEL, messages=USER, max_tokens=4, stream=True
    ) as streaming:
        lines = [line for line in streaming.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and json.loads(lines[0].removeprefix("data: "))["id"]


def test_forty_at_once_on_one_connection_pool_are_all_answered(server: Place) -> None:
    async def main() -> list[str]:
        async with client(server, openai.AsyncOpenAI, timeout=200) as asked:
            calls = [
                asked.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=20)
                for _ in range(40)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == [PARIS] * 40


def test_models_are_listed_and_retrieved(server: Place) -> None:
    models = client(server).models
    assert MODEL in [model.id for model in models.list()] and models.retrieve(MODEL).object == "model"
