"""Thoughts and answers are told apart, however the text is cut."""

from __future__ import annotations

import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tools.reader import MessageReader
from services.tools.reasoning import Reasoning
from tests.services.tools.parsing import cut, parser_of


def split(pieces: list[str], *, inside: bool) -> tuple[str, str, int]:
    """Thoughts, content, and how many pieces were thoughts, each taken for a token."""
    reasoning = Reasoning(inside=inside)
    parts = [reasoning.feed(piece, 1) for piece in pieces] + [reasoning.finish()]
    return "".join(thought for thought, _ in parts), "".join(said for _, said in parts), reasoning.num_tokens


@pytest.mark.parametrize(
    ("text", "inside", "thoughts", "content"),
    [
        ("<think>\nHm.\n\n</think>\n\nYes.\n", False, "Hm.", "Yes.\n"),
        ("\nHm.\n</think>\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>Hm, a < b </thin", False, "Hm, a < b </thin", ""),
        ("Hm", True, "Hm", ""),
        ("<thi", False, "", "<thi"),
        ("  Yes", False, "", "  Yes"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", True, "", ""),
    ],
)
def test_thoughts_end_with_the_marker_and_lose_the_blanks_around(
    text: str, inside: bool, thoughts: str, content: str
) -> None:
    assert split([text], inside=inside)[:2] == (thoughts, content)
    assert split(list(text), inside=inside)[:2] == (thoughts, content)


@settings(max_examples=examples(60), deadline=None)
@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "\n", " ", "a", "漢"]), max_size=9).map("".join),
    places=st.lists(st.integers(0, 200), max_size=8),
    inside=st.booleans(),
)  # fmt: skip
def test_how_a_text_is_cut_changes_nothing(text: str, places: list[int], inside: bool) -> None:
    assert split(cut(text, places), inside=inside)[:2] == split([text], inside=inside)[:2]


def test_tokens_count_as_thoughts_up_to_the_end_marker() -> None:
    assert split(["<think>", "a", " b", "</think>", "c", "d"], inside=False)[2] == 4
    assert split(["<th", "ink>", "a", "</think>", "c"], inside=False)[2] == 4
    assert split(["a", "b</think>", "c"], inside=True)[2] == 2
    assert split(["a", "b"], inside=False)[2] == 0


def test_a_call_is_found_after_the_thoughts_and_not_in_them() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    reader = MessageReader(Reasoning(inside=True), parser_of("hermes"))
    reader.feed(f"I could write {call}.</think>\n\n{call}")
    reader.finish()
    reasoning, content, calls = reader.take()
    assert reasoning == f"I could write {call}." and content == ""
    assert [(delta.name, delta.arguments) for delta in calls] == [("now", "{}")]
    assert reader.called


def test_thoughts_can_be_kept_from_the_client() -> None:
    reader = MessageReader(Reasoning(inside=True), None, show_reasoning=False)
    reader.feed("secret</think>said")
    assert reader.take() == ("", "said", [])
