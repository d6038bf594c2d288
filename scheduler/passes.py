"""One scheduling pass: rows that run are served first, then the queue's head may enter. Decides, then builds a Step.

Steady decode is a handful of vector operations over all rows. Only rows that cross a block border, victims and
admissions are touched one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protocol.columns import pack_i32, pack_u64
from protocol.messages import NewRequest, RequestStatus, Step
from scheduler.policies.admission import AdmissionTest, Candidate
from scheduler.policies.batch import Counts, deal
from scheduler.request import Request
from scheduler.table import SlotArray

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler


@dataclass(frozen=True, slots=True)
class Flight:
    """A step whose result is awaited: which rows it computes, and which of them sample, in step order."""

    step_id: int
    ids: npt.NDArray[np.uint64]
    incarnations: npt.NDArray[np.int32]
    sampled_slots: SlotArray
    sampled_ids: npt.NDArray[np.uint64]
    sampled_incarnations: npt.NDArray[np.int32]


class Pass:
    """The state of one pass. Used once: `running()`, `waiting()`, then `build()`."""

    def __init__(self, core: CoreScheduler) -> None:
        self.core = core
        self.budget = core.token_budget
        self.cap = core.strategies.batch.cap(len(core.table) + len(core.strategies.queue))
        self.preempted: list[Request] = []
        self._slots: list[SlotArray] = []
        self._counts: list[Counts] = []
        self._sampled: list[npt.NDArray[np.bool_]] = []
        self._grown: dict[int, list[int]] = {}
        self._new: list[NewRequest] = []

    # --- rows that run --------------------------------------------------------------------------------------

    def running(self) -> None:
        """Serve the running rows in order. Whoever can't get a block makes the victim policy choose, and retries."""
        table, pool, size = self.core.table, self.core.pool, self.core.block_size
        strategies = self.core.strategies
        pending = strategies.batch.order(table)
        granted = self.cap  # what the first row in `pending` was dealt before somebody made room for it
        while len(pending):
            computed = table.computed[pending]
            wanted = np.minimum(np.minimum(table.target[pending], table.final[pending]) - computed, self.cap)
            wanted[0] = min(wanted[0], granted)
            counts = deal(wanted, self.budget)
            growth = (computed + counts + (size - 1)) // size - table.blocks[pending]
            growing = np.flatnonzero(growth > 0)
            short = np.flatnonzero(np.cumsum(growth[growing]) > pool.num_free) if len(growing) else growing
            if not len(short):
                self._commit(pending, counts, growth, growing)
                break
            needy = int(growing[short[0]])
            self._commit(pending[:needy], counts[:needy], growth, growing[: short[0]])
            victim_slot = self._preempt(strategies.victim.choose(table))
            pending = pending[needy:]
            if victim_slot == pending[0]:
                if strategies.self_victim_ends_phase:
                    break
                granted = self.cap
            else:
                granted = int(counts[needy])
            pending = pending[pending != victim_slot]
        self._advance()

    def _commit(self, slots: SlotArray, counts: Counts, growth: Counts, growing: SlotArray) -> None:
        """Give these rows their tokens, and those at `growing` their blocks."""
        table, pool = self.core.table, self.core.pool
        for index in growing.tolist():
            slot = int(slots[index])
            request = table.request[slot]
            assert request is not None
            blocks = pool.take(int(growth[index]))
            request.blocks += blocks
            table.blocks[slot] = len(request.blocks)
            self._grown[slot] = blocks
        self.budget -= int(counts.sum())
        self._slots.append(slots)
        self._counts.append(counts)

    def _preempt(self, victim: Request) -> int:
        """Suspend a running request and undo what this pass has given it. Returns the slot it had."""
        slot = victim.slot
        for index, slots in enumerate(self._slots):
            mine = slots == slot
            if mine.any():
                self.budget += int(self._counts[index][mine].sum())
                self._slots[index] = slots[~mine]
                self._counts[index] = self._counts[index][~mine]
        self._grown.pop(slot, None)
        self.core.preempt(victim)
        self.preempted.append(victim)
        return slot

    def _advance(self) -> None:
        """The rows committed so far will be computed: move their counters and seal the blocks that become full."""
        slots = np.concatenate(self._slots) if self._slots else np.empty(0, np.intp)
        counts = np.concatenate(self._counts) if self._counts else np.empty(0, np.int32)
        scheduled = counts > 0
        if not scheduled.all():
            slots, counts = slots[scheduled], counts[scheduled]
        self._slots, self._counts = [slots], [counts]
        self._sampled = [self.core.advance(slots, counts)]

    # --- the queue ------------------------------------------------------------------------------------------

    def waiting(self) -> None:
        """Admit from the head of the queue until a test binds. A head that doesn't fit blocks those behind it."""
        core, queue = self.core, self.core.strategies.queue
        while len(queue):
            if self.budget <= 0:
                core.hold(queue.peek(), AdmissionTest.TOKENS)
                break
            if len(core.table) >= core.table.capacity:
                core.hold(queue.peek(), AdmissionTest.SLOTS)
                break
            head = queue.peek()
            bound = self._admit(head)
            if bound is not None:
                core.hold(head, bound)
                break

    def _admit(self, request: Request) -> AdmissionTest | None:
        """Look up, test, allocate and size the first chunk as one decision. The test that binds, or None."""
        core, pool, size = self.core, self.core.pool, self.core.block_size
        known = request.num_tokens
        hit = core.find_hit(request)
        start = len(hit) * size
        count = min(known - start, self.cap, self.budget)
        reused = pool.count_free(hit)
        first = -(-(start + count) // size) - len(hit)
        whole = -(-known // size) - len(hit)
        bound = core.strategies.admission.test(
            Candidate(now=first + reused, whole=whole + reused),
            pool.num_free,
            pool.num_blocks,
            others_scheduled=any(len(slots) for slots in self._slots),
        )
        if bound is not None:
            return bound
        pool.hold(hit)
        slot = core.admit(request, hit, pool.take(first))
        self.budget -= count
        self._new.append(
            NewRequest(
                id=request.id,
                incarnation=request.incarnation,
                tokens=bytes(request.data),
                num_prompt=request.num_prompt,
                num_computed=start,
                block_ids=pack_i32(request.blocks),
                params=request.params,
            )
        )
        slots, counts = np.array([slot], np.intp), np.array([count], np.int32)
        self._slots.append(slots)
        self._counts.append(counts)
        self._sampled.append(core.advance(slots, counts))
        return None

    # --- the step -------------------------------------------------------------------------------------------

    def build(self, epoch: int, step_id: int, left: list[int], filled: list[tuple[int, bytes]]) -> Step | None:
        """The step, or None if nothing is to be computed. `flight` holds its record afterwards."""
        if not self._slots:
            return None
        slots = np.concatenate(self._slots)
        if not len(slots):
            return None
        counts = np.concatenate(self._counts)
        sampled = np.concatenate(self._sampled)
        table = self.core.table
        assert int(counts.sum()) <= self.core.token_budget
        ids = table.id[slots]
        incarnations = table.incarnation[slots]
        self.flight = Flight(step_id, ids, incarnations, slots[sampled], ids[sampled], incarnations[sampled])
        self.num_rows, self.num_tokens = len(slots), int(counts.sum())
        rows = np.empty(table.capacity, np.int32)
        rows[slots] = np.arange(len(slots), dtype=np.int32)
        grown = list(self._grown)
        return Step(
            epoch=epoch,
            step_id=step_id,
            ids=ids.tobytes(),
            num_tokens=counts.tobytes(),
            new=self._new,
            left=pack_u64(left),
            grow_rows=rows[grown].tobytes(),
            grow_counts=pack_i32([len(self._grown[slot]) for slot in grown]),
            grow_blocks=pack_i32([block for slot in grown for block in self._grown[slot]]),
            filled_blocks=pack_i32([block for block, _ in filled]),
            filled_hashes=b"".join(block_hash for _, block_hash in filled),
        )


def is_live_waiting(request: Request) -> bool:
    """Whether a request stands in the queue."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
