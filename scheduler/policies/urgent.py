"""Who makes room for an urgent arrival: the least urgent and newest runners, or nobody at all.

SGLang's rule, but with the true prompt in the need, and never a victim for something that is there already. The unit
of the need is the caller's (tokens, blocks): the rule only compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.policies.prefill_budget import CLIP_MAX_NEW_TOKENS


class Holder(NamedTuple):
    """A running request that may have to leave. `priority`: smaller is more urgent; `frees`: in the need's unit."""

    priority: int
    entry: float
    frees: float


def tokens_needed(tokens: int, matched: int, max_new: int, rem_total: float) -> float:
    """Tokens that an arrival lacks in a budget: its uncached known tokens and clipped output beyond what remains."""
    return tokens - matched + min(max_new, CLIP_MAX_NEW_TOKENS) - rem_total


def make_room(
    priority: int, need: float, slots: int, running: Sequence[Holder], *, threshold: int = 10
) -> tuple[int, ...] | None:
    """Positions in `running` of those who leave so that `need` and `slots` are covered; None if they can't be.

    `need` is what the arrival lacks (nothing, if it isn't positive), `slots` how many running slots it lacks. Only
    requests whose priority is less urgent by *more* than `threshold` leave: least urgent first, newest first among
    equals. All or nothing: with None nobody should be touched, and an empty tuple says that nobody has to go.
    """
    if need <= 0 and slots <= 0:
        return ()
    victims: list[int] = []
    for index in sorted(range(len(running)), key=lambda index: (-running[index].priority, -running[index].entry)):
        if running[index].priority - priority <= threshold:
            break
        victims.append(index)
        need -= running[index].frees
        slots -= 1
        if need <= 0 and slots <= 0:
            return tuple(victims)
    return None
