"""What a tagged grammar means in Lark, as llguidance reads it."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from protocol.grammar import LIMITS, lark, tagged


class Letters:
    """An id for each byte, then the end."""

    is_tokenizer_wrapper = True

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
        self.special_token_ids = [256]
        self.eos_token_id = 256
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = LLTokenizer(Letters(), n_vocab=257, eos_token=[256], slices=[])  # type: ignore[arg-type]


def allows(grammar: str, text: str) -> bool:
    """Whether `text` is a whole text of the grammar."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lark(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("regex", "text", "others"),
    [
        ("a+", "aa", ("", "ab")),
        ("^ab$", "ab", ("^ab$", "abc")),
        ("a/b", "a/b", ("ab",)),
        (r"a\/b", "a/b", (r"a\/b",)),
        ("// no comment", "// no comment", ("",)),
        ("/i", "/i", ("/I",)),
        ("(?i)ab", "AB", ("ac",)),
        ("a\nb", "a\nb", ("ab",)),
        ("a\\\nb", "a\nb", ("a\\b",)),
        (r"a\nb", "a\nb", ("anb",)),
        ("a\r", "a\r", ("a\n",)),
        (r"\\/", "\\/", ("/",)),
        ("[/]{2}", "//", ("/",)),
        ('"', '"', ("'",)),
        ("ü|漢", "漢", ("u",)),
        (r"a\.b| \-c", " -c", ("axb",)),
    ],
)
def test_a_regex_means_what_it_says_whatever_lark_makes_of_its_characters(
    regex: str, text: str, others: tuple[str, ...]
) -> None:
    assert allows(tagged("regex", regex), text)
    assert not any(allows(tagged("regex", regex), other) for other in others)


@pytest.mark.parametrize(
    ("schema", "text", "others"),
    [
        ({"type": "object"}, '{"a": [1, null]}', ("[]", "")),
        (True, "3", ("x",)),
        ({"enum": ["a/b", 'c"d', "é"]}, '"c\\"d"', ('"c"',)),
        ({"type": "integer", "minimum": 3}, "3", ("2", "3.5")),
        ({"description": 'start: "x" /y/\n%json {}', "const": 1}, "1", ("x",)),
    ],
)
def test_a_schema_means_json_of_it(schema: object, text: str, others: tuple[str, ...]) -> None:
    grammar = tagged("json_schema", json.dumps(schema))
    assert allows(grammar, text)
    assert not any(allows(grammar, other) for other in others)


def test_blanks_are_free_between_the_parts_of_json_but_not_without_end() -> None:
    grammar = tagged("json_schema", '{"type":"array","items":{"type":"integer"}}')
    assert allows(grammar, "[\n  1,\n\t2\r\n]") and allows(grammar, "[1,2]")
    assert allows(grammar, "[" + " " * 100 + "1]")
    assert not allows(grammar, "[" + " " * 101 + "1]")
    assert not allows(grammar, " [1]") and not allows(grammar, "[1] ")


def test_what_a_schema_says_of_how_it_is_to_be_compiled_is_not_heard() -> None:
    lenient = '{"type":"string","not":{"const":"x"},"x-guidance":{"lenient":true}}'
    compiled = LLMatcher.grammar_from_lark(lark(tagged("json_schema", lenient)))
    assert "not" in LLMatcher.validate_grammar(compiled)


def test_a_lark_grammar_stays_what_it_is() -> None:
    assert allows(tagged("lark", '%llguidance {}\nstart: "x" y?\ny: /[0-9]/'), "x7")


@pytest.mark.parametrize("grammar", ["", "x", "yaml:a", "json_schema:{", "json_schema:5", "json_schema:" + "[" * 9**5])
def test_what_is_no_grammar_is_an_error(grammar: str) -> None:
    with pytest.raises(ValueError):
        lark(grammar)


def test_all_limits_are_limits_of_the_engine() -> None:
    from llguidance import LLParserLimits

    limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    assert {name: getattr(limits, name) for name in LIMITS} == LIMITS
