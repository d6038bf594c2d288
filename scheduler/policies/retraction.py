"""Who leaves when the next decode step doesn't fit: the least progress first, until the rest fit.

SGLang's rule as plain arithmetic. Memory is whatever the caller says it is; nothing here touches a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from scheduler.policies.ratio import STEPS_AFTER_RETRACTION


class Running(NamedTuple):
    """A decoding request. `priority`: smaller is more urgent."""

    input_len: int
    output_len: int
    priority: int = 0

    @property
    def kv_len(self) -> int:
        """Tokens whose KV it holds: all but the newest, which the next step computes."""
        return self.input_len + self.output_len - 1


class Memory(Protocol):
    """What the loop asks of a KV pool. All sizes are tokens."""

    def available(self) -> int:
        """Tokens that can be taken without evicting anything."""

    def evict(self, wanted: int) -> None:
        """Drop cached, unheld content until `wanted` tokens are available, or nothing is left to drop."""

    def release(self, index: int) -> None:
        """Take the KV of running request number `index`."""


class Retraction(NamedTuple):
    """What was decided. All entries are positions in the given sequence.

    `kept` is in keeping order, most progress first. `outgrown` is a last request that doesn't fit even alone.
    """

    retracted: tuple[int, ...]
    kept: tuple[int, ...]
    outgrown: int | None


def growth(kv_len: int, page_size: int) -> int:
    """Tokens of the pool that one more decode step of a request takes: a page at a page border, else nothing."""
    return page_size if kv_len % page_size == 0 else 0


def retraction_order(running: Sequence[Running], *, by_priority: bool = False) -> list[int]:
    """Positions in the order in which requests leave: fewest outputs first, then longest input, then last in line.

    `by_priority`: the least urgent first, and that order only among equals.
    """

    def keep_first(index: int) -> tuple[int, int, int]:
        request = running[index]
        return (request.priority if by_priority else 0, -request.output_len, request.input_len)

    return sorted(range(len(running)), key=keep_first)[::-1]


def retract(running: Sequence[Running], memory: Memory, page_size: int, *, by_priority: bool = False) -> Retraction:
    """Release requests until those that stay can decode one more step; at least one goes unless only one runs.

    Cached content is given up before a request is. After each release some is evicted in advance, so that the
    survivors get some steps further.
    """
    keep = retraction_order(running, by_priority=by_priority)[::-1]
    retracted: list[int] = []

    def fits() -> bool:
        needed = sum(growth(running[index].kv_len, page_size) for index in keep)
        memory.evict(needed)
        return memory.available() >= needed

    enough = fits()
    while len(keep) > 1 and not (enough and retracted):
        leaving = keep.pop()
        memory.release(leaving)
        retracted.append(leaving)
        memory.evict(len(keep) * STEPS_AFTER_RETRACTION)
        enough = fits()
    outgrown = None
    if keep and not enough:
        outgrown = keep.pop()
        memory.release(outgrown)
    return Retraction(tuple(retracted), tuple(keep), outgrown)
