"""Finds where a JSON value ends in text that comes in pieces. Checks its structure, not every letter of it."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_BETWEEN = re.compile(r"[-+.0-9a-zA-Z:, \t\r\n]*")
_BLANKS = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
_CLOSES = {"{": "}", "[": "]"}


class JsonValue:
    """One value. `take` is fed until `done` or `broken`.

    A control character inside a string, which models write and JSON forbids, becomes its escape.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.kind = ""
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._letters = 0

    def take(self, text: str, at: int) -> tuple[str, int]:
        """The part of `text` from `at` on that belongs to the value, and where it ends."""
        parts: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            part, at = self._string(text, at) if self._in_string else self._structure(text, at)
            parts.append(part)
        return "".join(parts), at

    def close(self) -> None:
        """The input is over: a number or a word ends with it, anything else is cut."""
        if not self.done:
            self.done = self.kind == "scalar"
            self.broken = not self.done

    def _string(self, text: str, at: int) -> tuple[str, int]:
        if self._escaped:
            self._escaped = False
            return text[at], at + 1
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if end > at:
            return text[at:end], end
        character = text[at]
        if character == '"':
            self._in_string = False
            self.done = not self._open
        elif character == "\\":
            self._escaped = True
        else:
            character = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character, f"\\u{ord(character):04x}")
        return character, at + 1

    def _structure(self, text: str, at: int) -> tuple[str, int]:
        character = text[at]
        if not self.kind:
            self.kind = {"{": "object", "[": "array", '"': "string"}.get(character, "scalar")
        if self.kind == "scalar":
            end = _SCALAR.match(text, at).end()  # type: ignore[union-attr]
            self._letters += end - at
            self.done = end < len(text) and self._letters > 0
            self.broken = end < len(text) and not self._letters
            return text[at:end], end
        if character == '"':
            self._in_string = True
        elif character in _CLOSES:
            self._open.append(_CLOSES[character])
        elif character in "}]":
            if self._open.pop() != character:
                self.broken = True
                return "", at
            self.done = not self._open
        else:
            end = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if end == at:
                self.broken = True
            return text[at:end], end
        return character, at + 1


def after_blanks(text: str, at: int) -> int:
    """Where the blanks end that begin at `at`."""
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]
