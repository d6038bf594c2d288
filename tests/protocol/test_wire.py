"""Frames: what is malformed is told apart from what is old, and nothing malformed gets through."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol import wire
from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import Abort, ApiToScheduler, Heartbeat, SamplingParams, Submit


def codec() -> wire.Codec[Any]:
    return wire.Codec(ApiToScheduler)


def frame_of(body: bytes) -> bytes:
    return bytes(8) + body


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0" * 7,
        frame_of(b""),
        frame_of(msgspec.msgpack.encode(["unknown", 1])),
        frame_of(msgspec.msgpack.encode({"a": 1})),
        frame_of(msgspec.msgpack.encode(["submit", "text instead of an id"])),
        frame_of(msgspec.msgpack.encode(["submit", 1, b"\0\0\0\0"])),
        frame_of(msgspec.msgpack.encode(["abort", b"x"]) + b"surplus"),
        frame_of(msgspec.msgpack.encode(["abort", b"x"])[:-1]),
        frame_of(b"\x91" * 200_000),
        frame_of(b"\x92\xa5label\xa4\xed\xa0\xbd\x00"),
    ],
    ids=lambda frame: f"{len(frame)} bytes",
)
def test_a_malformed_frame_is_a_frame_error(frame: bytes) -> None:
    with pytest.raises(wire.FrameError):
        codec().decode(frame)


def test_ten_thousand_random_frames_raise_nothing_but_frame_errors() -> None:
    source = random.Random(5)
    good = codec().encode(Submit(1, pack_i32([1, 2]), SamplingParams(3)), 1, 1)
    for _ in range(10_000):
        frame = bytearray(good if source.random() < 0.7 else source.randbytes(source.randrange(60)))
        for _ in range(source.randrange(1, 4)):
            if frame:
                frame[source.randrange(len(frame))] = source.randrange(256)
        try:
            codec().decode(bytes(frame))
        except wire.FrameError:
            pass


def test_appended_fields_work_both_ways_and_another_order_has_another_digest() -> None:
    class Old(msgspec.Struct, array_like=True, tag="t"):
        a: int
        b: int = 0

    class New(msgspec.Struct, array_like=True, tag="t"):
        a: int
        b: int = 0
        c: int = 5

    old: wire.Codec[Any] = wire.Codec(Old)
    new: wire.Codec[Any] = wire.Codec(New)
    assert new.decode(old.encode(Old(1, 2), 0, 0))[2] == New(1, 2, 5)
    assert old.decode(new.encode(New(1, 2, 3), 0, 0))[2] == Old(1, 2)


def test_the_digest_covers_names_types_order_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swapped(msgspec.Struct, array_like=True, frozen=True, tag="heartbeat"):
        busy_since_ns: int = 0
        sent_ns: int = 0

    before = wire.schema_digest()
    assert before == wire.SCHEMA_DIGEST
    monkeypatch.setattr("protocol.messages.Heartbeat", Swapped)
    assert wire.schema_digest() != before


def test_a_value_that_does_not_fit_its_column_is_refused_by_the_caller_that_has_it() -> None:
    with pytest.raises(OverflowError):
        pack_i32([2**31])
    with pytest.raises(OverflowError):
        pack_i32(np.array([-(2**31) - 1]))
    with pytest.raises((OverflowError, ValueError)):
        pack_u64([-1])
    with pytest.raises(ValueError, match="multiple"):
        i32(b"abc")


def test_columns_round_trip() -> None:
    assert i32(pack_i32([0, -1, 2**31 - 1])).tolist() == [0, -1, 2**31 - 1]
    assert u64(pack_u64([0, 2**64 - 1])).tolist() == [0, 2**64 - 1]
    assert i32(b"").tolist() == [] and pack_i32([]) == b""


def test_a_message_that_can_not_be_encoded_fails_before_anything_is_sent() -> None:
    with pytest.raises((UnicodeEncodeError, TypeError)):
        codec().encode(Submit(1, b"", SamplingParams(1), label="\ud83d"), 0, 0)
    assert codec().decode(codec().encode(Abort(b""), 0, 0))[2] == Abort(b"")
    assert codec().decode(memoryview(codec().encode(Heartbeat(1), 3, 2**32 + 4)))[:2] == (3, 4)
