"""Frames and codecs: one frame per message, an 8-byte prefix and a msgpack body.

Prefix: little-endian u32 `session` (chosen by the connecting side in each Hello) and u32 `sequence` (from 0, per
direction, wrapping). A frame of another session is stale and dropped; a gap in the sequence is a lost message, and
ends the session. The schema digest is derived from the Structs themselves, so a changed field can't go unnoticed.
"""

from __future__ import annotations

import hashlib
import re
import struct
import typing
from typing import Generic, TypeVar

import msgspec

from protocol import messages

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 256 * 1024 * 1024

BAD_VERSION = "version_mismatch"
BAD_DIGEST = "schema_mismatch"
BAD_FRAME = "bad_frame"
NO_SESSION = "no_session"
OCCUPIED = "occupied"
REPLAYED = "replayed"

_PREFIX = struct.Struct("<II")
PREFIX_BYTES = _PREFIX.size

T = TypeVar("T")


class FrameError(Exception):
    """A frame that can't be decoded: too short, too long, not msgpack, or not a message of this link."""


def _describe(tp: object) -> str:
    """A stable text for a field type: names, not addresses."""
    if isinstance(tp, type):
        return tp.__name__
    return re.sub(r"\b(typing|protocol\.\w+)\.", "", str(tp))


def schema_digest() -> str:
    """16 hex digits over every message's tag, field names, types and order. Differs when the wire contract does."""
    digest = hashlib.blake2b(digest_size=8)
    for name, cls in sorted(vars(messages).items()):
        if not (isinstance(cls, type) and issubclass(cls, msgspec.Struct)) or name.startswith("_"):
            continue
        digest.update(f"{cls.__struct_config__.tag}:".encode())
        hints = typing.get_type_hints(cls)
        for field in cls.__struct_fields__:
            digest.update(f"{field}={_describe(hints[field])};".encode())
    digest.update(",".join(f"{s.name}={s.value}" for s in messages.RequestStatus).encode())
    return digest.hexdigest()


SCHEMA_DIGEST = schema_digest()


class Codec(Generic[T]):
    """Encodes what this side sends and decodes what the other side may send, and nothing else."""

    def __init__(self, receives: typing.Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)

    def encode(self, message: msgspec.Struct, session: int, sequence: int) -> bytes:
        """One fresh frame. Raises whatever makes `message` unencodable; nothing is sent in that case."""
        return _PREFIX.pack(session, sequence & 0xFFFFFFFF) + self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> tuple[int, int, T]:
        """(session, sequence, message). Raises FrameError for anything malformed."""
        if len(frame) < PREFIX_BYTES:
            raise FrameError(f"frame of {len(frame)} bytes is shorter than its prefix")
        if len(frame) > MAX_FRAME_BYTES:
            raise FrameError(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        session, sequence = _PREFIX.unpack_from(frame)
        try:
            message = self._decoder.decode(memoryview(frame)[PREFIX_BYTES:])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FrameError(str(error)) from error
        return session, sequence, message
