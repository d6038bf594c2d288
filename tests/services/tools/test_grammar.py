"""Answers that keep a request's grammar are calls that its parser understands, in every format; others are refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from protocol.grammar import LARK, LIMITS, lark, tagged
from services.errors import ApiError
from services.structured import Form
from services.tools.dialect import Dialect
from services.tools.forms import answer_grammar
from services.tools.grammar import AnswerGrammar, enforceable, keeps_patterns
from services.tools.request import ToolUse, tool_use
from tests.services.tools.parsing import read

SPECIAL = 257
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}, "additionalProperties": False}}

# What each format's calls look like: one of get_weather, then both.
SAMPLES = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}; {"name": "now", "parameters": {}}',
    ),
    "pythonic": ('[get_weather(city="Rome")]', '[get_weather(city="Rome", days=3), now()]'),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}]',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
}


class Bytes:
    """An alphabet of bytes, an end, and one special token."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>", b"<|special|>")
    special_token_ids = (256, SPECIAL)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def alphabet() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


Start = Callable[[str], LLMatcher]


@pytest.fixture(scope="module")
def start(alphabet: LLTokenizer) -> Start:
    """Compiles a grammar as the runner does."""

    def compile_(text: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]
        grammar = LLMatcher.grammar_from_lark(lark(tagged(LARK, text)))
        matcher = LLMatcher(alphabet, grammar, log_level=0, limits=limits)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    return compile_


def keeps(matcher: LLMatcher, answer: str | list[int]) -> bool:
    tokens = list(answer.encode()) if isinstance(answer, str) else answer
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def use(**changes: Any) -> ToolUse:
    return ToolUse(**{"tools": [], "schemas": SCHEMAS, "forced": True} | changes)


@pytest.mark.parametrize("parser", SAMPLES)
def test_only_calls_that_keep_their_schema_are_let_through(start: Start, parser: str) -> None:
    one, two = SAMPLES[parser]
    grammar = AnswerGrammar(parser, json.dumps).lark(use())
    single = AnswerGrammar(parser, json.dumps).lark(use(parallel=False))
    assert keeps(start(grammar), one) and keeps(start(grammar), two)
    assert keeps(start(single), one) and not keeps(start(single), two)
    for wrong in (one.replace("Rome", "Paris"), one.replace("get_weather", "other"), "Rome is sunny.", one + " x", ""):
        assert not keeps(start(grammar), wrong), wrong


@pytest.mark.parametrize("parser", SAMPLES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_sampled_under_the_grammar_is_read_as_valid_calls(
    start: Start, alphabet: LLTokenizer, parser: str, seed: int
) -> None:
    matcher = start(AnswerGrammar(parser, json.dumps).lark(use(parallel=False)))
    pick = random.Random(seed)
    mask = allocate_token_bitmask(1, alphabet.vocab_size)
    tokens: list[int] = []
    while not matcher.is_stopped() and len(tokens) < 1500:
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        # Blanks are allowed in many places: now and then is enough.
        allowed = [int(token) for token in np.flatnonzero(bits)]
        wanted = [token for token in allowed if token not in b" \t\n\r" or len(allowed) <= 4] or allowed
        token = 256 if 256 in allowed else pick.choice(wanted)
        assert matcher.consume_token(token)
        if token != 256:
            tokens.append(token)
    message = read(parser, [bytes(tokens).decode()])
    assert message.content == "" and message.complete and len(message.calls) == 1
    ((name, arguments),) = message.calls
    if name == "get_weather":
        found = json.loads(arguments)
        assert found["city"] in ("Rome", "Oslo") and found.keys() <= {"city", "days"}
        assert 1 <= found.get("days", 1) <= 9
    else:
        assert (name, json.loads(arguments)) == ("now", {})


def test_named_calls_of_newer_mistral_models(start: Start) -> None:
    grammar = AnswerGrammar("mistral", json.dumps, listed=False).lark(use())
    one = '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'
    assert keeps(start(grammar), one) and keeps(start(grammar), one + "[TOOL_CALLS]now[ARGS]{}")
    assert not keeps(start(grammar), one + ", ") and read("mistral", [one]).complete
    assert keeps(start(grammar), one.replace("[ARGS]", "[CALL_ID]abc123DEF[ARGS]"))


def test_a_list_of_calls_may_be_set_off_by_a_blank(start: Start) -> None:
    grammar = AnswerGrammar("mistral", json.dumps).lark(use())
    assert keeps(start(grammar), SAMPLES["mistral"][0].replace("][", "] ["))


def test_a_marker_may_be_a_special_token(start: Start) -> None:
    grammar = AnswerGrammar("mistral", lambda marker: f"<[{SPECIAL}]>").lark(use())
    text = b'[{"name": "now", "arguments": {}}]'
    assert keeps(start(grammar), [SPECIAL, *text])
    assert not keeps(start(grammar), [*b"[TOOL_CALLS]", *text])


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "mistral"])
@pytest.mark.parametrize("special", [False, True])
def test_with_strict_tools_text_is_free_and_calls_are_not(start: Start, parser: str, special: bool) -> None:
    chosen = use(forced=False, strict=frozenset({"get_weather"}))
    assert enforceable(parser, chosen)
    marker = "[TOOL_CALLS]" if parser == "mistral" else "<tool_call>"

    def mark(text: str) -> str:
        return f"<[{SPECIAL}]>" if special and text == marker else json.dumps(text)

    def tokens(text: str) -> list[int]:
        if not special:
            return list(text.encode())
        first, *rest = text.split(marker)
        return [*first.encode(), *(token for part in rest for token in (SPECIAL, *part.encode()))]

    grammar = AnswerGrammar(parser, mark).lark(chosen)
    one = SAMPLES[parser][0]
    for right in ("", "Rome is < sunny.", one, "I will look.\n" + one, one + "\nThere."):
        assert keeps(start(grammar), tokens(right)), right
    for wrong in (one.replace("Rome", "Paris"), "See " + one.replace("city", "place"), marker):
        assert not keeps(start(grammar), tokens(wrong)), wrong


def test_strict_tools_can_only_be_kept_where_a_marker_begins_a_call() -> None:
    chosen = use(forced=False, strict=frozenset({"now"}))
    assert not enforceable("llama3_json", chosen) and not enforceable("pythonic", chosen)
    assert not enforceable("hermes", use(forced=False))


def test_thoughts_may_come_before_calls(start: Start) -> None:
    one = SAMPLES["hermes"][0]
    opened = AnswerGrammar("hermes", json.dumps).lark(use(), thinks=True, inside=True)
    assert keeps(start(opened), f"Rome </thi ...\n</think>\n\n{one}")
    assert not keeps(start(opened), one)
    perhaps = AnswerGrammar("hermes", json.dumps).lark(use(), thinks=True)
    for right in (one, f"<think>\nhm\n</think>\n\n{one}"):
        assert keeps(start(perhaps), right)
    assert not keeps(start(perhaps), f"hm</think>{one}")


def test_keywords_that_no_grammar_keeps_matter_only_to_strict_tools(start: Start) -> None:
    odd = {"now": {"type": "object", "properties": {"at": {"type": "string", "format": "odd"}}}}
    start(AnswerGrammar("hermes", json.dumps).lark(use(schemas=odd)))
    with pytest.raises(AssertionError, match="format"):
        start(AnswerGrammar("hermes", json.dumps).lark(use(schemas=odd, strict=frozenset({"now"}))))


async def _check(form: Form) -> str:
    return tagged(form.kind, form.text)


class _Tokenizer:
    """A tokenizer whose prompts end as told."""

    def __init__(self, end: str = "") -> None:
        self.end = end

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return self.end


def grammar_of(chosen: ToolUse | None, form: Form | None, *, reasoning: str = "", end: str = "") -> str:
    dialect = Dialect(_Tokenizer(end), "hermes", reasoning)  # type: ignore[arg-type]
    return asyncio.run(answer_grammar(_check, dialect, chosen, form, [1]))


JSON = Form("json_schema", '{"type": "integer"}', "response_format")


def test_an_answer_is_free_without_a_form_and_calls_that_must_come() -> None:
    assert grammar_of(None, None) == grammar_of(use(forced=False), None, reasoning="qwen3") == ""
    assert grammar_of(None, JSON) == 'json_schema:{"type": "integer"}'


def test_calls_that_may_come_are_an_alternative_to_a_form(start: Start) -> None:
    grammar = grammar_of(use(forced=False), JSON).removeprefix("lark:")
    assert keeps(start(grammar), "42") and keeps(start(grammar), SAMPLES["hermes"][0])
    assert not keeps(start(grammar), "hello")


def test_calls_that_must_come_leave_no_place_for_a_form(start: Start) -> None:
    grammar = grammar_of(use(), JSON).removeprefix("lark:")
    assert keeps(start(grammar), SAMPLES["hermes"][0]) and not keeps(start(grammar), "42")


@pytest.mark.parametrize(
    ("form", "said"),
    [(JSON, "42"), (Form("regex", "a/b+", "regex"), "a/bb"), (Form("lark", 'start: x\nx: "y"', "ebnf"), "y")],
)
def test_a_form_is_kept_after_thoughts(start: Start, form: Form, said: str) -> None:
    opened = grammar_of(None, form, reasoning="qwen3", end="<think>\n").removeprefix("lark:")
    assert keeps(start(opened), f"well</think>\n{said}") and not keeps(start(opened), said)
    perhaps = grammar_of(None, form, reasoning="qwen3").removeprefix("lark:")
    assert keeps(start(perhaps), said) and keeps(start(perhaps), f"<think>well</think>{said}")


def test_a_grammar_without_one_start_is_refused_where_it_has_to_be_a_part() -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(None, Form("lark", 'root: "x"', "ebnf"), reasoning="qwen3")
    assert caught.value.status == 400 and caught.value.param == "ebnf"


@pytest.mark.parametrize("parser", ["hermes", "mistral"])
def test_a_custom_tools_input_matches_its_expression_in_free_text_too(start: Start, parser: str) -> None:
    expression = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"[0-9]+(\+[0-9]+)*|\"x\"\n"}}
    chosen = tool_use([{"type": "custom", "custom": {"name": "math", "format": expression}}], None, None)
    assert chosen is not None and enforceable(parser, chosen) and keeps_patterns(parser, chosen)
    grammar = AnswerGrammar(parser, json.dumps).lark(chosen)
    call = SAMPLES[parser][0]
    call = call[: call.index("{")] + '{"name": "math", "arguments": INPUT}' + call[call.rindex("}") + 1 :]
    for text, kept in (("1+2", True), ('"x"\n', True), ("1+", False), ("", False), ("a1", False), ("1 ", False)):
        answer = "I count. " + call.replace("INPUT", json.dumps({"input": text}))
        assert keeps(start(grammar), answer) is kept, text
    assert keeps(start(grammar), "I don't count.")


@pytest.mark.parametrize("parser", ["hermes", "mistral", "qwen3_coder"])
def test_tools_that_are_not_allowed_are_not_called(start: Start, parser: str) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
    chosen = tool_use(tools, {"type": "allowed_tools", "allowed_tools": allowed}, None)
    assert chosen is not None and chosen.parallel and enforceable(parser, chosen)
    grammar = AnswerGrammar(parser, json.dumps).lark(chosen)
    one, two = SAMPLES[parser]
    assert keeps(start(grammar), f"Well. {one}") and keeps(start(grammar), "No call.")
    assert not keeps(start(grammar), two)
