"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`. Only types: what they mean is in `translate`."""

from __future__ import annotations

from typing import Any

import msgspec

from services.schema import Sampling


class Block(msgspec.Struct):
    """One block of content, of any type; which fields a type needs is checked when it is translated."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class Turn(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[Block]


class Metadata(msgspec.Struct):
    """Who asks."""

    user_id: str | None = None


class Tool(msgspec.Struct):
    """One tool of the client's. `type` is absent or `custom`; the others run on Anthropic's servers."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """Whether tools may or must be used: `auto`, `any`, `tool` (with a name) or `none`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model is to think first, if its template knows the difference: `enabled`, `adaptive`, `disabled`."""

    type: str
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    """The form of the answer."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """How the answer should be. `effort` is the template's to understand."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Sampling, kw_only=True):
    """POST /v1/messages/count_tokens, and what it shares with /v1/messages; the extras of the other routes too."""

    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    thread: dict[str, Any] | None = None
