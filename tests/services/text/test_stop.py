"""Stop strings: what is withheld, what wins, what is never leaked."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from services.text.stop import StopMatcher


def run(pieces: Iterable[str], stops: Sequence[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    sent: list[str] = []
    for piece in pieces:
        text, stop = matcher.feed(piece)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.release()], None


def test_a_stop_split_over_pieces_never_leaks_its_beginning() -> None:
    sent, stop = run(["ok", "\n", "\nUs", "er: hi"], ["\n\nUser:"])
    assert (sent, stop) == (["ok", "", "", ""], "\n\nUser:")


def test_a_near_miss_is_released_complete_and_at_once() -> None:
    sent, stop = run(["ok", "\n", "\nUs", "e it", "."], ["\n\nUser:"])
    assert (sent, stop) == (["ok", "", "", "\n\nUse it", ".", ""], None)


def test_only_the_tail_that_can_still_begin_a_stop_is_withheld() -> None:
    matcher = StopMatcher(["own fox", "aab"])
    assert matcher.feed("the brown").text == "the br"
    assert matcher.held == "own"
    assert matcher.feed(" aa").text == "own "
    assert matcher.feed("a").text == "a"  # "aaa": only the last two can begin "aab"
    assert matcher.held == "aa"


def test_what_is_withheld_at_the_end_is_released() -> None:
    assert run(["fine STO"], ["STOP"]) == (["fine ", "STO"], None)


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_text_after_the_stop_in_the_same_piece_is_cut(include: bool, text: str) -> None:
    assert run(["one STOP two"], ["STOP"], include) == ([text], "STOP")


def test_the_stop_that_ends_first_wins_whatever_the_order() -> None:
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        assert run(["xabcd"], stops) == (["xa"], "bc")
        assert run(list("xabcd"), stops)[1] == "bc"


def test_of_two_stops_that_end_together_the_longer_wins() -> None:
    for stops in (["cd", "abcd"], ["abcd", "cd"]):
        assert run(["xabcd"], stops) == (["x"], "abcd")


def test_a_match_while_disarmed_is_text_and_does_not_stop_later() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab", armed=False) == ("ab", None)
    assert matcher.feed("c", armed=True) == ("c", None)
    assert matcher.feed("ab", armed=True) == ("", "ab")


def test_a_match_may_begin_while_disarmed_and_end_armed() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("xa", armed=False) == ("x", None)
    assert matcher.feed("b!", armed=True) == ("", "ab")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["x", ""])


def slow_twin(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_the_outcome_depends_on_the_text_and_not_on_how_it_was_split() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        text = "".join(rng.choices("ab\n", k=rng.randrange(14)))
        stops = ["".join(rng.choices("ab\n", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, 4)
            pieces.append(text[at : at + size])
            at += size
        sent, stop = run(pieces, stops)
        assert ("".join(sent), stop) == slow_twin(text, stops)


def test_after_each_piece_exactly_the_longest_possible_beginning_is_held() -> None:
    rng = random.Random(8)
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(2)]
        matcher, seen = StopMatcher(stops), ""
        for char in rng.choices("ab", k=12):
            seen += char
            if matcher.feed(char).stop is not None:
                break
            begins = {stop[:n] for stop in stops for n in range(len(stop))}
            longest = max((tail for tail in (seen[i:] for i in range(len(seen) + 1)) if tail in begins), key=len)
            assert matcher.held == longest
