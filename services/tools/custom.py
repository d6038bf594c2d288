"""Custom tools, whose input is a text and no JSON: functions with one string for the model, a text for the client.

A regular expression for the input becomes the string's pattern. A Lark grammar can't be kept inside of a JSON string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from services.errors import invalid, unsupported
from services.tools.calls import CallDelta

INPUT = "input"
_OPENINGS = ('{"input":"', '"')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PLAIN = re.compile(r'[^"\\]+')
_UNICODE = re.compile(r"[0-9a-fA-F]{4}")


def as_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The function that stands for a custom tool. ApiError 400 for a format that can't be kept."""
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        raise invalid(f"{where}.custom: an object with a name is required", "tools")
    inner: dict[str, Any] = {"type": "string"}
    pattern = _pattern(custom.get("format"), f"{where}.custom.format")
    if pattern is not None:
        inner["pattern"] = pattern
    schema = {"type": "object", "properties": {INPUT: inner}, "required": [INPUT], "additionalProperties": False}
    described = {} if custom.get("description") is None else {"description": custom["description"]}
    strict = {} if pattern is None else {"strict": True}
    return {"type": "function", "function": {"name": custom.get("name"), **described, "parameters": schema, **strict}}


def _pattern(given: Any, where: str) -> str | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") not in ("text", "grammar"):
        raise invalid(f"{where}.type: must be 'text' or 'grammar'", "tools")
    if given["type"] == "text":
        return None
    grammar = given.get("grammar")
    if not isinstance(grammar, dict) or not isinstance(grammar.get("definition"), str):
        raise invalid(f"{where}.grammar: an object with syntax and definition is required", "tools")
    if grammar.get("syntax") == "lark":
        raise unsupported("tools", f"{where}.grammar.syntax: 'lark' (only 'regex', or no format)")
    if grammar.get("syntax") != "regex":
        raise invalid(f"{where}.grammar.syntax: must be 'regex' or 'lark'", "tools")
    return f"^(?:{grammar['definition']})$"


def as_arguments(text: str) -> str:
    """The arguments that stand for an input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class Inputs:
    """Replaces the arguments of calls of custom tools by their inputs, as they come."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._readers: dict[int, InputReader] = {}

    def replaced(self, calls: Iterable[CallDelta]) -> list[CallDelta]:
        """The same news, without pieces that add nothing to an input."""
        found: list[CallDelta] = []
        for call in calls:
            if call.id and call.name in self._names:
                self._readers[call.index] = InputReader()
            reader = self._readers.get(call.index)
            if reader is not None:
                call = replace(call, arguments=reader.feed(call.arguments), custom=True)
            if reader is None or call.id or call.arguments:
                found.append(call)
        return found


class InputReader:
    """Reads the arguments of one call, cut anywhere. What doesn't begin as they should is the input as it is."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"

    def feed(self, text: str) -> str:
        """What is new of the input."""
        self._held += text
        if self._state == "before":
            self._look()
        if self._state == "raw":
            text, self._held = self._held, ""
            return text
        return self._string() if self._state == "inside" else ""

    def _look(self) -> None:
        """Whether this is the object with the input, or the input as a JSON string, once that is certain."""
        begun = ""
        for place, character in enumerate(self._held, 1):
            begun += character.strip()
            if begun in _OPENINGS:
                self._held, self._state = self._held[place:], "inside"
                return
        if begun != "{}" and not any(opening.startswith(begun) for opening in _OPENINGS):
            self._state = "raw"

    def _string(self) -> str:
        """Characters of the string, up to its end or an escape that isn't whole."""
        found: list[str] = []
        at = 0
        while at < len(self._held):
            if plain := _PLAIN.match(self._held, at):
                found.append(plain[0])
                at = plain.end()
            elif self._held[at] == '"':
                self._state, at = "after", len(self._held)
            elif (escape := self._escape(at)) is None:
                break
            else:
                character, at = escape
                found.append(character)
        self._held = self._held[at:]
        return "".join(found)

    def _escape(self, at: int) -> tuple[str, int] | None:
        """The character that an escape stands for, and where it ends; None if it isn't whole."""
        kind = self._held[at + 1 : at + 2]
        if not kind:
            return None
        if kind != "u":
            return _ESCAPES.get(kind, kind), at + 2
        if len(self._held) < at + 6:
            return None
        digits = _UNICODE.match(self._held, at + 2)
        if digits is None:
            return "u", at + 2
        code = int(digits[0], 16)
        if not 0xD800 <= code <= 0xDFFF:
            return chr(code), at + 6
        if code <= 0xDBFF:
            rest = self._held[at + 6 : at + 12]
            if len(rest) < 6 and "\\u".startswith(rest[:2]):
                return None
            low = _UNICODE.match(rest, 2) if rest.startswith("\\u") else None
            if low is not None and 0xDC00 <= int(low[0], 16) <= 0xDFFF:
                return chr(0x10000 + ((code - 0xD800) << 10) + int(low[0], 16) - 0xDC00), at + 12
        return "\ufffd", at + 6
