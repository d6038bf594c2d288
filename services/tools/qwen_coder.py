"""Tool calls as Qwen3-Coder writes them: `<function=name>` with one `<parameter=key>` for each argument."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator
from typing import Any

from services.tools.hermes import CLOSE, OPEN
from services.tools.parser import NAME, Parser, Steps, dumps, nowhere

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_KEY = re.compile(r"[^<>\n]{1,256}")


class QwenCoder(Parser):
    """Values are text between tags, of the types that the schema says. A string goes out as it comes, others whole."""

    markers = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)

    def parse(self) -> Generator[None, None, None]:
        """Content up to a call, with or without the outer tags, then the call or more content."""
        while marker := (yield from self.content_until(OPEN, FUNCTION)):
            self._at -= len(marker)
            self.pin()
            if marker == OPEN:
                yield from self.literal(OPEN)
                yield from self.blanks()
            if (yield from self.literal(FUNCTION)) and (yield from self._call()):
                yield from self.end(CLOSE)
            else:
                self.no_call(marker)

    def _call(self) -> Steps:
        """`name>`, parameters, `</function>`. False, and nothing reported, if there is no name."""
        name = yield from self.match(NAME)
        if not name or not (yield from self.literal(">")):
            return False
        self.unpin()
        self.sink.begin(name)
        self.sink.arguments("{")
        separator = ""
        while True:
            yield from self.blanks()
            if (yield from self.literal(END_FUNCTION)):
                break
            if not (yield from self.literal(PARAMETER)):
                if not (yield from self.peek()):
                    return True  # cut
                # Text between parameters belongs nowhere.
                found = yield from self.until((PARAMETER, END_FUNCTION, CLOSE), nowhere)
                if found in (END_FUNCTION, CLOSE):
                    break
                if not found:
                    return True
            key = (yield from self.match(_KEY)).strip()
            if not (yield from self.literal(">")):
                continue
            self.sink.arguments(f"{separator}{dumps(key)}: ")
            separator = ", "
            if not (yield from self._value(_types(self.tools.get(name, {}), key))):
                return True
        self.sink.arguments("}")
        self.sink.end()
        return True

    def _value(self, types: frozenset[str]) -> Steps:
        """One value up to its end tag, without the line breaks that set it off. False if it is cut."""
        yield from self.literal("\n")
        ends = ("\n" + END_PARAMETER, END_PARAMETER)
        if types == {"string"}:
            self.sink.arguments('"')
            if not (yield from self.until(ends, lambda text: self.sink.arguments(dumps(text)[1:-1]))):
                return False
            self.sink.arguments('"')
            return True
        parts: list[str] = []
        found = yield from self.until(ends, parts.append)
        if found:
            self.sink.arguments(_as_json("".join(parts), types))
        return bool(found)


def _types(schema: Any, key: str) -> frozenset[str]:
    """What a parameter may be, by its schema; empty if that doesn't say."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    about = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(about, dict):
        return frozenset()
    kinds = about.get("type", ())
    found = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
    if not found and isinstance(about.get("enum"), list) and all(isinstance(item, str) for item in about["enum"]):
        return frozenset({"string"})
    return frozenset(found)


def _as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON: what parses, if the schema allows it, else the text as a string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text.strip())
            if "string" in types and isinstance(value, str):
                value = text
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = text
    if types and "string" in types and not _fits(value, types):
        value = text
    try:
        return dumps(value)
    except (ValueError, TypeError, RecursionError):
        return dumps(text)


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}.get(
        type(value), "null"
    )
    return kind in types or (kind == "integer" and "number" in types)
