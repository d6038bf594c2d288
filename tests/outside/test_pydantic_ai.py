"""Pydantic AI: agents with tools and typed results over each of the three APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from place import MODEL, PARIS, QUESTION, Place

pydantic_ai = pytest.importorskip("pydantic_ai")
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402
from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput, UsageLimits  # noqa: E402
from pydantic_ai.exceptions import ModelHTTPError  # noqa: E402
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

CLIENTS = ("pydantic-ai-slim", "openai", "anthropic")
SETTINGS: Any = {"temperature": 0, "max_tokens": 200}
APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


def model(place: Place, api: str) -> Any:
    """The model class for one of the APIs."""
    if api == "messages":
        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=place.root, api_key=place.key))
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(MODEL, provider=OpenAIProvider(base_url=place.base, api_key=place.key))


@APIS
def test_an_agent_answers_and_reports_usage(server: Place, api: str) -> None:
    result = asyncio.run(Agent(model(server, api), model_settings=SETTINGS).run(QUESTION))
    assert result.output == PARIS and result.usage.output_tokens == 8


@APIS
def test_an_agent_streams_text(server: Place, api: str) -> None:
    async def main() -> list[str]:
        async with Agent(model(server, api), model_settings=SETTINGS).run_stream(QUESTION) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(main())
    assert "".join(pieces) == PARIS and len(pieces) > 3


@APIS
def test_a_typed_result_comes_by_a_call(server: Place, api: str) -> None:
    agent = Agent(model(server, api), output_type=ToolOutput(Person), model_settings=SETTINGS)
    assert isinstance(asyncio.run(agent.run("Ada is 36 years old. Who is it?")).output, Person)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_typed_result_comes_by_a_schema(server: Place, api: str) -> None:
    agent = Agent(model(server, api), output_type=NativeOutput(Person), model_settings=SETTINGS)
    assert isinstance(asyncio.run(agent.run("Ada is 36 years old. Who is it?")).output, Person)


@APIS
def test_a_tool_is_called_and_the_agent_goes_on_to_a_typed_result(server: Place, api: str) -> None:
    called: list[str] = []

    async def once(_: Any, definition: Any) -> Any:
        return None if called else definition  # a small model would call it for ever

    def look_up(name: Literal["Ada", "Bob"]) -> str:
        """Looks a person up."""
        called.append(name)
        return "Ada is 36 years old."

    agent = Agent(
        model(server, api),
        output_type=ToolOutput(Person),
        tools=[Tool(look_up, prepare=once)],
        model_settings={**SETTINGS, "parallel_tool_calls": False},
    )
    result = asyncio.run(agent.run("Look Ada up.", usage_limits=UsageLimits(request_limit=3)))
    assert isinstance(result.output, Person)


def test_errors_carry_the_status(server: Place, narrow: Place) -> None:
    for api in ("chat", "responses", "messages"):
        with pytest.raises(ModelHTTPError) as raised:
            asyncio.run(Agent(model(server, api)).run("word " * 9000))
        assert raised.value.status_code == 400
        locked = Place(narrow.port, "wrong")
        with pytest.raises(ModelHTTPError) as raised:
            asyncio.run(Agent(model(locked, api)).run(QUESTION))
        assert raised.value.status_code == 401
