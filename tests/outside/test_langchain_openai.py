"""LangChain's ChatOpenAI, by both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from place import MODEL, PARIS, QUESTION, Place, full, full_until_refused, wait_until

langchain_openai = pytest.importorskip("langchain_openai")
import openai  # noqa: E402
from langchain_core.exceptions import ContextOverflowError  # noqa: E402
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402

CLIENTS = ("langchain-openai", "langchain-core", "openai")


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"], days: int = 1) -> str:
    """The weather of a city for some days."""
    return f"sunny in {city} for {days}"


def chat(place: Place, **changes: Any) -> Any:
    """The chat model as its documentation makes it."""
    fields = {
        "model": MODEL,
        "base_url": place.base,
        "api_key": place.key,
        "temperature": 0,
        "max_tokens": 100,
        "max_retries": 0,
    }
    return langchain_openai.ChatOpenAI(**{**fields, **changes})


BOTH_APIS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


@BOTH_APIS
def test_invoke_answers_with_text_and_usage(server: Place, responses: bool) -> None:
    answer = chat(server, use_responses_api=responses).invoke(QUESTION)
    assert answer.text == PARIS
    usage = answer.usage_metadata
    assert usage["output_tokens"] == 8 and usage["total_tokens"] == usage["input_tokens"] + 8
    assert answer.response_metadata["model_name"] == MODEL


@BOTH_APIS
def test_stream_gives_pieces_that_add_up_with_usage(server: Place, responses: bool) -> None:
    chunks = list(chat(server, use_responses_api=responses, stream_usage=True).stream(QUESTION))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    assert joined.text == PARIS and joined.usage_metadata["output_tokens"] == 8
    assert len([chunk for chunk in chunks if chunk.text]) > 3


@BOTH_APIS
def test_batch_answers_many_at_once(server: Place, responses: bool) -> None:
    assert [a.text for a in chat(server, use_responses_api=responses).batch([QUESTION] * 4)] == [PARIS] * 4


def test_async_calls_by_both_apis_say_the_same(server: Place) -> None:
    async def main() -> list[str]:
        texts = []
        for responses in (False, True):
            model = chat(server, use_responses_api=responses)
            whole = await asyncio.gather(*[model.ainvoke(QUESTION) for _ in range(3)])
            texts.append("".join([chunk.text async for chunk in model.astream(QUESTION)]))
            texts += [answer.text for answer in [*whole, *await model.abatch([QUESTION, QUESTION])]]
        return texts

    assert asyncio.run(main()) == [PARIS] * 12


@BOTH_APIS
@pytest.mark.parametrize("choice", ["required", "any", "get_weather"])
def test_bound_tools_that_must_be_called_are_and_their_results_are_taken(
    server: Place, responses: bool, choice: str
) -> None:
    model = chat(server, use_responses_api=responses)
    bound = model.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    asked = [SystemMessage("You know the weather."), HumanMessage("What will the weather in Rome be?")]
    answer = bound.invoke(asked)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome", "Oslo")
    assert not answer.invalid_tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    again = model.bind_tools([get_weather], tool_choice="none").invoke([*asked, answer, result])
    assert again.text and not again.tool_calls


@BOTH_APIS
def test_streamed_tool_calls_join(server: Place, responses: bool) -> None:
    bound = chat(server, use_responses_api=responses).bind_tools([get_weather], tool_choice="required")
    joined: Any = None
    for chunk in bound.stream("What will the weather in Rome be?"):
        joined = chunk if joined is None else joined + chunk
    assert joined.tool_calls and joined.tool_calls[0]["args"]["city"] in ("Paris", "Rome", "Oslo")


@BOTH_APIS
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [None, True])
def test_structured_output_is_an_object_of_the_class(
    server: Place, responses: bool, method: str, strict: bool | None
) -> None:
    model = chat(server, use_responses_api=responses, max_tokens=200)
    shaped = model.with_structured_output(Person, method=method, strict=strict)
    person = shaped.invoke("Ada is 36 years old. Who is it?")
    assert isinstance(person, Person)


def test_json_mode_is_an_object(server: Place) -> None:
    shaped = chat(server, max_tokens=400, temperature=0, seed=1).with_structured_output(None, method="json_mode")
    raw = shaped.with_config({}).invoke("Answer in JSON with the key capital: the capital of France?")
    assert isinstance(raw, dict)


def test_streamed_structured_output_grows_to_the_whole(server: Place) -> None:
    shaped = chat(server, max_tokens=200).with_structured_output(Person.model_json_schema(), method="json_schema")
    pieces = list(shaped.stream("Ada is 36 years old. Who is it?"))
    assert set(pieces[-1]) == {"name", "age"}


def test_logprobs_stop_n_and_seed_reach_the_model(server: Place) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]
    assert chat(server, stop=["Paris"]).invoke(QUESTION).text == PARIS.partition("Paris")[0]
    drawn = chat(server, temperature=1.5, seed=7, n=2).generate([[HumanMessage(QUESTION)]])
    assert len(drawn.generations[0]) == 2


def test_vllm_extras_go_in_the_extra_body(server: Place) -> None:
    answer = chat(server, extra_body={"min_tokens": 20, "ignore_eos": True}, max_tokens=20).invoke(QUESTION)
    assert answer.usage_metadata["output_tokens"] == 20


@BOTH_APIS
def test_a_prompt_that_is_too_long_is_a_context_overflow(server: Place, responses: bool) -> None:
    with pytest.raises(ContextOverflowError):
        chat(server, use_responses_api=responses).invoke("word " * 9000)


def test_errors_are_those_of_the_openai_client(server: Place, narrow: Place) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(narrow, api_key="wrong").invoke(QUESTION)
    with pytest.raises(openai.NotFoundError):
        chat(server, model="absent").invoke(QUESTION)
    with full(narrow), pytest.raises(openai.InternalServerError):
        chat(narrow).invoke(QUESTION)


def test_retries_bridge_a_full_queue(narrow: Place) -> None:
    with full_until_refused(narrow):
        assert chat(narrow, max_retries=5, max_tokens=5).invoke(QUESTION).usage_metadata["output_tokens"] == 5


def test_a_cancelled_async_stream_ends_the_request_at_the_server(narrow: Place) -> None:
    model = chat(narrow, max_tokens=1500, extra_body={"ignore_eos": True})

    async def leave() -> None:
        async for _ in model.astream(QUESTION):
            break

    asyncio.run(leave())
    wait_until(lambda: narrow.live() == (0, 0), "the request to end")


def test_the_older_completion_class(server: Place) -> None:
    model = langchain_openai.OpenAI(model=MODEL, base_url=server.base, api_key="none", temperature=0, max_tokens=5)
    whole = model.invoke("The capital of France is")
    assert whole and whole == "".join(model.stream("The capital of France is"))
    assert len(model.batch(["The sea is", "The sky is"])) == 2
