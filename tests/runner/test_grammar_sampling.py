"""Rows with a grammar: what they say keeps it, by the outputs alone, whatever else their parameters ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from protocol import grammar as grammar_limits
from protocol.messages import SamplingParams
from runner.batch import Batch
from runner.grammar.engine import Grammars
from runner.grammar.masks import Masks
from runner.grammar.vocabulary import Vocabulary
from runner.sampler import Sampler
from runner.steps import Sampled
from tests.runner.kit import limits, new

WORDS = [b"true", b"false", b'{"', b'":', b'",', b"red", b"green", b'"}', b"  ", b"\n", "é".encode(), b"10", b"null"]
EOS, TURN, PAD = 256, 257, 258
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<eos>", b"<turn>", b"<pad>"] + WORDS
VOCAB = len(TOKENS)
PROMPT = [5, 6, 7]
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -5, "maximum": 500},
        "colour": {"enum": ["red", "green", "blue"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "word": {"type": "string", "maxLength": 6},
    },
    "required": ["n", "colour", "flags", "word"],
    "additionalProperties": False,
}
JSON = f"json_schema:{json.dumps(SCHEMA)}"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: Vocabulary(TOKENS, frozenset({EOS, TURN, PAD})))


def params(grammar: str = JSON, **changes: Any) -> SamplingParams:
    values = {"max_tokens": 400, "temperature": 1.5, "seed": 5, "eos_token_ids": (EOS, TURN), "grammar": grammar}
    return SamplingParams(**{**values, **changes})


class Rows:
    """Requests that sample together from random logits, each a function of the request's own seed and position."""

    def __init__(self, grammars: Grammars | None, rows: Sequence[SamplingParams]) -> None:
        self.batch = Batch(limits(max_num_seqs=len(rows), max_model_len=512, vocab_size=VOCAB, num_blocks=4096))
        self.sampler = Sampler(VOCAB, Masks(grammars, VOCAB) if grammars is not None else None)
        self.params = rows
        for number in range(len(rows)):
            self.admit(number, PROMPT)

    def admit(self, number: int, tokens: Sequence[int]) -> None:
        """Make a request resident anew, with what it has said so far."""
        pages = [1] * (len(tokens) // 4 + 1)
        slot = self.batch.add(new(number, tokens, pages, num_prompt=len(PROMPT)))
        self.batch.params.set(slot, self.params[number])

    def said(self, number: int) -> list[int]:
        slot = self.slot(number)
        return self.batch.tokens[slot, len(PROMPT) : self.batch.num_tokens[slot]].tolist()  # type: ignore[no-any-return]

    def slot(self, number: int) -> int:
        slot = self.batch.slot(number)
        assert slot is not None
        return slot

    def logits(self, number: int) -> torch.Tensor:
        length = len(self.said(number))
        made = torch.Generator().manual_seed(self.params[number].seed * 1000 + length)
        logits = torch.randn(VOCAB, generator=made) * 2
        logits[[*b" \t\r\n", *range(VOCAB - 5, VOCAB - 3)]] -= 8.0  # most of what JSON allows is blank
        return logits

    def step(self, numbers: Sequence[int]) -> Sampled:
        slots = np.array([self.slot(number) for number in numbers])
        sampled = self.sampler.sample(torch.stack([self.logits(number) for number in numbers]), self.batch, slots)
        for index, slot in enumerate(slots.tolist()):
            if index not in sampled.bad:
                self.batch.tokens[slot, self.batch.num_tokens[slot]] = sampled.tokens[index]
                self.batch.num_tokens[slot] += 1
        return sampled

    def run(self) -> list[list[int]]:
        """What each says until an end id."""
        alive = list(range(len(self.params)))
        for _ in range(400):
            sampled = self.step(alive)
            assert not sampled.bad, sampled.bad
            alive = [number for number in alive if self.said(number)[-1] not in (EOS, TURN)]
            if not alive:
                return [self.said(number) for number in range(len(self.params))]
        raise AssertionError(f"{alive} don't end")


def text(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token < EOS or token > PAD).decode()


def keeps_the_schema(said: str) -> bool:
    value = json.loads(said)
    return (
        list(value) == ["n", "colour", "flags", "word"]
        and type(value["n"]) is int
        and -5 <= value["n"] <= 500
        and value["colour"] in ("red", "green", "blue")
        and len(value["flags"]) <= 3
        and all(type(flag) is bool for flag in value["flags"])
        and len(value["word"]) <= 6
    )


def test_random_logits_say_nothing_but_the_schema_for_fifty_seeds(grammars: Grammars) -> None:
    said = Rows(grammars, [params(seed=seed) for seed in range(50)]).run()
    assert all(keeps_the_schema(text(tokens)) for tokens in said)
    assert len(set(map(tuple, said))) > 40


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ("regex:[0-9]{3}-[a-f]+", r"[0-9]{3}-[a-f]+"),
        ("regex:yes|no|maybe", r"yes|no|maybe"),
        ('lark:start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{1,4}/', r"<[a-z]{1,4}(,[a-z]{1,4})*>"),
        ("regex:[éü]{2}", r"[éü]{2}"),
    ],
)
def test_a_regex_or_a_lark_grammar_is_kept(grammars: Grammars, grammar: str, pattern: str) -> None:
    for tokens in Rows(grammars, [params(grammar, seed=seed) for seed in range(8)]).run():
        assert re.fullmatch(pattern, text(tokens)), text(tokens)


def test_each_row_says_what_it_says_alone(grammars: Grammars) -> None:
    rows = [params(), params("regex:[a-z]{4}", seed=6), params(seed=7, temperature=0.0), params("regex:(ab)+c", seed=8)]
    together = Rows(grammars, rows).run()
    assert together == [Rows(grammars, [row]).run()[0] for row in rows]


def test_a_row_that_is_resident_anew_goes_on_as_if_it_had_stayed(grammars: Grammars) -> None:
    stayed = Rows(grammars, [params()]).run()[0]
    for cut in range(len(stayed)):
        rows = Rows(grammars, [params()])
        rows.admit(0, [*PROMPT, *stayed[:cut]])
        assert rows.run()[0] == stayed


def test_nothing_lifts_what_the_grammar_forbids(grammars: Grammars) -> None:
    forbidden = ord("z")
    row = params(
        "regex:[a-c]{5}", logit_bias=((forbidden, 100.0), (EOS, 100.0)), repetition_penalty=9.0, presence_penalty=-2.0,
        frequency_penalty=2.0, top_k=1, top_p=0.1, min_p=1.0,
    )  # fmt: skip
    assert re.fullmatch("[a-c]{5}", text(Rows(grammars, [row]).run()[0]))


def test_log_probabilities_are_those_of_the_model(grammars: Grammars) -> None:
    rows = Rows(grammars, [params("regex:[a-c]{5}", logprobs=2)])
    logits = rows.logits(0)
    report = rows.step([0]).logprobs[0]
    expected = torch.log_softmax(logits, 0)
    assert report.logprob == pytest.approx(float(expected[rows.said(0)[0]]), abs=1e-5)
    assert np.frombuffer(report.top_ids, "<i4").tolist() == expected.topk(2).indices.tolist()


# --- ends ---------------------------------------------------------------------------------------------------------


def test_every_end_id_of_the_request_may_end_a_complete_text_and_none_another(grammars: Grammars) -> None:
    said = Rows(grammars, [params("regex:[ab]{2}", seed=seed) for seed in range(30)]).run()
    assert {tokens[-1] for tokens in said} == {EOS, TURN}
    assert all(len(tokens) == 3 for tokens in said)


def test_an_end_id_that_is_a_word_of_the_grammar_comes_only_at_the_end(grammars: Grammars) -> None:
    end = ord("x")
    rows = Rows(grammars, [params("regex:[xy]{4}z", seed=seed, eos_token_ids=(end,)) for seed in range(9)])
    for _ in range(6):
        assert not rows.step(range(9)).bad
    assert all(re.fullmatch("y{4}zx", text(rows.said(number))) for number in range(9))


def test_after_an_end_that_is_ignored_only_ends_follow(grammars: Grammars) -> None:
    rows = Rows(grammars, [params("regex:ab*", ignore_eos=True, logit_bias=((EOS, 20.0),))])
    for _ in range(6):
        assert not rows.step([0]).bad
    assert rows.said(0)[0] == ord("a") and set(rows.said(0)[1:]) <= {EOS, TURN}


def test_no_end_comes_before_min_tokens_while_anything_else_may(grammars: Grammars) -> None:
    (said,) = Rows(grammars, [params("regex:a*b*", min_tokens=9, logit_bias=((EOS, 50.0),))]).run()
    assert len(said) == 10 and set(said[:-1]) <= {ord("a"), ord("b")}


def test_a_complete_text_ends_before_min_tokens(grammars: Grammars) -> None:
    (said,) = Rows(grammars, [params("regex:ab", min_tokens=9)]).run()
    assert text(said) == "ab" and len(said) == 3


def test_without_end_ids_a_stop_id_ends_a_complete_text(grammars: Grammars) -> None:
    rows = Rows(grammars, [params("regex:ab", eos_token_ids=(), stop_token_ids=(PAD,))])
    for _ in range(3):
        assert not rows.step([0]).bad
    assert rows.said(0) == [ord("a"), ord("b"), PAD]


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (params("regex:ab", eos_token_ids=()), "no end id"),
        (params("regex:(a", seed=1), "unclosed"),
        (params("regex:ab", allowed_token_ids=(7,)), "allow list"),
    ],
)
def test_a_row_that_cannot_go_on_fails_alone_and_says_why(grammars: Grammars, wrong: SamplingParams, said: str) -> None:
    alone = Rows(grammars, [params()]).run()[0]
    rows = Rows(grammars, [params(), wrong])
    bad: dict[int, tuple[str, str]] = {}
    while not bad:
        bad = rows.step([0, 1]).bad
    assert list(bad) == [1] and bad[1][0] == "grammar_error" and said in bad[1][1]
    assert alone[: len(rows.said(0))] == rows.said(0)


def test_outputs_that_are_not_of_the_grammar_fail_their_row(grammars: Grammars) -> None:
    rows = Rows(grammars, [params("regex:abc")])
    rows.admit(0, [*PROMPT, ord("a"), ord("x")])
    code, message = rows.step([0]).bad[0]
    assert code == "grammar_error" and f"output 2 (id {ord('x')})" in message and "non-verbose" not in message


def test_a_runner_without_grammars_fails_the_row_and_no_other() -> None:
    free = params("", temperature=0.0)
    rows = Rows(None, [free, params()])
    sampled = rows.step([0, 1])
    assert sampled.bad == {1: ("grammar_error", "this runner compiles no grammars")}
    assert rows.said(0) == [int(rows.logits(0).argmax())] or len(rows.said(0)) == 1


def test_what_many_texts_have_used_up_of_a_grammar_is_made_anew(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matchers of one grammar share the states that their texts have led to, whose number is limited."""
    few = Grammars(lambda: Vocabulary(TOKENS, frozenset({EOS, TURN, PAD})))
    monkeypatch.setitem(grammar_limits.LIMITS, "max_lexer_states", 200)
    drops: list[str] = []
    drop = few.drop
    monkeypatch.setattr(few, "drop", lambda grammar: (drops.append(grammar), drop(grammar))[1])
    pattern = "|".join(f"{letter}[0-9]{{20}}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
    for start in (0, 12, 24):
        for said in Rows(few, [params(f"regex:{pattern}", seed=seed) for seed in range(start, start + 12)]).run():
            assert re.fullmatch(pattern, text(said))
    assert drops
