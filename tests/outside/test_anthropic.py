"""The official anthropic client where it is trying, and messages in the shapes that coding agents send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from place import MODEL, PARIS, USER, Place, full, full_until_refused, wait_until

anthropic = pytest.importorskip("anthropic")

CLIENTS = ("anthropic",)
BASH: dict[str, Any] = {
    "name": "Bash",
    "description": "Runs a command",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "command": {"type": "string", "maxLength": 40},
            "timeout": {"type": "number", "description": "milliseconds"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}


def client(place: Place, kind: Any = None, **changes: Any) -> Any:
    """The client, without retries unless they are asked for."""
    fields: dict[str, Any] = {"base_url": place.root, "api_key": place.key, "max_retries": 0, "timeout": 60}
    return (kind or anthropic.Anthropic)(**{**fields, **changes})


def test_an_overload_is_retried_after_the_time_that_the_server_names(narrow: Place) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": USER}
    with full(narrow), pytest.raises(anthropic.APIStatusError) as raised:
        client(narrow).messages.create(**fields)
    assert raised.value.status_code == 529 and int(raised.value.response.headers["retry-after"]) >= 1
    with full_until_refused(narrow):
        assert client(narrow, max_retries=5).messages.create(**fields).usage.output_tokens == 5


def test_timeouts_and_cancelled_streams_end_the_request_at_the_server(narrow: Place) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 1500, "messages": USER, "extra_body": {"ignore_eos": True}}
    with pytest.raises(anthropic.APITimeoutError):
        client(narrow, timeout=0.5).messages.create(**fields)
    wait_until(lambda: narrow.live() == (0, 0), "the request to end")

    async def leave() -> None:
        async with client(narrow, anthropic.AsyncAnthropic) as asked, asked.messages.stream(**fields) as stream:
            async for _ in stream.text_stream:
                break

    asyncio.run(leave())
    wait_until(lambda: narrow.live() == (0, 0), "the request to end")


def test_a_coding_agents_loop_of_tool_use_and_results(server: Place) -> None:
    """System as blocks with cache_control, metadata, betas, results as blocks, a turn of text after a result."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "system": [
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Working directory: /tmp", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "tools": [BASH],
        "metadata": {"user_id": "user_0_account__session_1"},
        "extra_headers": {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"},
        "extra_query": {"beta": "true"},
        "extra_body": {"temperature": 0},
    }
    reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}
    messages: list[Any] = [{"role": "user", "content": [reminder, {"type": "text", "text": "List the files."}]}]
    asked = client(server).messages
    for turn in range(2):
        with asked.stream(
            messages=messages, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **fields
        ) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        calls = [block for block in message.content if block.type == "tool_use"]
        assert calls and all(set(call.input) <= {"command", "timeout"} and call.input["command"] for call in calls)
        messages.append({"role": "assistant", "content": [block.model_dump(mode="json") for block in message.content]})
        results: list[Any] = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": f"file{turn}.py"}],
                "is_error": bool(turn),
                "cache_control": {"type": "ephemeral"},
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": [*results, reminder]})
    last = asked.create(messages=messages, tool_choice={"type": "none"}, **fields)
    assert last.stop_reason in ("end_turn", "max_tokens")
    counted = asked.count_tokens(model=MODEL, system=fields["system"], tools=[BASH], messages=messages)
    assert counted.input_tokens > 50


def test_the_tool_runner_of_the_client_drives_a_conversation(server: Place) -> None:
    seen = []

    @anthropic.beta_tool
    def look(city: str) -> str:
        """Looks something up.

        Args:
            city: a city
        """
        seen.append(city)
        return "The weather is sunny."

    runner = client(server).beta.messages.tool_runner(
        model=MODEL, max_tokens=100, tools=[look], messages=USER, max_iterations=2,
        tool_choice={"type": "tool", "name": "look"},
    )  # fmt: skip
    messages = list(runner)
    assert seen and messages[0].stop_reason == "tool_use"


def test_streams_many_at_once_say_what_the_whole_answer_says(server: Place) -> None:
    async def main() -> list[str]:
        async with client(server, anthropic.AsyncAnthropic) as asked:

            async def one() -> str:
                async with asked.messages.stream(
                    model=MODEL, max_tokens=40, messages=USER, extra_body={"temperature": 0}
                ) as stream:
                    return await stream.get_final_text()

            return list(await asyncio.gather(*[one() for _ in range(12)]))

    assert asyncio.run(main()) == [PARIS] * 12
