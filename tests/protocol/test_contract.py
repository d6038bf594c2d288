"""CONTRACT.md says what the code does, byte for byte, and the wire only ever grows at the tail."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protocol import contract, messages, wire
from protocol.messages import RequestStatus


def test_the_document_is_what_the_message_definitions_generate() -> None:
    text = contract.CONTRACT.read_text()
    assert contract.render(text) == text, "run python -m protocol.contract, and bump PROTOCOL_VERSION if bytes changed"


@pytest.mark.parametrize("example", contract.EXAMPLES, ids=lambda e: e.__struct_config__.tag)
def test_golden_bytes_decode_to_the_message_they_show(example: msgspec.Struct) -> None:
    tag = example.__struct_config__.tag
    section = contract.CONTRACT.read_text().split("## Golden bytes")[1].split(f"`{tag}`")[1]
    shown = bytes.fromhex(section.split("```")[1].replace("\n", ""))
    codec: wire.Codec[Any] = wire.Codec(type(example))
    assert codec.decode(shown) == (7, 1, example)
    assert codec.encode(example, 7, 1) == shown


def test_every_message_type_has_golden_bytes_or_is_part_of_one_that_has() -> None:
    covered = {type(example) for example in contract.EXAMPLES} | {
        messages.Limits,
        messages.SamplingParams,
        messages.Rejected,
        messages.Finished,
        messages.TokenLogprobs,
        messages.PromptLogprobs,
        messages.NewRequest,
        messages.RowError,
        messages.StepFailure,
    }
    defined = {
        cls
        for name, cls in vars(messages).items()
        if isinstance(cls, type) and issubclass(cls, msgspec.Struct) and name[0].isalpha()
    }
    assert defined == covered


def test_the_order_of_states_is_pinned_since_finished_is_a_comparison() -> None:
    names = "WAITING WAITING_FOR_GRAMMAR WAITING_FOR_REMOTE_KV WAITING_FOR_INPUT RUNNING PREEMPTED"
    ends = "STOPPED LENGTH ABORTED IGNORED ERROR REPETITION"
    assert [status.name for status in RequestStatus] == f"{names} {ends}".split()
    assert [status.value for status in RequestStatus] == list(range(12))
    assert [status.name for status in RequestStatus if status.is_finished] == ends.split()
