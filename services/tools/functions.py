"""Calls in other words than tools: OpenAI's older functions, and custom tools in messages, as calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.errors import ApiError, invalid
from services.schema import ChatRequest, TokenizeRequest
from services.tools.custom import as_arguments
from services.tools.request import ToolUse, checked_name, tool_use
from services.translate import reworded

AUTO = ("none", "auto")
_OLDER = {"tools": "functions", "tool_choice": "function_call"}
_INSIDE = {"].function.": "].", "function_call.function": "function_call"}
"""What is one level flatter in the older fields."""


def asked_tools(request: ChatRequest | TokenizeRequest, parallel: bool | None = None) -> ToolUse | None:
    """What an answer may call, of `tools` or of the older `functions`. ApiError 400 naming the client's field."""
    if request.functions is None and request.function_call is None:
        return tool_use(request.tools, request.tool_choice, parallel)
    if request.tools or request.tool_choice is not None:
        raise invalid("functions: excludes tools, send one of them", "functions")
    try:
        return tool_use(*_as_tools(request.functions, request.function_call), parallel=False)
    except ApiError as error:
        _in_older_words(error)
        raise


def _as_tools(functions: list[dict[str, Any]] | None, choice: Any) -> tuple[list[dict[str, Any]] | None, Any]:
    """The fields `functions` and `function_call` as `tools` and `tool_choice`."""
    tools = None if functions is None else [{"type": "function", "function": one} for one in functions]
    if choice is None or choice in AUTO:
        return tools, choice
    if not isinstance(choice, dict):
        raise invalid("function_call: must be 'none', 'auto' or {'name': ...}", "function_call")
    return tools, {"type": "function", "function": choice}


def _in_older_words(error: ApiError) -> None:
    """Make an error be about the fields that the client knows."""
    place, colon, rest = reworded(error.message, _OLDER | _INSIDE).partition(":")
    error.message = place + colon + rest.replace(" tools", " functions")  # no name has a blank before it
    error.param = _OLDER.get(error.param or "", error.param)


def with_tool_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with `function_call`, role `function` and calls of custom tools as calls of tools and their results.

    ApiError 400 for a result that names no function, and for one whose function hasn't been called before.
    """
    ids: dict[str, str] = {}
    shown: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message["role"] == "function":
            name = checked_name(message.get("name"), f"{where}.name", "messages")
            if ids and name not in ids:
                raise invalid(f"{where}.name: {name!r} has not been called before", "messages")
            answered = {"tool_call_id": ids[name]} if ids else {}
            message = {**message, "role": "tool", **answered}
        elif "function_call" in message:
            if message.get("tool_calls"):
                raise invalid(f"{where}.function_call: excludes tool_calls, send one of them", "messages")
            call = message["function_call"]
            checked_name(call.get("name"), f"{where}.function_call.name", "messages")
            if not isinstance(call.get("arguments", ""), str | dict):
                raise invalid(f"{where}.function_call.arguments: must be a string with JSON", "messages")
            id = f"call{index:05d}"
            ids[call["name"]] = id
            rest = {key: value for key, value in message.items() if key != "function_call"}
            message = {**rest, "tool_calls": [{"id": id, "type": "function", "function": call}]}
        elif message.get("tool_calls"):
            calls = [_as_function(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message["tool_calls"])]
            message = {**message, "tool_calls": calls}
        shown.append(message)
    return shown


def _as_function(call: dict[str, Any], where: str) -> Mapping[str, Any]:
    """A call, one of a custom tool as one of the function that stands for it."""
    if call.get("type") != "custom":
        return call
    custom = call.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
        raise invalid(f"{where}.custom: an object with name and input is required", "messages")
    function = {"name": custom.get("name"), "arguments": as_arguments(custom["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}
