"""What all tool-call parsers share: reading text that comes in pieces, and undoing what turned out to be no call.

A parser is a generator that yields where it needs more text. It decides only by text it has seen, never by where the
text was cut, so a stream and a whole answer give the same.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, ClassVar

from services.tools.calls import Sink
from services.tools.json_value import JsonValue, after_blanks

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Steps = Generator[None, None, bool]
"""Reads on; tells whether what was looked for was there."""

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


class Parser(ABC):
    """Finds tool calls in one answer. `tools` maps each function's name to its parameters' schema.

    `hidden` are markers that are special tokens of the model: if they mark no call, they vanish.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """What a tokenizer may have as special tokens and this parser has to see."""

    def __init__(self, sink: Sink, tools: Mapping[str, Mapping[str, Any]], hidden: Iterable[str] = ()) -> None:
        self.sink = sink
        self.tools = tools
        self._hidden = tuple(hidden)
        self._text = ""
        self._at = 0
        self._pinned = False
        self._closed = False
        self._steps = self.parse()
        self._step()

    def feed(self, text: str) -> None:
        """The next text of the answer. What it holds goes to the sink."""
        if not text:
            return
        self._text = (self._text if self._pinned else self._text[self._at :]) + text
        self._at = self._at if self._pinned else 0
        self._step()

    def finish(self) -> None:
        """The answer is over: what was held back goes out."""
        self._closed = True
        self._step()
        self.sink.finish()

    @abstractmethod
    def parse(self) -> Generator[None, None, None]:
        """Read the answer to its end."""

    def _step(self) -> None:
        next(self._steps, None)

    # --- reading ----------------------------------------------------------------------------------------------

    def pin(self) -> None:
        """Remember this place; what comes may have to be read again."""
        self._text, self._at, self._pinned = self._text[self._at :], 0, True

    def unpin(self) -> None:
        """What was read since `pin` is a call."""
        self._pinned = False

    def back(self) -> None:
        """What was read since `pin` is no call: read it again."""
        self._at, self._pinned = 0, False

    def peek(self) -> Generator[None, None, str]:
        """The next character, "" at the end."""
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def blanks(self) -> Generator[None, None, None]:
        """Skip blanks."""
        while True:
            self._at = after_blanks(self._text, self._at)
            if self._at < len(self._text) or self._closed:
                return
            yield

    def literal(self, wanted: str) -> Steps:
        """Skip this text if it is next."""
        while True:
            have = self._text[self._at : self._at + len(wanted)]
            if have == wanted:
                self._at += len(wanted)
                return True
            if self._closed or not wanted.startswith(have):
                return False
            yield

    def end(self, wanted: str) -> Generator[None, None, None]:
        """Skip blanks and this text, if they are next."""
        self.pin()
        yield from self.blanks()
        if (yield from self.literal(wanted)):
            self.unpin()
        else:
            self.back()

    def match(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Skip and return what the pattern matches here; it must go on matching as long as it may."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is None:
                if self._at < len(self._text) or self._closed:
                    return ""
            elif found.end() < len(self._text) or self._closed:
                self._at = found.end()
                return found.group()
            yield

    def until(self, markers: Iterable[str], emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Pass text on up to the first of the markers, and skip that; "" if none comes."""
        markers = tuple(markers)
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            if found:
                at, marker = min(found)
                emit(self._text[self._at : at])
                self._at = at + len(marker)
                return marker
            cut = len(self._text) if self._closed else _cut(self._text, self._at, markers)
            if cut > self._at:
                emit(self._text[self._at : cut])
                self._at = cut
            if self._closed:
                return ""
            yield

    def content_until(self, *markers: str) -> Generator[None, None, str]:
        """Pass content on up to the first of the markers, without hidden ones."""
        while True:
            found = yield from self.until((*markers, *self._hidden), self.sink.content)
            if not found or found in markers:
                return found

    def no_call(self, marker: str) -> None:
        """What began with `marker` is content: give the marker out, and read on after it."""
        self.back()
        self._at = len(marker)
        if marker not in self._hidden:
            self.sink.content(marker)

    def close_call(self, *ends: str) -> Generator[None, None, None]:
        """Skip what ends a call. If it is cut or broken, all text up to there belongs to its arguments."""
        if self.sink.complete:
            for end in ends:
                yield from self.end(end)
        elif (yield from self.until(ends, self.sink.arguments)):
            self.sink.end()

    # --- JSON -------------------------------------------------------------------------------------------------

    def value(self, emit: Callable[[str], None]) -> Steps:
        """Pass one JSON value on as it comes. False if it is cut or its structure is broken."""
        value = JsonValue()
        while True:
            part, self._at = value.take(self._text, self._at)
            emit(part)
            if value.done or value.broken:
                return value.done
            if self._closed:
                value.close()
                continue
            yield

    def string(self) -> Generator[None, None, str | None]:
        """Skip and return a JSON string; None if there is none."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        whole = yield from self.value(parts.append)
        try:
            return str(json.loads("".join(parts))) if whole else None
        except ValueError:
            return None

    def call_object(self, *, marked: bool) -> Steps:
        """Report one `{"name": …, "arguments": {…}}`, pinned by the caller. False, and nothing reported, if it is none.

        An object that no marker announces must name a function of the request and have arguments.
        """
        if not (yield from self.literal("{")):
            return False
        name, begun, early = "", False, ""
        while True:
            yield from self.blanks()
            key = yield from self.string()
            yield from self.blanks()
            if key is None or not (yield from self.literal(":")) or not (marked or begun or key in _KEYS):
                break
            yield from self.blanks()
            if key == "name" and not begun:
                name = (yield from self.string()) or ""
                if not NAME.fullmatch(name) or (not marked and name not in self.tools):
                    break
            elif key in _ARGUMENTS and name and not begun:
                if not marked and (yield from self.peek()) != "{":
                    break
                begun = True
                if not (yield from self._begin_with_value(name)):
                    return True
            else:
                parts: list[str] = []
                if not (yield from self.value(parts.append)):
                    break
                if key in _ARGUMENTS:
                    early = "".join(parts)
            yield from self.blanks()
            if (yield from self.literal(",")):
                continue
            if not begun and (yield from self.literal("}")) and name and (early or marked) and _is_json(early or "{}"):
                self._whole_call(name, early)
                return True
            if begun:
                yield from self.literal("}")
            break
        if begun:
            self.sink.end()
        return begun

    def _begin_with_value(self, name: str) -> Steps:
        """Begin a call at its arguments; False if they are cut or broken."""
        first = yield from self.peek()
        if first == "{":
            self.unpin()
            self.sink.begin(name)
            return (yield from self.value(self.sink.arguments))
        parts: list[str] = []
        whole = yield from self.value(parts.append)
        self._whole_call(name, "".join(parts), ended=False)
        return whole

    def _whole_call(self, name: str, arguments: str, *, ended: bool = True) -> None:
        self.unpin()
        self.sink.begin(name)
        self.sink.arguments(_unquoted(arguments))
        if ended:
            self.sink.end()


def _cut(text: str, at: int, markers: Iterable[str]) -> int:
    """Where the longest tail of `text` begins that may become a marker; the length if none may."""
    cut = len(text)
    for marker in markers:
        place = text.find(marker[0], max(at, len(text) - len(marker) + 1))
        while 0 <= place < cut:
            if marker.startswith(text[place:]):
                cut = place
                break
            place = text.find(marker[0], place + 1)
    return cut


def nowhere(_text: str) -> None:
    """Takes text that belongs nowhere."""


def dumps(value: Any) -> str:
    """JSON as models write it. Raises ValueError or TypeError for what is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _unquoted(arguments: str) -> str:
    """Arguments that the model wrote as a string, or left out, as an object."""
    if arguments in ("", "null", '""'):
        return "{}"
    if arguments.startswith('"'):
        try:
            inner = str(json.loads(arguments))
            inner.encode()  # half of a surrogate pair stays an escape
            if isinstance(json.loads(inner), dict):
                return inner
        except (ValueError, RecursionError):
            return arguments
    return arguments
