"""Which form a request wants its answer to have: the fields of OpenAI, vLLM and SGLang as one kind of grammar.

Whether a grammar can be compiled is `services.grammar_checker`'s question; here it is only found, and measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.grammar import JSON_SCHEMA, REGEX
from services.errors import invalid
from services.schema import ResponseFormat, Sampling

MAX_CHARACTERS = 65_536
MAX_CHOICES = 1024
ANY_GRAMMAR = "grammar"
"""Lark, or the EBNF of llama.cpp (GBNF): told apart, and made Lark, by who checks it."""
_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must be: a text of this kind (`json_schema`, `regex` or `grammar`), and the field that said so."""

    kind: str
    text: str
    param: str


def form_of(request: Sampling) -> Form | None:
    """The form that a request asks for; None if it leaves it open. ApiError 400 if it asks for several."""
    forms = [form for form in _forms(request) if form is not None]
    if len(forms) > 1:
        names = " and ".join(dict.fromkeys(form.param for form in forms))
        raise invalid(f"{names}: an answer can have one form only; send one of them", forms[0].param)
    if not forms:
        return None
    (form,) = forms
    if len(form.text) > MAX_CHARACTERS:
        raise invalid(
            f"{form.param}: {len(form.text)} characters, at most {MAX_CHARACTERS} are allowed",
            form.param,
            "out_of_range",
        )
    if request.allowed_token_ids is not None:
        raise invalid(f"allowed_token_ids: not together with {form.param}, which says what is allowed", form.param)
    return form


def _forms(request: Sampling) -> Sequence[Form | None]:
    forms = [_response_format(request.response_format)]
    asked = request.structured_outputs
    if asked is not None:
        outer = "structured_outputs"
        forms += [
            _schema(asked.json, f"{outer}.json"),
            _text(REGEX, asked.regex, f"{outer}.regex"),
            _choice(asked.choice, f"{outer}.choice"),
            _text(ANY_GRAMMAR, asked.grammar, f"{outer}.grammar"),
            Form(JSON_SCHEMA, _ANY_OBJECT, f"{outer}.json_object") if asked.json_object else None,
        ]
    return [
        *forms,
        _schema(request.guided_json, "guided_json"),
        _text(REGEX, request.guided_regex, "guided_regex"),
        _choice(request.guided_choice, "guided_choice"),
        _text(ANY_GRAMMAR, request.guided_grammar, "guided_grammar"),
        _schema(request.json_schema, "json_schema"),
        _text(REGEX, request.regex, "regex"),
        _text(ANY_GRAMMAR, request.ebnf, "ebnf"),
    ]


def _response_format(asked: ResponseFormat | None) -> Form | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise invalid("response_format.json_schema: needs the type 'json_schema'", "response_format")
        return Form(JSON_SCHEMA, _ANY_OBJECT, "response_format") if asked.type == "json_object" else None
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise invalid("response_format.json_schema.schema: required with the type 'json_schema'", "response_format")
    return _schema(asked.json_schema.schema, "response_format")


def _schema(value: dict[str, Any] | bool | str | None, param: str) -> Form | None:
    if value is None:
        return None
    return Form(JSON_SCHEMA, value if isinstance(value, str) else msgspec.json.encode(value).decode(), param)


def _text(kind: str, value: str | None, param: str) -> Form | None:
    if value is None:
        return None
    if not value.strip():
        raise invalid(f"{param}: must not be empty", param)
    return Form(kind, value, param)


def _choice(value: list[str] | None, param: str) -> Form | None:
    if value is None:
        return None
    if not 1 <= len(value) <= MAX_CHOICES:
        raise invalid(f"{param}: {len(value)} choices, 1 to {MAX_CHOICES} are allowed", param, "out_of_range")
    if "" in value:
        raise invalid(f"{param}[{value.index('')}]: a choice must not be empty", param)
    return Form(REGEX, "|".join(map(re.escape, value)), param)
