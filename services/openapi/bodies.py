"""Request bodies as JSON Schema: msgspec's, from the structs that bodies are read into, with what is checked beyond.

What depends on two fields or on the tokenizer (does the prompt fit, is a grammar one) no schema says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from protocol.messages import Limits
from services import schema
from services.anthropic.schema import CountRequest, MessagesRequest
from services.conversation import EFFORTS
from services.openapi import parts
from services.openapi.parts import Schema, nullable
from services.ranges import (
    MAX_ID_LIST,
    MAX_NAME,
    MAX_PATTERN,
    MAX_PROMPTS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    RANGES,
)
from services.responses.schema import ResponsesRequest
from services.responses.translate import MAX_KEY, MAX_METADATA, MAX_VALUE
from services.structured import MAX_CHARACTERS, MAX_CHOICES
from services.text.chat_template import RESERVED_KWARGS

REF = "#/components/schemas/{name}"
BODIES: tuple[type[msgspec.Struct], ...] = (
    schema.CompletionRequest,
    schema.ChatRequest,
    MessagesRequest,
    CountRequest,
    ResponsesRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
)
_SHAPES: dict[str, Callable[[], Schema]] = {
    "ContentPart": parts.content_part,
    "Message": parts.message,
    "Turn": parts.turn,
    "Tool": parts.anthropic_tool,
    "ToolChoice": parts.anthropic_tool_choice,
    "Thinking": parts.thinking,
    "OutputFormat": parts.output_format,
    "TextFormat": parts.text_format,
}
"""Components that are checked more closely than their struct says."""
_CHAT = frozenset({"ChatRequest", "TokenizeRequest"})


def components(limits: Limits | None, served: Iterable[str] | None) -> dict[str, Schema]:
    """All schemas of request bodies by name. `served`: the names that a model may have; None for any."""
    found: dict[str, Schema] = msgspec.json.schema_components(BODIES, ref_template=REF)[1]
    del found["Block"]  # of any type; which ones a turn may have depends on whose it is
    for name, made in _SHAPES.items():
        found[name] = {**made(), "description": found[name].get("description", "")}
    for body in BODIES:
        described = found[body.__name__]
        properties: dict[str, Schema] = described["properties"]
        fields = _own_fields(body.__name__, limits)
        if issubclass(body, schema.Sampling) and body is not CountRequest:
            ranges = {
                name: nullable({**_number(properties[name]), **allowed.schema()})
                for name, allowed in RANGES.items()
                if name in properties and name != "logit_bias"
            }
            fields = {**ranges, **_sampling(limits), **fields}
        fields = {**_everywhere(limits, served), **fields}
        properties |= {name: fields[name] for name in fields if name in properties}
        for name, neutral in schema.UNSUPPORTED.items():
            properties.setdefault(name, {"enum": list(neutral.allowed), "description": "Not supported here."})
        described["required"] = _required(body.__name__, described)
        if rules := _rules(body.__name__):
            described["allOf"] = rules
    return found


def _number(described: Schema) -> Schema:
    """`{"type": "number"}` or `{"type": "integer"}` of a field that may be null."""
    branches: list[Schema] = described.get("anyOf", [described])
    return next(branch for branch in branches if branch.get("type") in ("integer", "number"))


def _everywhere(limits: Limits | None, served: Iterable[str] | None) -> dict[str, Schema]:
    """Fields that mean the same wherever they are."""
    reserved: Schema = {"not": {"enum": sorted(RESERVED_KWARGS)}}
    found: dict[str, Schema] = {
        "chat_template_kwargs": nullable({"type": "object", "propertyNames": reserved}),
        "tokens": {"type": "array", "items": _token_id(limits)},
    }
    return found if served is None else {**found, "model": {"enum": [*served, None]}}


def _sampling(limits: Limits | None) -> dict[str, Schema]:
    """Fields of all generation that are more than a number in a range."""
    name = nullable({"type": "string", "maxLength": MAX_NAME})
    ids = {"type": "array", "items": _token_id(limits)}
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
    schema_form = nullable({"type": ["object", "boolean", "string"]})
    bias = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", **RANGES["logit_bias"].schema()},
        "maxProperties": MAX_ID_LIST,
    }
    return {
        "stop": nullable(stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}),
        "stop_token_ids": nullable({**ids, "maxItems": MAX_ID_LIST}),
        "allowed_token_ids": nullable({**ids, "minItems": 1}),
        "logit_bias": nullable(bias),
        "cache_salt": nullable({"type": "string", "minLength": 1, "maxLength": MAX_NAME}),
        "user": name,
        "routing_key": name,
        "max_tokens": nullable(_output_tokens(limits)),
        "min_tokens": nullable({"type": "integer", "minimum": 0, **_most(limits, 0)}),
        "truncate_prompt_tokens": nullable({"const": -1}, {"type": "integer", "minimum": 1, **_most(limits, 0)}),
        "guided_json": schema_form,
        "json_schema": schema_form,
        "guided_choice": _choices(),
        "response_format": nullable(parts.response_format()),
        "structured_outputs": nullable(parts.structured_outputs(_form_text(), _choices())),
        "repetition_detection": nullable(parts.repetition_detection(MAX_PATTERN)),
        **{field: _form_text() for field in ("regex", "ebnf", "guided_regex", "guided_grammar")},
    }


def _own_fields(body: str, limits: Limits | None) -> dict[str, Schema]:
    """Fields of one route, or that mean something else there."""
    alternatives = nullable({"type": "integer", "minimum": 0, **({"maximum": limits.max_logprobs} if limits else {})})
    if body == "CompletionRequest":
        return {
            "prompt": _prompt(limits),
            "logprobs": alternatives,
            "prompt_logprobs": alternatives,
            "max_tokens": nullable(_output_tokens(limits, least=0)),
            "best_of": nullable({"type": "integer", **RANGES["n"].schema()}),
        }
    if body in _CHAT:
        return {
            "messages": parts.messages(nullable_list=body == "TokenizeRequest"),
            "max_tokens": nullable(_output_tokens(limits, least=0)),
            "max_completion_tokens": nullable(_output_tokens(limits, least=0)),
            "prompt_logprobs": alternatives,
            "top_logprobs": alternatives,
            "tools": nullable(parts.tools()),
            "tool_choice": parts.tool_choice(),
            "functions": nullable(parts.functions()),
            "function_call": parts.function_call(),
            "reasoning_effort": {"enum": [None, *EFFORTS]},
        }
    limited: dict[str, Schema] = {
        "n": {"enum": [None, 1]},
        "return_token_ids": {"enum": [None, False]},
        "prompt_logprobs": {"const": None},
    }
    if body == "CountRequest":
        return {"messages": parts.turns(), "system": parts.system(), "thread": {"const": None}}
    if body == "MessagesRequest":
        stops = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}}
        return {
            **limited,
            "messages": parts.turns(),
            "system": parts.system(),
            "thread": {"const": None},
            "max_tokens": {"type": "integer", "minimum": 1},
            "stop_sequences": nullable({**stops, "maxItems": MAX_STOPS}),
        }
    if body == "ResponsesRequest":
        return {
            **limited,
            "input": parts.response_input(),
            "max_output_tokens": nullable(_output_tokens(limits)),
            "max_tokens": {"const": None, "description": "The field is max_output_tokens here."},
            "top_logprobs": alternatives,
            "truncation": {"enum": [None, "auto", "disabled"]},
            "reasoning": parts.reasoning(),
            "conversation": {"enum": [None, "", {}]},
            "prompt": {"enum": [None, {}]},
            "tools": nullable(parts.response_tools()),
            "tool_choice": parts.response_tool_choice(),
            "metadata": nullable(
                {
                    "type": "object",
                    "propertyNames": {"maxLength": MAX_KEY},
                    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
                    "maxProperties": MAX_METADATA,
                }
            ),
        }
    return {}


def _required(body: str, described: Schema) -> list[str]:
    own = {"CompletionRequest": ["prompt"], "MessagesRequest": ["max_tokens"], "ResponsesRequest": ["input"]}
    return [*described.get("required", ()), *own.get(body, ())]


def _rules(body: str) -> list[Schema]:
    """What holds between fields. Not all of it: generators of test data give up on five such rules."""
    rules: list[Schema] = []
    nothing: Schema = {"type": "null"}
    if body in ("CompletionRequest", "ChatRequest"):
        rules = [parts.streaming(), parts.silent(body)]
    if body == "ChatRequest":
        rules.append(parts.either(parts.maybe("top_logprobs", nothing), parts.has("logprobs", {"const": True})))
    if body == "TokenizeRequest":
        rules.append({"oneOf": [parts.has("prompt", {"type": "string"}), parts.has("messages", {"type": "array"})]})
    if body in _CHAT or body == "ResponsesRequest":
        rules.append(parts.needs_tools({"enum": ["none", "auto", None]}))
    if body in ("MessagesRequest", "CountRequest"):
        rules.append(parts.needs_tools(parts.either(nothing, parts.has("type", {"enum": ["auto", "none"]}))))
    if body == "MessagesRequest":
        rules.append(parts.excludes("stop", "stop_sequences"))
    if body == "ResponsesRequest":
        kept = parts.maybe("store", {"enum": [None, True]})
        rules.append(parts.either(parts.maybe("background", {"enum": [None, False]}), kept))
    return rules


def _most(limits: Limits | None, beside: int) -> Schema:
    """Room for that many tokens fewer than the model's context has."""
    return {"maximum": limits.max_model_len - beside} if limits else {}


def _output_tokens(limits: Limits | None, least: int = 1) -> Schema:
    return {"type": "integer", "minimum": least, **_most(limits, 1)}


def _token_id(limits: Limits | None) -> Schema:
    return {"type": "integer", "minimum": 0, **({"maximum": limits.vocab_size - 1} if limits else {})}


def _prompt(limits: Limits | None) -> Schema:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": _token_id(limits), "minItems": 1}
    return {
        "anyOf": [
            text,
            {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_PROMPTS},
            ids,
            {"type": "array", "items": ids, "minItems": 1, "maxItems": MAX_PROMPTS},
        ]
    }


def _form_text() -> Schema:
    return nullable({"type": "string", "pattern": r"\S", "maxLength": MAX_CHARACTERS})


def _choices() -> Schema:
    items = {"type": "string", "minLength": 1}
    return nullable({"type": "array", "items": items, "minItems": 1, "maxItems": MAX_CHOICES})
