"""What the first rank tells the others: the same orders, in the same sequence, that its own executor gets."""

from __future__ import annotations

import msgspec

from protocol.messages import FetchKv, KvStatus, Step


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do. Before it, collect the `collected` oldest of the steps that are under way: a step that is
    settled late changes the rows of the next, and those must be the same on all ranks."""

    collected: int = 0


class Run(Order, frozen=True, tag=True):
    """Run a step."""

    step: Step


class Moved(Order, frozen=True, tag=True):
    """A KV transfer has begun or, with `status`, ended."""

    order: FetchKv
    status: KvStatus | None = None


class Clear(Order, frozen=True, tag=True):
    """A new scheduler: forget all residents."""


class End(Order, frozen=True, tag=True):
    """No more orders will come."""


AnyOrder = Run | Moved | Clear | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)


def encode(order: AnyOrder) -> bytes:
    """Bytes for a broadcast."""
    return _encoder.encode(order)


def decode(payload: bytes) -> AnyOrder:
    """What `encode` took."""
    return _decoder.decode(payload)
