"""Fields of /v1/responses beside the conversation: log-probabilities, truncation, effort, and what only comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from services.errors import invalid
from services.responses.truncate import droppable, fitted
from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import ANSWER, MODEL, Service

LOGPROBS: Any = ["message.output_text.logprobs"]


def ask(service: Service, **fields: Any) -> Any:
    return service.client.responses.create(**{"model": MODEL, "input": "Where is Paris?", **fields})


def prompt(service: Service) -> str:
    assert service.scheduler is not None
    return service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]), skip_special_tokens=False)


def test_log_probabilities_come_with_the_text_and_whole_and_streamed_are_the_same(service: Service) -> None:
    whole = ask(service, include=LOGPROBS, top_logprobs=2)
    assert whole.top_logprobs == 2
    entries = whole.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == ANSWER
    assert len(entries) == whole.usage.output_tokens and {len(entry.top_logprobs) for entry in entries} == {2}
    with service.client.responses.stream(
        model=MODEL, input="Where is Paris?", include=LOGPROBS, top_logprobs=2
    ) as stream:
        events: list[Any] = list(stream)
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries[: len(streamed)]]
    final: Any = events[-1]
    assert final.response.output[0].content[0].logprobs == entries
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.logprob for entry in done.logprobs] == [entry.logprob for entry in entries]
    assert ask(service, top_logprobs=1).output[0].content[0].logprobs != []
    assert ask(service, include=LOGPROBS).output[0].content[0].logprobs[0].top_logprobs == []
    assert ask(service).output[0].content[0].logprobs == []


def test_log_probabilities_of_calls_are_nowhere(service: Service) -> None:
    service.say('I look. <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    tools: Any = [{"type": "function", "name": "now"}]
    message, call = ask(service, tools=tools, include=LOGPROBS).output
    text = b"".join(bytes(entry.bytes) for entry in message.content[0].logprobs).decode()
    assert call.type == "function_call" and text.startswith("I look.") and "arguments" not in text


def test_a_conversation_that_is_too_long_is_cut_from_its_beginning_if_that_is_wanted(service: Service) -> None:
    turns = [{"role": "user", "content": f"turn-{n} " + "word " * 200} for n in range(20)]
    items: Any = [{"role": "system", "content": "Be brief."}, *turns]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(service, input=items)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    response = ask(service, input=items, truncation="auto", max_output_tokens=100)
    assert (response.truncation, response.output_text) == ("auto", ANSWER)
    shown = prompt(service)
    kept = [n for n in range(20) if f"turn-{n} " in shown]
    assert "Be brief." in shown and kept == list(range(kept[0], 20)) and len(kept) > 1
    one_more = [items[0], *items[kept[0] :]]
    with pytest.raises(openai.BadRequestError):
        ask(service, input=one_more, max_output_tokens=100)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(service, input=[*items, {"role": "user", "content": "word " * 3000}], truncation="auto")
    assert refused.value.code == "context_length_exceeded"


def test_what_belongs_together_goes_together() -> None:
    items: list[Any] = [
        {"type": "message", "role": "user"},
        {"type": "reasoning"},
        {"type": "function_call", "call_id": "a"},
        {"type": "custom_tool_call", "call_id": "b"},
        {"type": "message", "role": "developer"},
        {"type": "function_call_output", "call_id": "a"},
        {"type": "custom_tool_call_output", "call_id": "b"},
        {"type": "message", "role": "user"},
    ]
    assert droppable(items) == [[0], [1, 2, 5], [3, 6]]
    assert droppable(items[:7]) == [[0], [1, 2, 5]]
    assert droppable([]) == []


def test_as_few_as_possible_go_and_other_errors_are_not_about_length() -> None:
    items: list[Any] = [{"type": "message", "role": "user", "id": n} for n in range(9)]
    tried = []

    async def use(some: list[Any]) -> list[int]:
        tried.append(len(some))
        if len(some) > 4:
            raise invalid("input: too long", "input", "context_length_exceeded")
        return [item["id"] for item in some]

    assert asyncio.run(fitted(items, use)) == [5, 6, 7, 8]
    assert len(tried) <= 5

    async def alternating(some: list[Any]) -> list[int]:
        if len(some) % 2 == 0:
            raise invalid("messages: roles must alternate", "messages", "invalid_messages")
        return await use(some)

    assert asyncio.run(fitted(items, alternating)) == [6, 7, 8]
    with pytest.raises(Exception, match="must alternate"):  # nothing has been cut yet
        asyncio.run(fitted(items[1:], alternating))

    async def refuse(some: list[Any]) -> None:
        raise invalid("n: bad", "n")

    with pytest.raises(Exception, match="n: bad"):
        asyncio.run(fitted(items, refuse))


def test_what_changes_nothing_comes_back(service: Service) -> None:
    fields: Any = {
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "max_tool_calls": 3,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "user": "ada",
    }
    response = ask(service, **fields)
    assert (response.prompt_cache_key, response.safety_identifier, response.max_tool_calls) == ("k", "s", 3)
    assert (response.reasoning.effort, response.reasoning.summary, response.user) == ("low", "auto", "ada")
    assert response.output_text == ANSWER
