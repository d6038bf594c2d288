"""From a body of `/v1/responses` to the chat request that says the same, and the refusal of what nothing here says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.errors import invalid, unsupported
from services.responses.items import JsonItem, to_messages
from services.responses.schema import ResponsesRequest, TextFormat
from services.schema import ChatRequest, JsonSchemaFormat, ResponseFormat
from services.tools.request import ALLOWED
from services.translate import chat_request, refuse_fields

ROUTE = "/v1/responses"
CHAT_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
CHAT_WORDS = {
    ".function.": ".",
    ".custom.": ".",
    "response_format.json_schema.": "text.format.",
    ".allowed_tools": "",
}
LOGPROBS = "message.output_text.logprobs"
_TOOLS = ("function", "custom")
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512


def check(request: ResponsesRequest) -> None:
    """ApiError 400 for fields that contradict each other or ask for what isn't there."""
    refuse_fields(request, ROUTE)
    if request.max_tokens is not None:
        raise invalid("max_tokens: on /v1/responses the field is max_output_tokens", "max_tokens")
    if request.conversation:
        raise unsupported("conversation", "a kept conversation (send its items, or previous_response_id)")
    if request.prompt:
        raise unsupported("prompt", "a kept prompt (send it as instructions or input)")
    if request.truncation not in (None, "auto", "disabled"):
        raise invalid(f"truncation: {request.truncation[:40]!r}, allowed are 'auto' and 'disabled'", "truncation")
    if request.background and request.store is False:
        raise invalid("background: needs store, which keeps the answer", "background")
    _check_metadata(request.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid(f"metadata: {len(metadata)} entries, at most {MAX_METADATA}", "metadata", "out_of_range")
    for key, value in metadata.items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise invalid(
                f"metadata: keys of up to {MAX_KEY} and values of up to {MAX_VALUE} characters are allowed",
                "metadata",
                "out_of_range",
            )


def to_chat(request: ResponsesRequest, items: Sequence[JsonItem]) -> ChatRequest:
    """The chat request for a conversation of these items."""
    text_format = request.text.format if request.text is not None else None
    chat = chat_request(
        request,
        to_messages(request.instructions, items),
        max_tokens=request.max_output_tokens,
        stream_options=None,
        chat_template_kwargs=request.chat_template_kwargs,
        response_format=_response_format(text_format) if text_format is not None else request.response_format,
        reasoning_effort=_effort(request.reasoning),
    )
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    chat.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())] or None
    chat.tool_choice = _tool_choice(request.tool_choice)
    chat.parallel_tool_calls = request.parallel_tool_calls
    return chat


def _response_format(asked: TextFormat) -> ResponseFormat | None:
    if asked.type == "json_schema":
        schema = JsonSchemaFormat(asked.schema, asked.name, asked.description, asked.strict)
        return ResponseFormat("json_schema", schema)
    if asked.type == "json_object":
        return ResponseFormat("json_object")
    if asked.type != "text":
        raise invalid(f"text.format.type: {asked.type[:40]!r}, allowed are text, json_object and json_schema", "text")
    return None


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning.effort: must be a string", "reasoning")
    return effort


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool as chat has it: one level deeper. What it may be is checked there."""
    kind = tool.get("type")
    if kind not in _TOOLS:
        raise unsupported("tools", f"{where}: a tool of type {str(kind)[:60]!r}")
    inner = {name: value for name, value in tool.items() if name != "type"}
    asked = inner.get("format")
    if kind == "custom" and isinstance(asked, dict) and asked.get("type") == "grammar":
        inner["format"] = {"type": "grammar", "grammar": asked}
    return {"type": kind, kind: inner}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == ALLOWED:
        tools = choice.get("tools")
        tools = [_named(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": ALLOWED, ALLOWED: {"mode": choice.get("mode"), "tools": tools}}
    named: dict[str, Any] = _named(choice)
    return named


def _named(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind not in _TOOLS:
        raise unsupported("tool_choice", f"the type {str(kind)[:60]!r}")
    return {"type": kind, kind: {"name": choice.get("name")}}
