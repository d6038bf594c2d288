"""The body of `POST /v1/responses`. Only types: what they mean is in `items` and `translate`."""

from __future__ import annotations

from typing import Any

import msgspec

from services.schema import Sampling


class Part(msgspec.Struct):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """One item of the input, of any type; which fields a type needs is checked when it is translated."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None


class TextFormat(msgspec.Struct):
    """The form of the answer: `text`, `json_object` or `json_schema`."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """How the text should be. `verbosity` changes nothing here."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """POST /v1/responses; the extras of the other routes too."""

    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
