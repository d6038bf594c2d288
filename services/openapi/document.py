"""The OpenAPI 3.1 document of one server: all operations, with the limits of the model that it serves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from protocol.messages import Limits
from services.anthropic.errors import OVERLOADED_STATUS, speaks_anthropic
from services.openapi import answers, bodies, response_answers
from services.openapi.operations import EVENTS, JSON, OPERATIONS, TEXT, Operation
from services.openapi.parts import Schema, ref

ANSWERS = (*answers.ANSWERS, *response_answers.ANSWERS)
_PARAMETER = re.compile(r"{(\w+)}")
_LATER = frozenset({429, 503, OVERLOADED_STATUS})
"""Statuses that come with `Retry-After`."""
_WORDS = {401: "No or a wrong API key.", OVERLOADED_STATUS: "Too much to do now."}


_DESCRIPTION = """\
OpenAI's and Anthropic's APIs over one model. Fields that aren't known are ignored, and named in the answer's `Warning`
header. Requests that are too much for the model's context, or whose fields contradict each other, are refused although
each field keeps its schema."""


@dataclass(frozen=True, slots=True)
class About:
    """What a document depends on. `served`: the names that requests may use, None for any."""

    version: str
    limits: Limits | None
    served: Sequence[str] | None
    needs_key: bool
    open_paths: Iterable[str] = ()


def document(about: About) -> dict[str, Any]:
    """The whole document."""
    found = bodies.components(about.limits, about.served)
    found |= msgspec.json.schema_components(ANSWERS, ref_template=bodies.REF)[1]
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        closed = about.needs_key and operation.path not in about.open_paths
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, closed)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Triptych",
            "version": about.version,
            "description": _DESCRIPTION,
        },
        "paths": paths,
        "components": {"schemas": found, "headers": _headers()},
    }
    if about.needs_key:
        made["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
    return made


def _headers() -> dict[str, Any]:
    return {
        "RequestId": {"description": "The request's own id, or a new one.", "schema": {"type": "string"}},
        "RetryAfter": {"description": "Seconds to wait.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
        "Warning": {"description": "Names fields that were ignored.", "schema": {"type": "string"}},
    }


def _header(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/headers/{name}"}


def _operation(operation: Operation, closed: bool) -> dict[str, Any]:
    statuses = {*operation.statuses, *((401,) if closed else ())}
    if operation.body is not None:
        statuses.add(500)
    made: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {"200": _answer(operation)}
        | {str(status): _failure(operation, status) for status in sorted(statuses)},
    }
    if closed:
        made["security"] = [{"bearer": []}, {"key": []}]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(operation.path)
    ]
    if parameters or operation.parameters:
        made["parameters"] = [*parameters, *operation.parameters]
    if operation.body is not None:
        content = {"schema": ref(operation.body.__name__), "example": operation.example}
        made["requestBody"] = {"required": True, "content": {JSON: content}}
    return made


def _answer(operation: Operation) -> dict[str, Any]:
    headers = {"X-Request-Id": _header("RequestId")}
    if operation.body is not None:
        headers["Warning"] = _header("Warning")
    content: dict[str, Any] = {}
    if operation.answer is not None:
        one = ref(operation.answer.__name__)
        content[JSON] = {"schema": {"anyOf": [one, {"type": "array", "items": one}]} if operation.several else one}
    elif operation.name == "openapi":
        content[JSON] = {"schema": {"type": "object"}}
    else:
        content[TEXT] = {"schema": {"type": "string"}}
    if operation.events is not None:
        content[EVENTS] = {"schema": _events(operation.events)}
    return {"description": operation.summary, "headers": headers, "content": content}


def _events(kind: type[msgspec.Struct] | str) -> Schema:
    """One event."""
    data: Schema = {"type": "string"}
    event: Schema = {"type": "object", "required": ["data"], "properties": {"data": data}}
    if isinstance(kind, str):
        event["properties"]["event"] = {"type": "string"}
        event["required"].append("event")
        return {**event, "description": f"With `stream`: {kind}."}
    told: Schema = {"contentMediaType": JSON, "contentSchema": {"anyOf": [ref(kind.__name__), ref("Error")]}}
    data["anyOf"] = [{"const": "[DONE]"}, told]
    text = f"With `stream`: events with a {kind.__name__} each, or an Error, and at last one with `[DONE]`."
    return {**event, "description": text}


def _failure(operation: Operation, status: int) -> dict[str, Any]:
    headers = {"X-Request-Id": _header("RequestId")}
    if status in _LATER:
        headers["Retry-After"] = _header("RetryAfter")
    shape: type[msgspec.Struct] = answers.AnthropicError if speaks_anthropic(operation.path) else answers.Error
    if operation.chain and operation.answer is not None:
        shape = operation.answer
    words = _WORDS.get(status) or HTTPStatus(status).phrase
    return {"description": words, "headers": headers, "content": {JSON: {"schema": ref(shape.__name__)}}}
