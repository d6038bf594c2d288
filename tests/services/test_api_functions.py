"""Calls in other shapes than plain tools: OpenAI's older functions, custom tools, and a choice among allowed ones."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import ANSWER, MODEL, Service, stream_lines, strict

PATH = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "get_weather", "description": "The weather of a city", "parameters": CITY}
NOW: Any = {"type": "function", "function": {"name": "now"}}
TOOL: Any = {"type": "function", "function": FUNCTION}
BAD = {"name": "f", "arguments": 5}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "漢 🙂"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SHELL: Any = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command"}}
COMMAND = 'echo "漢 🙂"\n\tls \\'
CALL_SHELL = f'<tool_call>\n{{"name": "shell", "arguments": {json.dumps({"input": COMMAND})}}}\n</tool_call>'


def prompt(service: Service) -> str:
    """The last prompt as text."""
    assert service.scheduler is not None
    return service.tokenizer.decode(prompt_of(service.scheduler.record.submits[-1]), skip_special_tokens=False)


def grammar(service: Service) -> str:
    assert service.scheduler is not None
    return service.scheduler.record.submits[-1].params.grammar


def ask(service: Service, **fields: Any) -> Any:
    return service.client.chat.completions.create(**{"model": MODEL, "messages": USER, **fields})


def deltas(service: Service, **fields: Any) -> tuple[list[Any], str]:
    """The deltas of a stream and its finish reason."""
    lines = stream_lines(service, PATH, {"messages": USER, **fields})
    choices = [strict(line)["choices"][0] for line in lines[:-1]]
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]


def test_functions_are_answered_with_a_function_call(service: Service) -> None:
    service.say(CALL + CALL_NOW)
    (choice,) = ask(service, functions=[FUNCTION]).choices
    assert choice.finish_reason == "function_call" and choice.message.content is None
    assert choice.message.tool_calls is None
    assert (choice.message.function_call.name, json.loads(choice.message.function_call.arguments)["city"]) == (
        "get_weather",
        "漢 🙂",
    )
    pieces, reason = deltas(service, functions=[FUNCTION])
    calls = [piece["function_call"] for piece in pieces if "function_call" in piece]
    assert reason == "function_call" and len(calls) > 1 and not any("tool_calls" in piece for piece in pieces)
    assert [call["name"] for call in calls if "name" in call] == ["get_weather"]
    assert "".join(call["arguments"] for call in calls) == choice.message.function_call.arguments
    service.say(ANSWER)
    (choice,) = ask(service, functions=[FUNCTION], function_call="none").choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert "get_weather" not in prompt(service)
    ask(service, functions=[FUNCTION], function_call={"name": "get_weather"})
    assert '\\"name\\": \\"get_weather\\"' in grammar(service)


def test_the_older_history_reads_as_the_newer_one(service: Service) -> None:
    called = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    ask(
        service,
        messages=[
            *USER,
            {"role": "assistant", "content": None, "function_call": called},
            {"role": "function", "name": "get_weather", "content": "12 °C"},
        ],
        functions=[FUNCTION],
    )
    older = prompt(service)
    call = {"id": "c1", "type": "function", "function": called}
    ask(
        service,
        messages=[
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "12 °C"},
        ],
        tools=[TOOL],
    )
    assert older == prompt(service)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"functions": [{"name": "a b"}]}, "functions", "functions[0].name"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions", "functions[1].name: 'get_weather' is there twice"),
        ({"functions": [{"name": "tools"}] * 2}, "functions", "functions[1].name: 'tools' is there twice"),
        ({"functions": [FUNCTION], "function_call": "required!"}, "function_call", "function_call: must be"),
        ({"functions": [FUNCTION], "function_call": {"name": "x"}}, "function_call", "not among the functions"),
        ({"function_call": {"name": "x"}}, "function_call", "needs functions"),
        ({"functions": [FUNCTION], "tools": [TOOL]}, "functions", "excludes tools"),
        ({"messages": [*USER, {"role": "function", "content": "x"}]}, "messages", "messages[1].name"),
        ({"messages": [*USER, {"role": "assistant", "function_call": {"x": 1}}]}, "messages", "function_call.name"),
        ({"messages": [*USER, {"role": "assistant", "function_call": BAD}]}, "messages", "function_call.arguments"),
    ],
    ids=str,
)
def test_what_is_wrong_about_functions_is_named_in_their_words(
    service: Service, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(service, **fields)
    assert refused.value.param == param and words in refused.value.message


def test_a_custom_tools_input_is_a_text(service: Service) -> None:
    service.say(f"I look.\n{CALL_SHELL}\n{CALL_NOW}")
    answer = ask(service, tools=[SHELL, NOW])
    ChatCompletion.model_validate(answer.to_dict())
    shell, now = answer.choices[0].message.tool_calls
    assert (shell.type, shell.custom.name, shell.custom.input, now.type) == ("custom", "shell", COMMAND, "function")
    assert answer.choices[0].finish_reason == "tool_calls"
    pieces, _ = deltas(service, tools=[SHELL, NOW])
    calls = [call for piece in pieces for call in piece.get("tool_calls", ())]
    assert "".join(call["custom"]["input"] for call in calls if call["index"] == 0) == COMMAND
    assert [call["type"] for call in calls if "id" in call] == ["custom", "function"]
    history = [*USER, answer.choices[0].message, {"role": "tool", "tool_call_id": shell.id, "content": "ok"}]
    service.say(ANSWER)
    assert ask(service, messages=history, tools=[SHELL, NOW]).choices[0].message.content == ANSWER
    assert json.dumps({"input": COMMAND}, ensure_ascii=False) in prompt(service)


def test_a_custom_tool_keeps_its_regular_expression(service: Service) -> None:
    custom = {"name": "math", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9+]+"}}}
    fields: Any = {"tools": [{"type": "custom", "custom": custom}]}
    ask(service, **fields)
    assert '"^(?:[0-9+]+)$"' in grammar(service)
    ask(service, **fields, tool_choice={"type": "custom", "custom": {"name": "math"}})
    assert '"^(?:[0-9+]+)$"' in grammar(service)
    custom["format"] = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(["}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(service, **fields)
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("custom", "words"),
    [
        (None, "tools[0].custom: an object"),
        ({"name": "a b"}, "tools[0].custom.name"),
        ({"name": "a", "format": {"type": "x"}}, "tools[0].custom.format.type"),
        ({"name": "a", "format": {"type": "grammar"}}, "format.grammar"),
        ({"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x"}}}, "'lark'"),
        ({"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "x", "definition": "x"}}}, "syntax"),
    ],
)
def test_a_custom_tool_that_cannot_be_kept_is_refused(service: Service, custom: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(service, tools=[{"type": "custom", "custom": custom}])
    assert refused.value.param == "tools" and words in refused.value.message


def test_only_allowed_tools_are_called(service: Service) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    ask(service, tools=[TOOL, NOW], tool_choice=choice)
    assert "get_weather" in prompt(service), "the prompt stays the same, and so does its place in the cache"
    assert '\\"name\\": \\"now\\"' in grammar(service) and "get_weather" not in grammar(service)
    assert "TEXT" in grammar(service)
    allowed["mode"] = "required"
    ask(service, tools=[TOOL, NOW], tool_choice=choice)
    assert "get_weather" not in grammar(service) and "TEXT" not in grammar(service)
    allowed["tools"].append({"type": "function", "function": {"name": "get_weather"}})  # type: ignore[attr-defined]
    allowed["mode"] = "auto"
    ask(service, tools=[TOOL, NOW], tool_choice=choice)
    assert grammar(service) == ""


@pytest.mark.parametrize(
    "allowed",
    [None, {}, {"mode": "auto"}, {"mode": "auto", "tools": []}, {"mode": "any", "tools": [NOW]},
     {"mode": "auto", "tools": [{"type": "function", "function": {"name": "nope"}}]}, {"mode": "auto", "tools": [5]},
     {"mode": "auto", "tools": [{"type": "mcp"}]}, {"mode": "auto", "tools": [{"type": "function"}]}],
)  # fmt: skip
def test_a_choice_among_tools_that_is_none_is_refused(service: Service, allowed: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice") as refused:
        ask(service, tools=[NOW], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert refused.value.param == "tool_choice"


def test_items_know_custom_tools_and_allowed_ones(service: Service) -> None:
    tool: Any = {"type": "custom", "name": "shell", "format": {"type": "text"}}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "shell"}]}
    fields: Any = {"model": MODEL, "input": "Look.", "tools": [tool, {"type": "function", "name": "now"}]}
    service.say(CALL_SHELL)
    whole = service.client.responses.create(**fields, tool_choice=choice)
    assert "now" not in grammar(service)
    (call,) = whole.output
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("shell", COMMAND)
    with service.client.responses.stream(**fields, tool_choice=choice) as stream:
        events: list[Any] = list(stream)
    said = "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta")
    done = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert said == done[0].input == COMMAND and done[0].item_id == events[-1].response.output[0].id
    service.say(ANSWER)
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    service.client.responses.create(**{**fields, "input": [output], "previous_response_id": whole.id})
    assert json.dumps({"input": COMMAND}, ensure_ascii=False) in prompt(service)
    grammar_format = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    service.client.responses.create(**{**fields, "tools": [{**tool, "format": grammar_format}]})
    assert '"^(?:[a-z]+)$"' in grammar(service)
