"""From a body of `/v1/responses` to the chat request that says the same, and the refusal of what nothing here says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.errors import invalid, unsupported
from services.responses.items import JsonItem, to_messages
from services.responses.schema import ResponsesRequest, TextFormat
from services.schema import ChatRequest, JsonSchemaFormat, ResponseFormat
from services.translate import chat_request, refuse_fields

ROUTE = "/v1/responses"
CHAT_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512


def check(request: ResponsesRequest) -> None:
    """ApiError 400 for fields that contradict each other or ask for what isn't there."""
    refuse_fields(request, ROUTE)
    if request.max_tokens is not None:
        raise invalid("max_tokens: on /v1/responses the field is max_output_tokens", "max_tokens")
    for name in ("conversation", "prompt"):
        if getattr(request, name):
            raise unsupported(name)
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation", f"truncation {request.truncation[:40]!r}")
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        raise unsupported("top_logprobs", "log-probabilities on /v1/responses")
    if request.background and request.stream:
        raise unsupported("background", "background together with stream")
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
    )
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


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function as chat has it: one level deeper. What it may be is checked there."""
    if tool.get("type") != "function":
        raise unsupported("tools", f"{where}: a tool of type {str(tool.get('type'))[:60]!r}")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice", f"the type {str(choice.get('type'))[:60]!r}")
    return {"type": "function", "function": {"name": choice.get("name")}}
