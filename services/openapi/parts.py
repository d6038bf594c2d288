"""Parts of request bodies whose shape depends on their type, as JSON Schema: messages, blocks, items, tools, forms."""

from __future__ import annotations

from typing import Any, get_args

from services.conversation import EFFORTS, NEED_CONTENT
from services.responses.items import ROLES, TEXT_PARTS
from services.schema import FormatType
from services.tools.functions import AUTO
from services.tools.history import MAX_CALLS
from services.tools.parser import NAME
from services.tools.request import ALLOWED, CUSTOM, FUNCTION, MAX_TOOLS

Schema = dict[str, Any]
GRAMMAR = "grammar"
_TEXT: Schema = {"type": "string"}
_SOME: Schema = {"type": "string", "minLength": 1}
_MAYBE: Schema = {"type": ["string", "null"]}
_FLAG: Schema = {"type": ["boolean", "null"]}
_NAME: Schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_PARAMETERS: Schema = {"type": ["object", "null"], "properties": {"type": {"const": "object"}}}


def nullable(*schemas: Schema) -> Schema:
    """One of these or null, which means absent."""
    return {"anyOf": [*schemas, {"type": "null"}], "default": None}


def thing(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these properties, and any others."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def ref(name: str) -> Schema:
    """Another component."""
    return {"$ref": f"#/components/schemas/{name}"}


def has(name: str, like: Schema) -> Schema:
    """A condition on an object: the property is there and like that."""
    return {"required": [name], "properties": {name: like}}


def needs(name: str, like: Schema, other: str, there: Schema) -> Schema:
    """A property like that needs another one like this."""
    return {"if": has(name, like), "then": has(other, there)}


def either(one: Schema, *others: Schema) -> Schema:
    """One of several conditions. Written without `if` and `not`, which generators of test data find hard."""
    return {"anyOf": [one, *others]}


def maybe(name: str, like: Schema) -> Schema:
    """A condition on an object: the property is absent, or like that."""
    return {"properties": {name: like}}


def streaming() -> Schema:
    """A stream may have options, and has no log-probabilities of the prompt."""
    on = {"required": ["stream"], "properties": {"stream": {"const": True}, "prompt_logprobs": {"type": "null"}}}
    off = {"properties": {"stream": {"enum": [None, False]}, "stream_options": {"type": "null"}}}
    return either(on, off)


def silent(body: str) -> Schema:
    """No output is wanted only with something about the prompt."""
    some: Schema = {"not": {"const": 0}}
    told = has("prompt_logprobs", {"type": "integer"})
    if body == "CompletionRequest":
        return either(maybe("max_tokens", some), told, has("echo", {"const": True}))
    return either({"properties": {"max_tokens": some, "max_completion_tokens": some}}, told)


def needs_tools(harmless: Schema) -> Schema:
    """A `tool_choice` that isn't like that needs tools."""
    return either(maybe("tool_choice", harmless), has("tools", {"type": "array", "minItems": 1}))


def excludes(one: str, other: str) -> Schema:
    """Two fields of which one may be there, null apart."""
    return either(maybe(one, {"type": "null"}), maybe(other, {"type": "null"}))


# --- chat ----------------------------------------------------------------------------------------------------


def messages(*, nullable_list: bool) -> Schema:
    """A conversation."""
    found: Schema = {"type": "array", "items": ref("Message"), "minItems": 1}
    return nullable(found) if nullable_list else found


def content_part() -> Schema:
    """Text: nothing else is served."""
    text, refusal = ({"type": {"const": kind}, kind: _TEXT} for kind in ("text", "refusal"))
    return {"anyOf": [thing(text, {"refusal": _MAYBE}), thing(refusal, {"text": _MAYBE})]}


def message() -> Schema:
    """A chat message. Calls are the assistant's; who can say nothing else needs content."""
    called = thing({"name": _NAME}, {"arguments": {"type": ["string", "object"]}})
    calls = [
        thing({"id": _SOME, "function": called}, {"type": {"const": FUNCTION}}),
        thing({"id": _SOME, "type": {"const": CUSTOM}, CUSTOM: thing({"name": _NAME, "input": _TEXT})}),
    ]
    texts = ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal")
    described = thing(
        {"role": _TEXT},
        {
            "content": {"anyOf": [_TEXT, {"type": "array", "items": ref("ContentPart")}, {"type": "null"}]},
            "tool_calls": nullable({"type": "array", "items": {"anyOf": calls}, "maxItems": MAX_CALLS}),
            "function_call": nullable(called),
            "audio": {"type": "null"},
            **dict.fromkeys(texts, _MAYBE),
        },
    )
    some = {"type": "array", "minItems": 1}
    no_calls = {"type": ["array", "null"], "maxItems": 0}
    rules = [
        needs("tool_calls", some, "role", {"const": "assistant"}),
        needs("function_call", {"type": "object"}, "role", {"const": "assistant"}),
        needs("role", {"enum": list(NEED_CONTENT)}, "content", {"not": {"type": "null"}}),
        needs("role", {"const": "function"}, "name", _NAME),
        either(maybe("tool_calls", no_calls), maybe("function_call", {"type": "null"})),
    ]
    return {**described, "allOf": rules}


def _function() -> Schema:
    return thing({"name": _NAME}, {"description": _MAYBE, "strict": _FLAG, "parameters": _PARAMETERS})


def tools() -> Schema:
    """Functions, and custom tools with a text for an input."""
    grammar = thing({"syntax": {"const": "regex"}, "definition": _TEXT})
    custom = thing({"name": _NAME}, {"description": _MAYBE, "format": _custom_format({GRAMMAR: grammar})})
    kinds = [
        thing({FUNCTION: _function()}, {"type": {"const": FUNCTION}}),
        thing({"type": {"const": CUSTOM}, CUSTOM: custom}),
    ]
    return {"type": "array", "items": {"anyOf": kinds}, "maxItems": MAX_TOOLS}


def _custom_format(with_grammar: dict[str, Schema]) -> Schema:
    free, bound = thing({"type": {"const": "text"}}), thing({"type": {"const": GRAMMAR}, **with_grammar})
    return {"anyOf": [free, bound, {"type": "null"}]}


def tool_choice() -> Schema:
    """Whether, and which of them."""
    named = [thing({"type": {"const": kind}, kind: thing({"name": _NAME})}) for kind in (FUNCTION, CUSTOM)]
    allowed = thing({"type": {"const": ALLOWED}, ALLOWED: _allowed(named)})
    return nullable({"enum": ["none", "auto", "required"]}, *named, allowed)


def _allowed(named: list[Schema]) -> Schema:
    tools = {"type": "array", "items": {"anyOf": named}, "minItems": 1}
    return thing({"mode": {"enum": ["auto", "required"]}, "tools": tools})


def functions() -> Schema:
    """What tools were called before."""
    return {"type": "array", "items": _function(), "maxItems": MAX_TOOLS}


def function_call() -> Schema:
    """What `tool_choice` was called before."""
    return nullable({"enum": list(AUTO)}, thing({"name": _NAME}))


# --- forms ---------------------------------------------------------------------------------------------------


def response_format() -> Schema:
    """OpenAI's. A schema only with its type."""
    *others, with_schema = get_args(FormatType)
    body = has("schema", {"type": ["object", "boolean"]})
    without_body: Schema = {"properties": {"type": {"enum": others}, "json_schema": {"type": "null"}}}
    with_body = thing({"type": {"const": with_schema}, "json_schema": body})
    return {"allOf": [ref("ResponseFormat"), {"anyOf": [without_body, with_body]}]}


def text_format() -> Schema:
    """That of `/v1/responses`."""
    *others, with_schema = get_args(FormatType)
    extras: dict[str, Schema] = {"name": _MAYBE, "description": _MAYBE, "strict": _FLAG}
    free = {"schema": {"type": ["object", "null"]}, **extras}
    return {
        "anyOf": [
            thing({"type": {"enum": others}}, free),
            thing({"type": {"const": with_schema}, "schema": {"type": "object"}}, extras),
        ]
    }


def output_format() -> Schema:
    """Anthropic's."""
    return thing({"type": {"const": "json_schema"}, "schema": {"type": "object"}})


def structured_outputs(text: Schema, choices: Schema) -> Schema:
    """vLLM's. `text`: what a regular expression or a grammar is."""
    fields = {"regex": text, "grammar": text, "choice": choices}
    return {"allOf": [ref("StructuredOutputs"), {"properties": fields}]}


def repetition_detection(most: int) -> Schema:
    """Off, whatever the others say, or in range."""
    size = {"type": "integer", "minimum": 1, "maximum": most}
    count = {"type": "integer", "minimum": 2, "maximum": most}
    off: Schema = {"properties": {"max_pattern_size": {"const": 0}}}
    on: Schema = {
        "required": ["max_pattern_size", "min_count"],
        "properties": {"max_pattern_size": size, "min_pattern_size": {**size, "minimum": 0}, "min_count": count},
    }
    return {"allOf": [ref("RepetitionDetection"), {"anyOf": [off, on]}]}


# --- Anthropic's ---------------------------------------------------------------------------------------------


def _text_block() -> Schema:
    return thing({"type": {"const": "text"}, "text": _TEXT}, _other_block_fields("text"))


def _other_block_fields(*own: str) -> dict[str, Schema]:
    """The types of the fields that a block doesn't need: a block of one type may carry those of others."""
    texts = dict.fromkeys(("text", "id", "name", "tool_use_id", "thinking"), _MAYBE)
    fields: dict[str, Schema] = {**texts, "input": {"type": ["object", "null"]}, "is_error": _FLAG}
    return {name: like for name, like in fields.items() if name not in own}


def _blocks(role: str) -> list[Schema]:
    if role == "user":
        content = {"anyOf": [_TEXT, {"type": "array", "items": _text_block()}, {"type": "null"}]}
        needed = {"type": {"const": "tool_result"}, "tool_use_id": _SOME}
        return [_text_block(), thing(needed, {"content": content, **_other_block_fields("tool_use_id")})]
    call = {"type": {"const": "tool_use"}, "id": _SOME, "name": _NAME, "input": {"type": "object"}}
    return [
        _text_block(),
        thing(call, _other_block_fields(*call)),
        thing({"type": {"enum": ["thinking", "redacted_thinking"]}}, _other_block_fields()),
    ]


def turn() -> Schema:
    """A message; which blocks it may have depends on whose it is."""

    def of(role: str) -> Schema:
        blocks = {"type": "array", "items": {"anyOf": _blocks(role)}}
        return thing({"role": {"const": role}, "content": {"anyOf": [_TEXT, blocks]}})

    return {"anyOf": [of("user"), of("assistant")]}


def turns() -> Schema:
    """A conversation."""
    return {"type": "array", "items": ref("Turn"), "minItems": 1}


def system() -> Schema:
    """What the model is told first."""
    return nullable(_TEXT, {"type": "array", "items": _text_block()})


def anthropic_tool() -> Schema:
    """A tool of the client's."""
    optional: dict[str, Schema] = {
        "type": {"enum": [None, "custom"]},
        "description": _MAYBE,
        "input_schema": _PARAMETERS,
    }
    return thing({"name": _NAME}, optional)


def anthropic_tool_choice() -> Schema:
    """Whether, and which of them."""
    extras: dict[str, Schema] = {"disable_parallel_tool_use": _FLAG}
    return {
        "anyOf": [
            thing({"type": {"enum": ["auto", "any", "none"]}}, {**extras, "name": _MAYBE}),
            thing({"type": {"const": "tool"}, "name": _NAME}, extras),
        ]
    }


def thinking() -> Schema:
    """Whether to think first."""
    budget: Schema = {"type": ["integer", "null"]}
    return thing({"type": {"enum": ["enabled", "adaptive", "disabled"]}}, {"budget_tokens": budget})


# --- responses -----------------------------------------------------------------------------------------------


def response_input() -> Schema:
    """Text or items."""
    part = {
        "anyOf": [
            thing({"type": {"enum": list(TEXT_PARTS)}, "text": _TEXT}, {"refusal": _MAYBE}),
            thing({"type": {"const": "refusal"}, "refusal": _TEXT}, {"text": _MAYBE}),
        ]
    }
    content: Schema = {"anyOf": [_TEXT, {"type": "array", "items": part}]}
    any_part = thing({"type": _TEXT}, {"text": _MAYBE, "refusal": _MAYBE})
    unread: Schema = {"anyOf": [_TEXT, {"type": "array", "items": any_part}, {"type": "null"}]}
    called = {"call_id": _SOME, "name": _NAME}
    items = [
        thing({"role": {"enum": list(ROLES)}, "content": content}, {"type": {"const": "message"}}),
        thing({"type": {"const": "function_call"}, **called, "arguments": _TEXT}),
        thing({"type": {"const": "custom_tool_call"}, **called, "input": _TEXT}),
        *(
            thing({"type": {"const": kind}, "call_id": _SOME, "output": content})
            for kind in ("function_call_output", "custom_tool_call_output")
        ),
        thing({"type": {"const": "reasoning"}}, {"content": unread}),
    ]
    for item in items:
        for name in ("role", "call_id", "name", "arguments", "input"):
            item["properties"].setdefault(name, _MAYBE)
        for name in ("output", "content"):
            item["properties"].setdefault(name, unread)
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": items}, "minItems": 1}]}


def response_tools() -> Schema:
    """Those of chat, one level flatter."""
    function = {"description": _MAYBE, "strict": _FLAG, "parameters": _PARAMETERS}
    grammar = {"syntax": {"const": "regex"}, "definition": _TEXT}
    custom = {"description": _MAYBE, "format": _custom_format(grammar)}
    kinds = [
        thing({"type": {"const": FUNCTION}, "name": _NAME}, function),
        thing({"type": {"const": CUSTOM}, "name": _NAME}, custom),
    ]
    return {"type": "array", "items": {"anyOf": kinds}, "maxItems": MAX_TOOLS}


def response_tool_choice() -> Schema:
    """Whether, and which of them."""
    named = thing({"type": {"enum": [FUNCTION, CUSTOM]}, "name": _NAME})
    allowed = _allowed([named])
    allowed["properties"]["type"] = {"const": ALLOWED}
    allowed["required"].append("type")
    return nullable({"enum": ["none", "auto", "required"]}, named, allowed)


def reasoning() -> Schema:
    """How much to think, in `/v1/responses`; the rest changes nothing."""
    return nullable({"type": "object", "properties": {"effort": {"enum": [None, *EFFORTS]}}})
