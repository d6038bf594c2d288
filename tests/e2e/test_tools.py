"""Tool calls over the whole chain: the real model is made to call, and the official clients understand what it does."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from harness import Server

from tests.e2e.kit import client_of

MODEL = "smollm2-135m-instruct"
CITIES = ["Paris", "Rome", "Oslo"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ASK: list[Any] = [{"role": "user", "content": "What will the weather in Rome be for the next 3 days?"}]


def check(calls: Any) -> None:
    """All calls of get_weather keep its schema."""
    for call in calls:
        assert call.type == "function" and call.id
        if call.function.name == "get_weather":
            arguments = json.loads(call.function.arguments)
            assert arguments["city"] in CITIES and 1 <= arguments["days"] <= 9 and len(arguments) == 2


@pytest.mark.parametrize(
    ("choice", "names", "seed"),
    [
        ("required", {"get_weather", "now"}, 1),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}, 2),
    ],
)
def test_a_call_that_must_come_comes_and_keeps_its_schema(
    served: Server, choice: Any, names: set[str], seed: int
) -> None:
    answer = client_of(served).chat.completions.create(
        model=MODEL, messages=ASK, tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False,
        temperature=1.5, seed=seed, max_tokens=200,
    )  # fmt: skip
    (found,) = answer.choices
    assert found.finish_reason == "tool_calls" and found.message.content is None
    assert found.message.tool_calls and len(found.message.tool_calls) == 1
    check(found.message.tool_calls)
    assert {call.function.name for call in found.message.tool_calls} <= names  # type: ignore[union-attr]


def test_the_accumulated_stream_has_the_calls_of_the_whole_answer(served: Server) -> None:
    params: Any = {
        "model": MODEL, "messages": ASK, "tools": [WEATHER], "temperature": 0, "max_tokens": 200,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }  # fmt: skip
    client = client_of(served)
    whole = client.chat.completions.create(**params).choices[0]
    with client.chat.completions.stream(**params) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls
    check(whole.message.tool_calls)
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert final.message.content is None and whole.message.content is None

    def said(calls: Any) -> list[tuple[str, str]]:
        return [(call.function.name, call.function.arguments) for call in calls]

    assert said(final.message.tool_calls) == said(whole.message.tool_calls)
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 1


def test_a_result_goes_back_to_the_model_and_it_answers_in_words(served: Server) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            forced: Any = {"type": "function", "function": {"name": "get_weather"}}
            first = await client.chat.completions.create(
                model=MODEL, messages=ASK, tools=[WEATHER], tool_choice=forced, temperature=0, max_tokens=200
            )
            message = first.choices[0].message
            assert message.tool_calls
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 24 degrees"}
            history: Any = [*ASK, message.model_dump(exclude_none=True), result]
            stream = await client.chat.completions.create(
                model=MODEL, messages=history, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=30,
                stream=True,
            )  # fmt: skip
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            assert text.strip()

    asyncio.run(talk())


def test_the_clients_parse_helper_gets_typed_arguments(served: Server) -> None:
    class Look(pydantic.BaseModel):
        city: Literal["Paris", "Rome"]
        metric: bool

    answer = client_of(served).chat.completions.parse(
        model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(Look)], tool_choice="required",
        parallel_tool_calls=False, temperature=0, max_tokens=100,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Look)


def test_strict_tools_leave_the_model_free_to_answer_in_words(served: Server) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = client_of(served).chat.completions.create(
        model=MODEL, messages=ASK, tools=[strict], temperature=0, max_tokens=20
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    check(message.tool_calls or ())


def test_with_tools_an_answer_that_is_no_call_keeps_its_form(served: Server) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "x",
            "schema": {
                "type": "object",
                "properties": {"sunny": {"type": "boolean"}},
                "required": ["sunny"],
                "additionalProperties": False,
            },
        },
    }
    for seed in range(2):
        answer = client_of(served).chat.completions.create(
            model=MODEL, messages=ASK, tools=[WEATHER], parallel_tool_calls=False, response_format=form,
            temperature=1, seed=seed, max_tokens=200,
        )  # fmt: skip
        message = answer.choices[0].message
        if message.tool_calls:
            check(message.tool_calls)
        else:
            assert json.loads(message.content or "").keys() == {"sunny"}
