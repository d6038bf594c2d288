"""What each tool-call parser makes of what models write, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tools.dialect import PARSERS
from tests.services.tools.parsing import Message, cut, parser_of, read

PARIS = ("get_weather", '{"city": "Paris"}')
NOW = ("now", "{}")

# (parser, the model's text, content, calls, whether all are complete)
CASES: list[tuple[str, str, str, list[tuple[str, str]], bool]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS], True),
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
        "Let me look.",
        [NOW, PARIS],
        True,
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW], True),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>\nDone.', "Done.", [NOW], True),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call> \\" } 漢🙂"}}</tool_call>',
        "",
        [("f", '{"x": "</tool_call> \\" } 漢🙂"}')],
        True,
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')], True),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a":"\n"}}</tool_call>', "", [("now", '{"a":"\\n"}')], True),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", [NOW], True),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>', "", [NOW], True),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"ci', "", [("get_weather", '{"ci')], False),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1}}</tool_call> x', "x", [("now", '{"a": [1}}')], True),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", [], False),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}', '<tool_call>{"name": "a b", "arguments": {}}', [], False),
    ("hermes", '<tool_call>{"arguments": {}}', '<tool_call>{"arguments": {}}', [], False),
    ("hermes", "a <tool_cal b < c", "a <tool_cal b < c", [], False),
    ("hermes", "<tool_call", "<tool_call", [], False),
    ("hermes", "  an answer\n\n", "  an answer\n\n", [], False),
    ("hermes", "", "", [], False),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS], True),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [NOW], True),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [NOW], True),
    ("llama3_json", '{"name": "now", "arguments": {}}; {"name": "now", "parameters": {}}', "", [NOW, NOW], True),
    ("llama3_json", '{"name": "now", "parameters": {}}\n\nDone.', "Done.", [NOW], True),
    ("llama3_json", 'Hm.<|python_tag|>{"name": "other", "parameters": {}}', "Hm.", [("other", "{}")], True),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', [], False),
    ("llama3_json", '{"name": "now", "born": 1815}', '{"name": "now", "born": 1815}', [], False),
    ("llama3_json", '{"answer": [1, 2]} ok', '{"answer": [1, 2]} ok', [], False),
    ("llama3_json", 'Like {"name": "now", "parameters": {}}', 'Like {"name": "now", "parameters": {}}', [], False),
    ("llama3_json", '{"name": "now", "parameters": {"a', "", [("now", '{"a')], False),
    ("llama3_json", '{"name": "now", "parameters": {}}; and', "; and", [NOW], True),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS], True),
    (
        "mistral",
        'Sure. [TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abc123def"}, '
        '{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "Sure.",
        [NOW, PARIS],
        True,
    ),
    ("mistral", '[TOOL_CALLS]now{}[TOOL_CALLS]get_weather{"city": "Paris"}', "", [NOW, PARIS], True),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS], True),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}', "", [PARIS], True),
    ("mistral", "[TOOL_CALLS] no", "[TOOL_CALLS] no", [], False),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", [], False),
    ("mistral", "[TOOL_CALLS]now", "[TOOL_CALLS]now", [], False),
    ("mistral", '[TOOL_CALLS]now{"a": ', "", [("now", '{"a": ')], False),
    ("pythonic", '[get_weather(city="Paris")]', "", [PARIS], True),
    (
        "pythonic",
        "[get_weather(city='it\\'s \"x\", (y)', where={'a': [True, None, -1.5]}), now()]",
        "",
        [("get_weather", '{"city": "it\'s \\"x\\", (y)", "where": {"a": [true, null, -1.5]}}'), NOW],
        True,
    ),
    ("pythonic", "[get_weather(city=Paris, any=true)]", "", [("get_weather", '{"city": "Paris", "any": true}')], True),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [NOW], True),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", [], False),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", [], False),
    ("pythonic", "[now(1)]", "[now(1)]", [], False),
    ("pythonic", "I would call [now()]", "I would call [now()]", [], False),
    ("pythonic", '[get_weather(city="\\', "", [("get_weather", "")], False),
    ("pythonic", '[get_weather(city="Paris", days=', "", [("get_weather", '{"city": "Paris"')], False),
    (
        "qwen3_coder",
        "Yes.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa\nris \"\\\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "Yes.",
        [("get_weather", '{"city": "Pa\\nris \\"\\\\", "days": 3}')],
        True,
    ),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=where>{'a': True}</parameter><parameter=city>42</parameter></function>",
        "",
        [("get_weather", '{"where": {"a": true}, "city": "42"}')],
        True,
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=unit>\nC\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n"
        "<parameter=any>\n[1]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        [("get_weather", '{"unit": "C", "maybe": null, "any": [1]}'), NOW],
        True,
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>\nok", "ok", [NOW], True),
    ("qwen3_coder", "Yes. <function=now></function>\n\nok", "Yes.\n\nok", [NOW], True),
    ("qwen3_coder", "<tool_call> no", "<tool_call> no", [], False),
    ("qwen3_coder", "a <function= b", "a <function= b", [], False),
    ("qwen3_coder", "<function=get_weather><parameter=city>Pa", "", [("get_weather", '{"city": "Pa')], False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls", "complete"), CASES)
def test_what_a_model_writes_becomes_content_and_calls(
    name: str, text: str, content: str, calls: list[tuple[str, str]], complete: bool
) -> None:
    assert read(name, [text]) == Message(content, calls, complete)
    assert read(name, list(text)) == Message(content, calls, complete), "one character at a time"
    for _, arguments in calls if complete and "[1}" not in text else ():
        json.loads(arguments)


_GRIST = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<function=", "</function>", ">",
         "<parameter=", "</parameter>", "now", "get_weather", "city", '{"name": "now"', ', "arguments": ', "{}", "{",
         "}", "[", "]", "(", ")", "=", '"', "\\", ",", ";", ":", "\n", " ", "1", "漢🙂", "text", "<", "null", '"name"']
    )
    | st.text(max_size=3)
    | st.sampled_from([text for _, text, *_ in CASES]),
    max_size=8,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=examples(40), deadline=None)
@given(text=_GRIST, places=st.lists(st.integers(0, 1000), max_size=12), single=st.booleans(), special=st.booleans())
def test_how_a_text_is_cut_changes_nothing(
    name: str, text: str, places: list[int], single: bool, special: bool
) -> None:
    hidden = PARSERS[name].markers if special else ()
    assert read(name, cut(text, places), single=single, hidden=hidden) == read(
        name, [text], single=single, hidden=hidden
    )


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=examples(20), deadline=None)
@given(text=_GRIST)
def test_without_calls_no_text_is_lost(name: str, text: str) -> None:
    message = read(name, [text])
    if not message.calls:
        assert message.content == text


_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(25), deadline=None)
@given(
    arguments=st.dictionaries(st.sampled_from(["city", "any"]), _JSON), places=st.lists(st.integers(0, 500), max_size=6)
)
def test_any_arguments_arrive_as_they_were_written(arguments: dict[str, Any], places: list[int]) -> None:
    body = json.dumps(arguments, ensure_ascii=False)
    for name, text in (
        ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {body}}}\n</tool_call>'),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {body}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {body}}}]'),
        ("mistral", f"[TOOL_CALLS]get_weather{body}"),
    ):
        assert read(name, cut(text, places)) == Message("", [("get_weather", body)], True)
    pythonic = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    message = read("pythonic", cut(f"[get_weather({pythonic})]", places))
    assert [(name, json.loads(text)) for name, text in message.calls] == [("get_weather", arguments)]


def test_arguments_go_out_while_they_come() -> None:
    parser = parser_of("hermes")
    seen: list[tuple[str, str]] = []
    for piece in ('<tool_call>{"name": "now", ', '"arguments": {"a', '": "b', 'c"', "}}", "</tool_call>"):
        parser.feed(piece)
        seen += [(delta.name, delta.arguments) for delta in parser.sink.take()[1]]
    assert seen == [("now", '{"a'), ("", '": "b'), ("", 'c"'), ("", "}")]


def test_content_goes_out_at_once_unless_it_may_be_a_marker() -> None:
    parser = parser_of("hermes")
    for piece, shown in (("Hello", "Hello"), (" <to", ""), ("ol> x", " <tool> x"), (" <tool_call>{", "")):
        parser.feed(piece)
        assert parser.sink.take()[0] == shown


def test_only_the_first_call_is_kept_if_calls_may_not_be_parallel() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read("hermes", [text * 3], single=True) == Message("", [NOW], True)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("llama3_json", "<|python_tag|>import os", "import os"),
        ("mistral", "[TOOL_CALLS] no", " no"),
        ("hermes", "<tool_call>x</tool_call> y", "x y"),
    ],
)
def test_markers_that_are_special_tokens_never_show(name: str, text: str, content: str) -> None:
    assert read(name, [text], hidden=PARSERS[name].markers).content == content
