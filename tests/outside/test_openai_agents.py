"""OpenAI's Agents SDK over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import pytest
from place import MODEL, PARIS, QUESTION, Place

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # it would send traces elsewhere
agents = pytest.importorskip("agents")
import openai  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402

CLIENTS = ("openai-agents", "openai")
APIS = pytest.mark.parametrize("api", ["chat", "responses"])


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


@agents.function_tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def agent(place: Place, api: str, tool_choice: str | None = None, **fields: Any) -> Any:
    """An agent on one of the APIs."""
    client = openai.AsyncOpenAI(base_url=place.base, api_key=place.key, max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    settings = agents.ModelSettings(temperature=0, max_tokens=100, tool_choice=tool_choice)
    return agents.Agent(name="it", model=kind(model=MODEL, openai_client=client), model_settings=settings, **fields)


@APIS
def test_an_agent_answers(server: Place, api: str) -> None:
    result = asyncio.run(agents.Runner.run(agent(server, api), QUESTION))
    assert result.final_output == PARIS and result.context_wrapper.usage.output_tokens == 8


@APIS
def test_an_agent_streams(server: Place, api: str) -> None:
    async def main() -> str:
        result = agents.Runner.run_streamed(agent(server, api), QUESTION)
        deltas = []
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                deltas.append(event.data.delta)
        return "".join(deltas)

    assert asyncio.run(main()) == PARIS


@APIS
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_goes_back(server: Place, api: str, streamed: bool) -> None:
    asked = agent(server, api, tool_choice="required", tools=[get_weather])

    async def main() -> Any:
        if not streamed:
            return await agents.Runner.run(asked, "What will the weather in Rome be?")
        result = agents.Runner.run_streamed(asked, "What will the weather in Rome be?")
        async for _ in result.stream_events():
            pass
        return result

    items = [item.type for item in asyncio.run(main()).new_items]
    assert "tool_call_item" in items and "tool_call_output_item" in items and items[-1] == "message_output_item"


@APIS
def test_a_typed_result_is_an_object(server: Place, api: str) -> None:
    result = asyncio.run(agents.Runner.run(agent(server, api, output_type=Person), "Ada is 36 years old. Who is it?"))
    assert isinstance(result.final_output, Person)


def test_a_conversation_goes_on_after_a_kept_response(server: Place) -> None:
    async def main() -> Any:
        asked = agent(server, "responses")
        first = await agents.Runner.run(asked, QUESTION)
        return await agents.Runner.run(asked, "And of Italy?", previous_response_id=first.last_response_id)

    assert asyncio.run(main()).final_output
