"""A choice with a reader: what it reports doesn't depend on how many tokens come at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.columns import pack_i32
from protocol.messages import Finished, RequestStatus, SamplingParams, Submit
from services.choice import Choice, TextOptions
from services.journal import Call, Generation
from services.text.tokenizer import Tokenizer
from services.tools.reader import MessageReader
from services.tools.reasoning import Reasoning
from tests.services.tools.parsing import parser_of

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "漢 🙂"}}</tool_call>'


async def _call() -> Call:
    return Call(lambda: 0.0)


def follow(tokenizer: Tokenizer, text: str, step: int, status: RequestStatus, **options: Any) -> tuple[Any, ...]:
    """Thoughts, content, calls, finish reason and tokens of thoughts, when `step` tokens come at once."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ends = (tokenizer.eos_token_ids[0],)
    if status is RequestStatus.STOPPED:
        tokens.append(ends[0])
    submit = Submit(1, pack_i32([5]), SamplingParams(max_tokens=len(tokens), eos_token_ids=ends))
    generation = Generation(asyncio.run(_call()), 0, submit, 0.0)

    def reader() -> MessageReader:
        return MessageReader(Reasoning(inside=False), parser_of("hermes"))

    choice = Choice(generation, tokenizer, [5], TextOptions(reader=reader, **options), lambda generation: None)
    pieces = []
    for at in range(0, len(tokens), step):
        generation.tokens += tokens[at : at + step]
        if at + step >= len(tokens):
            generation.finished = Finished(1, status, ends[0] if status is RequestStatus.STOPPED else -1, len(tokens))
        pieces.append(choice.advance())
        if choice.done:
            break
    assert choice.done and choice.num_tokens <= len(tokens)
    calls: dict[int, str] = {}
    for piece in pieces:
        for delta in piece.calls:
            calls[delta.index] = calls.get(delta.index, delta.name) + delta.arguments
    joined = ("".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces))
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [pieces[-1].finish_reason]
    return *joined, list(calls.values()), pieces[-1].finish_reason, choice.reasoning_tokens


@pytest.mark.parametrize("status", [RequestStatus.STOPPED, RequestStatus.LENGTH])
@pytest.mark.parametrize("text", [f"<think>\nWell, 漢.\n</think>\n\nHi {CALL}{CALL}", CALL, "<think>Well", "Hi", ""])
def test_the_message_is_the_same_token_by_token_and_all_at_once(
    smollm2: Tokenizer, text: str, status: RequestStatus
) -> None:
    if not text and status is RequestStatus.LENGTH:
        text = "x"
    alone = follow(smollm2, text, 1, status)
    for step in (2, 3, 1000):
        assert follow(smollm2, text, step, status) == alone


def test_thoughts_are_counted_up_to_their_end_and_calls_make_the_finish_reason(smollm2: Tokenizer) -> None:
    thought = "<think>Well, then.</think>"
    reasoning, content, calls, reason, counted = follow(smollm2, thought + CALL, 1000, RequestStatus.STOPPED)
    assert (reasoning, content, reason) == ("Well, then.", "", "tool_calls")
    assert calls == ['get_weather{"city": "漢 🙂"}']
    tokens = smollm2.encode(thought + CALL, add_special_tokens=False)
    upto = next(n for n in range(len(tokens) + 1) if thought in smollm2.decode(tokens[:n]))
    assert counted == upto


def test_the_limit_on_tokens_is_told_even_if_all_calls_are_complete(smollm2: Tokenizer) -> None:
    assert follow(smollm2, CALL, 1000, RequestStatus.LENGTH)[3] == "length"


def test_a_stop_string_that_cuts_a_call_is_told(smollm2: Tokenizer) -> None:
    for step in (1, 1000):
        _, _, calls, reason, _ = follow(smollm2, CALL, step, RequestStatus.STOPPED, stop=("漢",))
        assert (calls, reason) == (['get_weather{"city": "'], "stop")
