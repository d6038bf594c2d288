"""Who makes way in a pass: decoding rows when the next step doesn't fit, running requests for an urgent head, and idle
ones that hold blocks for somebody who is alone, at the head or running.

Which of them is a policy's choice; here is what the policies are told, and what happens to those they name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scheduler.entering import candidate, enter
from scheduler.policies.admission import AdmissionTest, Candidate, Leaving
from scheduler.policies.batch import Counts
from scheduler.policies.retraction import Running
from scheduler.policies.urgent import Holder, make_room
from scheduler.request import Request
from scheduler.table import SlotArray

if TYPE_CHECKING:
    from scheduler.passes import Pass


class _DecodeMemory:
    """The pool as a retraction sees it, in tokens. Cached blocks without a holder are free, nothing need be evicted."""

    def __init__(self, this: Pass, slots: SlotArray, needy: Request | None) -> None:
        self._pass = this
        self._requests = [this.core.table.request[slot] for slot in slots.tolist()]
        self._needy = needy

    def available(self) -> int:
        return self._pass.core.pool.num_free * self._pass.core.block_size

    def evict(self, wanted: int) -> None:
        """Taking a block is what evicts it."""

    def release(self, index: int) -> None:
        victim = self._requests[index]
        assert victim is not None
        self._pass.preempt(victim, self._needy)


def retract(this: Pass, pending: SlotArray, wanted: Counts, needy: int) -> SlotArray | None:
    """Make decoding rows of `pending` leave until the rest can go on; `needy` is the first that lacks a block.

    Returns who may be served in this pass; None if that isn't the victim policy's way. While a row has its last token
    in flight nobody leaves and nobody decodes: its blocks come back with the next result.
    """
    core, table = this.core, this.core.table
    if not core.strategies.victim.options.until_fit:
        return None
    slots = pending[wanted == 1]
    ending = table.total[table.order] - 1 == table.computed[table.order]
    if core.flights and ending.any():
        return pending[:0]
    columns = (table.prompt[slots], table.target[slots] - table.prompt[slots], table.priority[slots])
    running = [Running(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    memory = _DecodeMemory(this, slots, table.request[int(pending[needy])])
    if core.strategies.victim.retract(running, memory, core.block_size) is None:
        return None
    this.short = True
    return pending[table.live[pending]]


def reclaim(this: Pass, head: Request) -> bool:
    """When nothing runs, what keeps the head out are blocks of requests that don't: the newest gives its up.

    It computes them again, or hits those that nobody has overwritten by then.
    """
    return not len(this.core.table) and not this.anything and take_kept(this, head)


def take_kept(this: Pass, needy: Request) -> bool:
    """The newest of those that hold blocks without running gives them up. False if there is none but `needy`."""
    holder = this.core.waiting.newest_holder(needy)
    if holder is None:
        return False
    this.core.drop_kept(holder)
    if this.begun:
        this.begin_admission(anew=True)
    return True


def make_way(this: Pass, head: Request, bound: AdmissionTest) -> bool:
    """An urgent head takes slots or blocks from running requests that are less urgent by more than the threshold.

    All or nothing, counting its whole prompt and what the victims share with it, with one another and with others.
    Who has been a victim often enough stays. Nobody else enters in this pass, and nobody has: a newcomer may rely on
    blocks that a victim was to fill.
    """
    core, threshold = this.core, this.core.config.priority_preemption_threshold
    if core.strategies.queue.name != "priority" or threshold < 0 or bound == AdmissionTest.TOKENS or this.new:
        return False
    table, admission = core.table, core.strategies.admission
    slots = table.order if this.decoding is None else this.decoding
    if not len(slots) or int(table.priority[slots].max()) - head.priority <= threshold:
        return False
    if not core.suspension.may_stay(head):
        return False
    this.begin_admission()
    offered = _as_newcomer(this, head)
    present = [request for slot in slots.tolist() if (request := table.request[slot]) is not None]
    running = [request for request in present if not core.suspension.is_spared(request)]
    slots = np.array([request.slot for request in running], np.intp)
    relief = admission.relief(core.running_columns(slots))
    holders = [Holder(r.priority, r.arrival, frees) for r, frees in zip(running, relief, strict=True)]
    need, count = admission.need(offered), 1 if len(table) >= table.limit else 0
    victims = make_room(head.priority, need, count, holders, threshold=threshold)
    while victims is not None and _lacking_without(this, head, offered, [running[i] for i in victims]) > 0:
        victims = make_room(head.priority, need, len(victims) + 1, holders, threshold=threshold)
    if not victims:
        return False
    leaving = _leaving(this, [running[index] for index in victims])
    for index in victims:
        this.preempt(running[index], head)
    admission.left(leaving)
    return enter(this, head) is None


def _leaving(this: Pass, victims: list[Request]) -> Leaving:
    """These running requests as admission sees them when they leave; a block that several share counts once."""
    pool = this.core.pool
    shares = Counter(block for victim in victims for block in victim.blocks)
    freed = sum(1 for block, count in shares.items() if pool.refs[block] == count)
    return Leaving(this.core.running_columns(np.array([victim.slot for victim in victims], np.intp)), freed)


def _as_newcomer(this: Pass, head: Request) -> Candidate:
    """The head as a pass would offer it. Touches nothing."""
    core, size = this.core, this.core.block_size
    hit = head.blocks or core.find_hit(head)
    final = (head.num_tokens - 1 if head.open else head.num_tokens) - len(hit) * size
    return candidate(this, head, hit, max(0, -(-min(final, this.cap, core.token_budget) // size)))


def _lacking_without(this: Pass, head: Request, offered: Candidate, victims: list[Request]) -> int:
    """Blocks that admission would still ask for if these had left. Touches nothing."""
    core, pool = this.core, this.core.pool
    leaving = _leaving(this, victims)
    if not head.blocks:
        hit = set(core.find_hit(head))
        shares = Counter(block for victim in victims for block in victim.blocks if block in hit)
        shared = sum(1 for block, count in shares.items() if pool.refs[block] == count)
        offered = replace(
            offered,
            now=offered.now + shared,
            whole=offered.whole + shared,
            reused=offered.reused + shared,
        )
    free, others = pool.num_free + leaving.freed, len(core.table) > len(victims)
    return core.strategies.admission.lacking(offered, free, pool.num_blocks, others, leaving)
