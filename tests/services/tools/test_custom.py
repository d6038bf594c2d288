"""The input of a custom tool's call, read from arguments that come in pieces."""

from __future__ import annotations

import json

import pytest

from services.tools.calls import CallDelta
from services.tools.custom import InputReader, Inputs


def read(arguments: str, size: int) -> str:
    reader = InputReader()
    return "".join(reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("text", ["", "hi", 'a"b\\c/\n\t\b\f\r', "é 漢 🙂👩‍💻", "\\u0041", "}" * 9])
def test_the_input_is_the_string_however_it_is_cut_and_escaped(text: str, size: int) -> None:
    for escaped in (True, False):
        assert read(json.dumps({"input": text}, ensure_ascii=escaped), size) == text
    assert read(f' {{ "input" : {json.dumps(text)} }} ', size) == text


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("ls -l", "ls -l"),
        ('"ls \\"a\\""', 'ls "a"'),
        ('{"command": "ls"}', '{"command": "ls"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", ""),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "a\\ud83d\\u0041b"}', "a�Ab"),
        ('{"input": "\\ud83d"}', "�"),
        ('{"input": "\\ude42 \\uzzzz"}', "� uzzzz"),
        ('{"input": "a", "more": "b"}', "a"),
    ],
)
def test_what_is_no_such_object_is_the_input_as_it_is_and_broken_escapes_break_nothing(
    arguments: str, text: str, size: int
) -> None:
    assert read(arguments, size) == text


def test_only_calls_of_custom_tools_are_changed() -> None:
    inputs = Inputs({"shell"})
    first = [CallDelta(0, "a", "now", "{}"), CallDelta(1, "b", "shell", '{"in')]
    assert inputs.replaced(first) == [CallDelta(0, "a", "now", "{}"), CallDelta(1, "b", "shell", "", custom=True)]
    assert inputs.replaced([CallDelta(1, arguments='put": "')]) == []
    assert inputs.replaced([CallDelta(1, arguments='ls"}')]) == [CallDelta(1, arguments="ls", custom=True)]
    assert inputs.replaced([CallDelta(2, "c", "now"), CallDelta(2, arguments="{}")]) == [
        CallDelta(2, "c", "now"),
        CallDelta(2, arguments="{}"),
    ]
