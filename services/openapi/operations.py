"""All routes as OpenAPI wants them: method, path, what goes in, what comes out, and which statuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from services import schema
from services.anthropic.schema import CountRequest, MessagesRequest
from services.openapi import answers, response_answers
from services.responses.paging import DEFAULT_PAGE, FLAGS, MAX_EVENT, MAX_PAGE, ORDERS
from services.responses.schema import ResponsesRequest

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
_BODY = (400, 404, 408, 413, 415)
"""What reading a body can end with; 404 is a model that isn't served."""
_GENERATION = (*_BODY, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route. `events`: what the events of a stream are. `chain`: 503 has the answer's shape too."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    events: type[msgspec.Struct] | str | None = None
    statuses: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    example: dict[str, Any] = field(default_factory=dict)
    several: bool = False
    chain: bool = False


def _query(name: str, like: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": like, "description": text}


_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_RESPONSE_EVENTS = "OpenAI's events, from `response.created` to `response.completed`, `.incomplete` or `.failed`"
_KEPT = (404, 503)
OPERATIONS = (
    Operation(
        "POST",
        "/v1/completions",
        "create_completion",
        "Text or token ids in, text out.",
        answers.Completion,
        schema.CompletionRequest,
        answers.Completion,
        _GENERATION,
        example={"prompt": "The capital of France is", "max_tokens": 5, "temperature": 0},
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        "create_chat_completion",
        "A conversation in, the assistant's message out.",
        answers.ChatCompletion,
        schema.ChatRequest,
        answers.ChatCompletionChunk,
        _GENERATION,
        example={"messages": _QUESTION, "max_tokens": 5},
    ),
    Operation(
        "POST",
        "/v1/messages",
        "create_message",
        "Anthropic's Messages API: turns in, a message of blocks out.",
        answers.AnthropicMessage,
        MessagesRequest,
        "Anthropic's events, from `message_start` to `message_stop`",
        (*_GENERATION, 529),
        example={"messages": _QUESTION, "max_tokens": 5},
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "count_message_tokens",
        "How many tokens the prompt of a message has.",
        answers.TokenCount,
        CountRequest,
        statuses=_BODY,
        example={"messages": _QUESTION},
    ),
    Operation(
        "POST",
        "/v1/responses",
        "create_response",
        "OpenAI's Responses API: items in, a response of items out; whole, as events, or in the background.",
        response_answers.Response,
        ResponsesRequest,
        _RESPONSE_EVENTS,
        _GENERATION,
        example={"input": "What is the capital of France?", "max_output_tokens": 5},
    ),
    Operation(
        "GET",
        "/v1/responses/{id}",
        "get_response",
        "A response that is kept.",
        response_answers.Response,
        events=_RESPONSE_EVENTS,
        statuses=(400, *_KEPT),
        parameters=(
            _query("stream", {"enum": list(FLAGS)}, "Its events, if it was created with `stream`."),
            _query("starting_after", {"type": "integer", "minimum": 0, "maximum": MAX_EVENT}, "The last event known."),
        ),
    ),
    Operation(
        "DELETE",
        "/v1/responses/{id}",
        "delete_response",
        "Forget it.",
        response_answers.ResponseDeleted,
        statuses=_KEPT,
    ),
    Operation(
        "POST",
        "/v1/responses/{id}/cancel",
        "cancel_response",
        "End a response that runs in the background.",
        response_answers.Response,
        statuses=(400, *_KEPT),
    ),
    Operation(
        "GET",
        "/v1/responses/{id}/input_items",
        "list_input_items",
        "The conversation up to a response, in pages.",
        response_answers.ResponseItems,
        statuses=(400, *_KEPT),
        parameters=(
            _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE}, "Items."),
            _query("order", {"enum": list(ORDERS), "default": ORDERS[-1]}, "The newest first, or last."),
            _query("after", {"type": "string"}, "The id of the item before the page."),
        ),
    ),
    Operation("GET", "/v1/models", "list_models", "The served names.", answers.Models),
    Operation("GET", "/v1/models/{name}", "get_model", "One served name.", answers.Model, statuses=(404,)),
    Operation(
        "GET",
        "/v1/requests/{id}/timeline",
        "get_timeline",
        "What happened to a request; a list with one for each choice if it has several.",
        answers.Timeline,
        statuses=(404, 501, 503),
        several=True,
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        "What generation would see.",
        answers.Tokenized,
        schema.TokenizeRequest,
        statuses=_BODY,
        example={"prompt": "The capital of France is"},
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        "Token ids to text.",
        answers.Detokenized,
        schema.DetokenizeRequest,
        statuses=_BODY,
        example={"tokens": [504, 3575, 282, 4649, 314]},
    ),
    Operation("GET", "/health", "health", "Does the whole chain work?", answers.Health, statuses=(503,), chain=True),
    Operation("GET", "/ready", "ready", "Are new requests welcome?", answers.Health, statuses=(503,), chain=True),
    Operation("GET", "/version", "version", "Version, protocol and schema.", answers.Version),
    Operation("GET", "/load", "load", "How much is going on.", answers.Load),
    Operation("GET", "/metrics", "metrics", "Prometheus text of all processes.", None),
    Operation("GET", "/openapi.json", "openapi", "This document.", None),
)
