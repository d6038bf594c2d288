"""What `/v1/responses` answers, as types: like `answers`, only for the description."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.openapi.answers import CompletionTokensDetails, PromptTokensDetails


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseItem(msgspec.Struct):
    """A message, a call or thoughts; what else it has depends on its type."""

    id: str
    type: str


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class Response(msgspec.Struct):
    """A response of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class ResponseDeleted(msgspec.Struct):
    """It is gone."""

    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItems(msgspec.Struct):
    """A page of a response's input."""

    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


ANSWERS: tuple[type[msgspec.Struct], ...] = (Response, ResponseDeleted, ResponseItems)
