"""Tool calls as a Python list: `[get_weather(city="Paris", days=3), …]`, which Llama 3.2 and 4 may write."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Generator

from services.tools.parser import NAME, Parser, Steps, dumps

START, END = "<|python_start|>", "<|python_end|>"
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_CLOSES = {"(": ")", "[": "]", "{": "}"}


class Pythonic(Parser):
    """A list that begins the answer or follows the start marker, of calls with keywords to functions of the request.

    An argument goes out when its last character is there, as JSON. What is no literal becomes a string.
    """

    markers = (START, END)

    def parse(self) -> Generator[None, None, None]:
        """A list at the beginning, then content up to a marker and a list behind it."""
        marker = ""
        while True:
            self.pin()
            yield from self.blanks()
            yield from self.literal(START)
            if (yield from self._list()):
                yield from self.end(END)
            elif marker:
                self.no_call(marker)
            else:
                self.back()
            marker = yield from self.content_until(START)
            if not marker:
                return
            self._at -= len(marker)

    def _list(self) -> Steps:
        """`[f(…), g(…)]`. False, and nothing reported, unless it begins with a call."""
        yield from self.blanks()
        if not (yield from self.literal("[")):
            return False
        found = False
        while True:
            yield from self.blanks()
            if not (yield from self._call()):
                if found:
                    self.back()
                return found
            found = True
            if not self.sink.complete:
                return True
            self.pin()
            yield from self.blanks()
            if (yield from self.literal("]")):
                self.unpin()
                return True
            if not (yield from self.literal(",")):
                self.back()
                return True

    def _call(self) -> Steps:
        """`f(a=1, …)`. Its name goes out with the first keyword: a call without any may be something else."""
        name = yield from self.match(NAME)
        if name not in self.tools or not (yield from self.literal("(")):
            return False
        begun = False
        while True:
            yield from self.blanks()
            if (yield from self.literal(")")):
                break
            keyword = yield from self.match(_KEYWORD)
            yield from self.blanks()
            if not keyword or not (yield from self.literal("=")):
                if not begun:
                    return False
                yield from self.close_call()
                return True
            if not begun:
                self.unpin()
                self.sink.begin(name)
            value = yield from self._argument()
            if value is None:
                return True
            self.sink.arguments(("{" if not begun else ", ") + f"{dumps(keyword)}: {_as_json(value)}")
            begun = True
            yield from self.literal(",")
        if not begun:
            self.unpin()
            self.sink.begin(name)
        self.sink.arguments("}" if begun else "{}")
        self.sink.end()
        return True

    def _argument(self) -> Generator[None, None, str | None]:
        """The source of one value, up to its comma or bracket; None if it is cut."""
        parts: list[str] = []
        opened: list[str] = []
        quote = ""
        while True:
            character = yield from self.peek()
            if not character:
                return None
            if quote:
                if character == "\\":
                    parts.append(character)
                    self._at += 1
                    character = yield from self.peek()
                    if not character:
                        return None
                elif character == quote:
                    quote = ""
            elif character in "\"'":
                quote = character
            elif character in _CLOSES:
                opened.append(_CLOSES[character])
            elif opened and character == opened[-1]:
                opened.pop()
            elif not opened and character in ",)":
                return "".join(parts).strip()
            parts.append(character)
            self._at += 1


def _as_json(source: str) -> str:
    """A literal of Python or JSON as JSON; anything else as a string."""
    try:
        return dumps(json.loads(source))
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return dumps(ast.literal_eval(source))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return dumps(source)
