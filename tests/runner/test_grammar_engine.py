"""Compiling grammars: beside the steps, for one request at a time, and kept for the next one that has the same."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from protocol.messages import CompileGrammar, GrammarStatus
from runner.grammar import engine
from runner.grammar.engine import GrammarError, Grammars
from runner.grammar.vocabulary import Vocabulary, VocabularyError

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b"<s>", b""], frozenset({256, 257}))
END = 258


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(lambda: BYTES)


def status(grammars: Grammars, grammar: str, request: int = 7) -> GrammarStatus:
    found: GrammarStatus = grammars.answer(CompileGrammar(request, grammar)).result(60)
    return found


def allowed(matcher: object) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")  # type: ignore[attr-defined]
    return set(np.flatnonzero(bits).tolist())


def test_what_can_be_compiled_is_reported_without_a_message(grammars: Grammars) -> None:
    for grammar in ('json_schema:{"type":"object"}', "regex:a+", 'lark:start: "x"'):
        assert status(grammars, grammar) == GrammarStatus(7)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("regex:(a+", "unclosed group"),
        ('json_schema:{"type":"yaml"}', "yaml"),
        ('json_schema:{"type":"object"', "delimiter"),
        ("json_schema:[]", "object or a boolean"),
        ('json_schema:{"not":{"type":"string"}}', "not"),
        ('json_schema:{"not":{},"x-guidance":{"lenient":true}}', "not"),
        ("lark:start: foo", "foo"),
        ("lark:", "start"),
        ('json_schema:{"$ref":"#"}', "NoExtension"),
        ("yaml:x", "unknown kind 'yaml'"),
        ("", "unknown kind ''"),
    ],
)
def test_what_cannot_be_compiled_is_reported_with_the_reason(grammars: Grammars, grammar: str, said: str) -> None:
    assert said in status(grammars, grammar).message
    assert status(grammars, "regex:a+").message == ""


def test_a_new_matcher_is_at_the_beginning_whatever_others_have_read(grammars: Grammars) -> None:
    first = grammars.matcher("regex:ab")
    assert allowed(first) == {ord("a")}
    assert first.consume_token(ord("a"))
    assert allowed(grammars.matcher("regex:ab")) == {ord("a")}
    assert allowed(first) == {ord("b")}


def test_the_end_is_allowed_where_the_grammar_is_complete_and_special_ids_never(grammars: Grammars) -> None:
    matcher = grammars.matcher(r"regex:(?s:.*)")
    assert allowed(matcher) == {*range(256), END} - {*range(0x80, 0xC2), *range(0xF5, 0x100)}  # starts of UTF-8


def test_a_grammar_is_compiled_once_until_it_is_dropped(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda grammar: (compiled.append(grammar), compile_(grammar))[1])
    for _ in range(3):
        grammars.matcher("regex:a")
    assert compiled == ["regex:a"]
    grammars.drop("regex:a")
    grammars.matcher("regex:a")
    assert compiled == ["regex:a"] * 2


def test_only_the_grammars_that_were_asked_for_last_are_kept(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "KEPT", 2)
    for grammar in ("regex:a", "regex:b", "regex:a", "regex:c"):
        grammars.matcher(grammar)
    assert list(grammars._kept) == ["regex:a", "regex:c"]
    monkeypatch.setattr(engine, "KEPT_CHARACTERS", 10)
    grammars.matcher("regex:" + "d" * 20)
    assert list(grammars._kept) == ["regex:" + "d" * 20]


def test_a_model_whose_tokens_are_not_known_compiles_no_grammars_and_says_why() -> None:
    def load() -> Vocabulary:
        raise VocabularyError("its decoder is odd")

    grammars = Grammars(load)
    assert status(grammars, "regex:a") == GrammarStatus(7, "this runner compiles no grammars: its decoder is odd")
    with pytest.raises(GrammarError, match="odd"):
        grammars.matcher("regex:a")


def test_a_runner_without_the_engine_says_so(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "llguidance" in status(grammars, "regex:a").message


def test_a_reader_that_breaks_is_a_reason_too() -> None:
    def load() -> Vocabulary:
        raise RuntimeError("boom")

    assert "boom" in status(Grammars(load), "regex:a").message


def test_an_engine_that_panics_is_a_reason_and_ends_nothing(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As the engine raises them: no Exception."""

    def broken(grammar: str) -> None:
        raise Panic

    with monkeypatch.context() as patched:
        patched.setattr(grammars, "_compile", broken)
        assert "Panic" in status(grammars, "regex:a").message
    assert status(grammars, "regex:a").message == ""


def test_the_vocabulary_is_read_once_and_soon_where_that_is_wished(smollm2_path: Path) -> None:
    reads: list[int] = []

    def load() -> Vocabulary:
        reads.append(1)
        return BYTES

    grammars = Grammars(load)
    answers: list[Future[GrammarStatus]] = [grammars.answer(CompileGrammar(n, f"regex:a{{{n}}}")) for n in range(1, 9)]
    assert [answer.result(60) for answer in answers] == [GrammarStatus(n) for n in range(1, 9)]
    assert reads == [1]
    soon = Grammars.of_model(smollm2_path, 49152, soon=True)
    assert allowed(soon.matcher("regex:Paris")) >= {64}


def test_a_client_that_wants_forced_tokens_gets_the_longest(grammars: Grammars) -> None:
    vocabulary = Vocabulary([*BYTES.tokens, b"hel", b"lo"], BYTES.special)
    matcher = Grammars(lambda: vocabulary).matcher('lark:%llguidance {"no_forcing": false}\nstart: "hello"')
    assert allowed(matcher) == {258}
