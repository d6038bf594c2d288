"""Grammars of answers that must be calls, or whose calls must keep their schemas, in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from services.tools import hermes, mistral, qwen_coder, reasoning
from services.tools.request import ToolUse

Mark = Callable[[str], str]
"""How a marker is written in the grammar: as a text, or as the special token that it is."""

MARKED = ("hermes", "mistral", "qwen3_coder")
"""Formats in which a marker announces each call."""
_SPACE = r"[ \t\n\r]{1,100}"
_ANY = "/(?s:.*)/"
_COMMA, _LINE = '", "', r'"\n"'


class AnswerGrammar:
    """Writes the grammar of one request. `mark` tells how markers are written.

    `listed`: Mistral's models of version 11 and later name a function before its arguments, earlier ones list objects.
    """

    def __init__(self, parser: str, mark: Mark, *, listed: bool = True) -> None:
        self._parser = parser
        self._mark = mark
        self._listed = listed
        self._rules: list[str] = []

    def lark(self, use: ToolUse | None, form: str = "", *, thinks: bool = False, inside: bool = False) -> str:
        """An answer that is calls or, if there is one, of a form: rules of which the first is named `form`.

        `thinks`: thoughts may come first; `inside`: they do, and the prompt has begun them.
        """
        answers: list[str] = []
        if use is not None:
            only_calls = use.forced or bool(form)
            self._call(use, marked=not only_calls)
            answers.append(self._only_calls(use) if only_calls else self._free())
        if form:
            answers.append("form")
            self._rules.append(form)
        start = "start: answer"
        if thinks:
            start = f"start: {'thoughts' if inside else '(' + self._mark(reasoning.OPEN) + ' thoughts)?'} BLANKS answer"
            self._rules += [self._up_to("thoughts", reasoning.CLOSE), r"BLANKS: /[ \n]{0,4}/"]
        return "\n".join([start, f"answer: {' | '.join(answers)}", *self._rules]) + "\n"

    def _only_calls(self, use: ToolUse) -> str:
        if self._parser == "pythonic":
            return f'"[" {_several(use, _COMMA)} "]"'
        if self._parser == "mistral":
            return f"{self._mark(mistral.CALLS)} calls" if self._listed else _several(use, "")
        return _several(use, '"; "' if self._parser == "llama3_json" else _LINE)

    def _free(self) -> str:
        """Text, and calls behind their marker that keep their schemas."""
        opened = mistral.CALLS if self._parser == "mistral" else hermes.OPEN
        text = _ANY
        if not _is_token(self._mark(opened)):
            text += f" & ~/(?s:.*){re.escape(opened)}(?s:.*)/"
        self._rules += [self._up_to("before", opened), f"TEXT: {text}"]
        return f"(before {'calls' if self._parser == 'mistral' and self._listed else 'call'})* TEXT?"

    def _up_to(self, rule: str, marker: str) -> str:
        """A rule for text up to and with a marker."""
        mark = self._mark(marker)
        return f"{rule}: {_ANY} {mark}" if _is_token(mark) else f"{rule}[suffix={mark}]: {_ANY}"

    def _call(self, use: ToolUse, *, marked: bool) -> None:
        """Adds the rules of a call, of any function that may be called. `marked`: its opening marker was there."""
        bodies = [
            self._body(number, name, schema, name in use.strict)
            for number, (name, schema) in enumerate(use.schemas.items())
        ]
        self._rules += [f"body_{number}: {text}" for number, text in enumerate(bodies)]
        body = " | ".join(f"body_{number}" for number in range(len(bodies)))
        opened = ""
        if self._parser in ("hermes", "qwen3_coder"):
            opened = self._mark(hermes.OPEN)
            body = f"{_LINE} ({body}) {_LINE} {self._mark(hermes.CLOSE)}"
        elif self._parser == "mistral" and not self._listed:
            opened = self._mark(mistral.CALLS)
        self._rules.append(f"call: {body}" if marked or not opened else f"call: {opened} ({body})")
        if self._parser == "mistral" and self._listed:
            self._rules.append(f'calls: " "? "[" {_several(use, _COMMA)} "]"')

    def _body(self, number: int, name: str, schema: Mapping[str, Any], strict: bool) -> str:
        """One function's call without what surrounds calls."""
        if self._parser == "pythonic":
            return self._keywords(number, name, schema, strict)
        if self._parser == "qwen3_coder":
            return self._tags(number, name, schema, strict)
        self._rules.append(f"args_{number}: {_json(schema, strict)}")
        if self._parser == "mistral" and not self._listed:
            call_id = f"({self._mark(mistral.CALL_ID)} /[a-zA-Z0-9]{{9}}/)?"
            return f"{_text(name)} {call_id} {self._mark(mistral.ARGS)} args_{number}"
        key = "parameters" if self._parser == "llama3_json" else "arguments"
        begin = '{"name": ' + dumps(name) + f', "{key}": '
        return f'{_text(begin)} args_{number} "}}"'

    def _keywords(self, number: int, name: str, schema: Mapping[str, Any], strict: bool) -> str:
        """`f(a=1, b=2)`: required ones first, then the others or not."""
        required: list[str] = []
        optional: list[str] = []
        for place, (key, inner, needed) in enumerate(_properties(schema)):
            if not key.isidentifier():
                continue
            rule = f"arg_{number}_{place}"
            self._rules.append(f"{rule}: {_text(key + '=')} {_json(inner, strict)}")
            (required if needed else optional).append(rule)
        if required:
            inside = f" {_COMMA} ".join(required) + _perhaps(optional)
        else:
            tails = [rule + _perhaps(optional[place + 1 :]) for place, rule in enumerate(optional)]
            inside = f"({' | '.join(tails)})?" if tails else ""
        return f'{_text(name + "(")} {inside} ")"'

    def _tags(self, number: int, name: str, schema: Mapping[str, Any], strict: bool) -> str:
        """`<function=f>` with a tag for each argument."""
        parts = [_text(f"{qwen_coder.FUNCTION}{name}>\n")]
        end = _text("\n" + qwen_coder.END_PARAMETER)
        for place, (key, inner, needed) in enumerate(_properties(schema)):
            rule = f"arg_{number}_{place}"
            opened = _text(f"{qwen_coder.PARAMETER}{key}>\n")
            if inner.get("type") == "string" and "enum" not in inner:
                self._rules.append(f"{rule}_value[suffix={end}]: {_ANY}")
                self._rules.append(f"{rule}: {opened} {rule}_value {_LINE}")
            else:
                values = inner.get("enum")
                if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
                    value = "(" + " | ".join(map(_text, values)) + ")"
                else:
                    value = _json(inner, strict)
                self._rules.append(f"{rule}_value: {value}")
                self._rules.append(f"{rule}: {opened} {rule}_value {end} {_LINE}")
            parts.append(rule if needed else f"{rule}?")
        return " ".join([*parts, _text(qwen_coder.END_FUNCTION)])


def enforceable(parser: str, use: ToolUse) -> bool:
    """Whether a request needs a grammar: calls that must come, or strict or limited ones in a format that marks them.

    In the other formats what calls a function that may not be called is no call.
    """
    return use.forced or ((bool(use.strict) or use.limited) and parser in MARKED)


def keeps_patterns(parser: str, use: ToolUse) -> bool:
    """Whether strings in strict calls keep a pattern. Qwen3-Coder's are texts between tags."""
    return parser != "qwen3_coder" and (use.forced or parser in MARKED)


def dumps(value: Any) -> str:
    """JSON, characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _text(text: str) -> str:
    """A literal in Lark."""
    return dumps(text)


def _several(use: ToolUse, separator: str) -> str:
    return f"call ({separator} call)*" if use.parallel else "call"


def _is_token(mark: str) -> bool:
    return mark.startswith("<[")


def _perhaps(rules: list[str]) -> str:
    return "".join(f" ({_COMMA} {rule})?" for rule in rules)


def _json(schema: Mapping[str, Any], strict: bool) -> str:
    """A value by its schema. Keywords that can't be kept are an error only if the client asked for strictness."""
    options = {"x-guidance": {"lenient": not strict, "whitespace_pattern": _SPACE}}
    return f"%json {dumps({**schema, **options})}"


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, schema and necessity of each parameter; shared definitions go along with each."""
    properties = schema.get("properties")
    required = schema.get("required")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for key, inner in properties.items() if isinstance(properties, dict) else ():
        needed = isinstance(required, list) and key in required
        yield key, {**shared, **(inner if isinstance(inner, dict) else {})}, needed
