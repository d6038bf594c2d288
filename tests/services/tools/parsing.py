"""Feeds a text to a parser in pieces, and joins what comes out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from services.tools.calls import Sink
from services.tools.dialect import PARSERS
from services.tools.parser import Parser

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object"},
            "unit": {"enum": ["C", "F"]},
            "maybe": {"type": ["string", "null"]},
            "any": {},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}


class Message(NamedTuple):
    """What a client has in the end. `complete`: there are calls, and all have ended."""

    content: str
    calls: list[tuple[str, str]]
    complete: bool


def parser_of(name: str, *, single: bool = False, hidden: Iterable[str] = ()) -> Parser:
    """A parser for the tools above."""
    ids = itertools.count()
    return PARSERS[name](Sink(lambda: f"call-{next(ids)}", single=single), TOOLS, hidden)


def read(name: str, pieces: Sequence[str], *, single: bool = False, hidden: Iterable[str] = ()) -> Message:
    """The message that a parser makes of these pieces. Checks the order in which deltas come."""
    parser = parser_of(name, single=single, hidden=hidden)
    content: list[str] = []
    calls: list[list[str]] = []

    def take() -> None:
        text, deltas = parser.sink.take()
        content.append(text)
        for delta in deltas:
            if delta.id:
                assert delta.name and delta.index == len(calls), "a call begins after the one before, with its name"
                calls.append([delta.name, delta.arguments])
            else:
                assert not delta.name and delta.index == len(calls) - 1 and delta.arguments
                calls[-1][1] += delta.arguments

    for piece in pieces:
        parser.feed(piece)
        take()
    parser.finish()
    take()
    return Message("".join(content), [(call_name, arguments) for call_name, arguments in calls], parser.sink.complete)


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, cut at these places (modulo its length)."""
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in itertools.pairwise(at)]
