"""A short storm with a fixed seed over each backend: nothing is lost, repeated, different, malformed or leaked.

`make chaos` runs long ones.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.chaos.harness import run
from tests.chaos.mix import TRAITS
from tests.chaos.reading import Answer, Choice, compare
from tests.chaos.storm import KILLS, KINDS, STOPS, Plan

LOG_LINES = 150
QUICK = (*KILLS, *STOPS, "takeover", "disconnect", "garbage")
"""Without those that wait for a deadline: with the real model, starts take most of the time as it is."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "kinds", "each"), [("sim", KINDS, 2), ("model", QUICK, 1)])
def test_streams_go_on_whoever_dies_hangs_leaves_or_is_replaced(
    backend: str, kinds: tuple[str, ...], each: int
) -> None:
    report = run(backend, seed=5, counts=dict.fromkeys(kinds, each))
    said = "\n".join([*report.log.splitlines()[-LOG_LINES:], report.text()])
    assert report.clean, said
    assert len(report.events) == each * len(kinds), said
    assert report.tally.answers > len(TRAITS), "a storm without load shows nothing"
    assert report.tally.lost == report.tally.repeated == report.tally.differing == 0


def test_stops_may_hit_all_roles_in_the_same_instant() -> None:
    counts = {"stop scheduler": 2, "kill api": 1, "stop api": 3}
    assert Counter(Plan(counts, (1, 1), 0.0, together=True).order(random.Random(1))) == {
        ("stop scheduler", "stop api"): 2,
        ("stop api",): 1,
        ("kill api",): 1,
    }


TWIN = [5, 6, 7, 8, 9, 5, 6]


@pytest.mark.parametrize(
    ("got", "whole", "lost", "repeated", "others"),
    [
        (TWIN, True, 0, 0, 0),
        (TWIN[:3], False, 0, 0, 0),
        (TWIN[:3], True, 4, 0, 0),
        (TWIN[:2] + TWIN[3:], True, 1, 0, 0),
        (TWIN[:4] + TWIN[2:], True, 0, 2, 0),
        (TWIN[:2] + TWIN[4:5], False, 2, 0, 0),
        ([5, 6, 1, 8, 9, 5, 6], True, 0, 0, 1),
    ],
)
def test_lost_repeated_and_different_tokens_are_told_apart(
    got: list[int], whole: bool, lost: int, repeated: int, others: int
) -> None:
    found = compare(_answer(TWIN), _answer(got), whole=whole)
    assert (found.lost, found.repeated, len(found.others)) == (lost, repeated, others)


def test_a_stream_that_goes_on_after_its_end_is_malformed() -> None:
    answer = Answer()
    last = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}],"usage":null}'
    for event in (last, last, b"data: [DONE]", b"data: [DONE]"):
        answer.read_event(event)
    assert len(answer.faults) == 2
    answer.check_form(streamed=True)
    assert answer.faults[2:] == ["no usage", "choice 0 has 2 ends"]


def _answer(tokens: list[int]) -> Answer:
    return Answer({0: Choice(token_ids=tokens)})
