"""LangChain's ChatAnthropic."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from place import MODEL, PARIS, QUESTION, Place, full_until_refused

langchain_anthropic = pytest.importorskip("langchain_anthropic")
import anthropic  # noqa: E402
from langchain_core.exceptions import ContextOverflowError  # noqa: E402
from langchain_core.messages import HumanMessage, SystemMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402

CLIENTS = ("langchain-anthropic", "langchain-core", "anthropic")


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chat(place: Place, **changes: Any) -> Any:
    """The chat model as its documentation makes it."""
    fields = {
        "model": MODEL,
        "base_url": place.root,
        "api_key": place.key,
        "temperature": 0,
        "max_tokens": 200,
        "max_retries": 0,
    }
    return langchain_anthropic.ChatAnthropic(**{**fields, **changes})


def test_invoke_stream_batch_and_async_say_the_same(server: Place) -> None:
    model = chat(server)
    answer = model.invoke(QUESTION)
    assert answer.usage_metadata["output_tokens"] == 8
    texts = [answer.text, "".join(chunk.text for chunk in model.stream(QUESTION))]
    texts += [each.text for each in model.batch([QUESTION] * 2)]

    async def others() -> list[str]:
        whole = await model.ainvoke(QUESTION)
        return [whole.text, "".join([chunk.text async for chunk in model.astream(QUESTION)])]

    assert texts + asyncio.run(others()) == [PARIS] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_bound_tools_are_called_and_their_results_are_taken(server: Place, stream: bool) -> None:
    model = chat(server)
    bound = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    asked = [SystemMessage("You know the weather."), HumanMessage("What will the weather in Rome be?")]
    answer: Any = None
    for chunk in bound.stream(asked) if stream else [bound.invoke(asked)]:
        answer = chunk if answer is None else answer + chunk
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome", "Oslo")
    again = model.bind_tools([get_weather]).invoke([*asked, answer, get_weather.invoke(call)])
    assert again.text or again.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(server: Place, method: str) -> None:
    shaped = chat(server).with_structured_output(Person, method=method)
    assert isinstance(shaped.invoke("Ada is 36 years old. Who is it?"), Person)


def test_system_blocks_with_cache_control_and_token_counts(server: Place) -> None:
    system = SystemMessage([{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    model = chat(server)
    assert model.invoke([system, HumanMessage(QUESTION)]).text
    assert model.get_num_tokens_from_messages([HumanMessage(QUESTION)]) > 5


def test_errors_are_those_of_the_client(server: Place, narrow: Place) -> None:
    with pytest.raises(ContextOverflowError):
        chat(server).invoke("word " * 9000)
    with pytest.raises(anthropic.AuthenticationError):
        chat(narrow, api_key="wrong").invoke(QUESTION)
    with pytest.raises(anthropic.NotFoundError):
        chat(server, model="absent").invoke(QUESTION)


def test_retries_bridge_an_overload(narrow: Place) -> None:
    with full_until_refused(narrow):
        assert chat(narrow, max_retries=5, max_tokens=5).invoke(QUESTION).usage_metadata["output_tokens"] == 5
