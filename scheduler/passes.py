"""One scheduling pass: rows that run are served, then the queue's head may enter. Decides, then builds a Step.

Steady decode is a handful of vector operations over all rows. Only rows that cross a block border, victims and
admissions are touched one by one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protocol.columns import pack_i32, pack_u64
from protocol.messages import NewRequest, Step
from scheduler.policies.admission import AdmissionTest, Candidate
from scheduler.policies.batch import Counts, deal
from scheduler.policies.urgent import Holder, make_room
from scheduler.request import Request
from scheduler.table import SlotArray

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler

LOOK_PAST = 8
"""Waiters behind a blocked head that are tried in one pass."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step whose result is awaited: which rows it computes, and which of them sample, in step order."""

    step_id: int
    ids: npt.NDArray[np.uint64]
    incarnations: npt.NDArray[np.int32]
    sampled_slots: SlotArray
    sampled_ids: npt.NDArray[np.uint64]
    num_tokens: int
    num_copied: int
    swapped: list[tuple[int, int]]
    """(id, incarnation) of the requests whose KV this step copies to the host."""


@dataclass(slots=True)
class _Served:
    """Rows that have been given tokens together: [R] each. `sampled` is None until their counters have been moved."""

    slots: SlotArray
    counts: Counts
    sampled: npt.NDArray[np.bool_] | None = None


class Pass:
    """The state of one pass. Used once: `run()`, then `build()`."""

    def __init__(self, core: CoreScheduler) -> None:
        self.core = core
        self.budget = core.token_budget
        self.cap = core.strategies.batch.cap(len(core.table) + len(core.waiting), self.budget)
        self.preempted: list[Request] = []
        self._served: list[_Served] = []
        self._grown: dict[int, list[int]] = {}
        self._new: list[NewRequest] = []
        self._swap_in: list[int] = []

    def run(self) -> None:
        """Decide. A pass that has preempted for want of blocks admits nobody."""
        table, batch = self.core.table, self.core.strategies.batch
        rows = batch.order(table)
        if not batch.prefill_first:
            self._run_rows(rows)
            if not self.preempted:
                self._admit_waiting()
            return
        behind = batch.prefilling(table, rows)
        self._run_rows(rows[behind])
        if not self.preempted:
            self._admit_waiting()
        if not self._anything:
            self._run_rows(rows[~behind])

    @property
    def _anything(self) -> bool:
        return any(len(served.slots) for served in self._served)

    @property
    def _others(self) -> bool:
        """Whether a newcomer would share the batch: rows of a prefill-first step that decode come later, but come."""
        return self._anything or (self.core.strategies.batch.prefill_first and len(self.core.table) > 0)

    # --- rows that run --------------------------------------------------------------------------------------

    def _run_rows(self, pending: SlotArray) -> None:
        """Serve these rows in order. Whoever can't get a block makes the victim policy choose, and retries."""
        core = self.core
        table, pool, size = core.table, core.pool, core.block_size
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
                self._serve(pending, counts, growth, growing)
                break
            needy = int(growing[short[0]])
            self._serve(pending[:needy], counts[:needy], growth, growing[: short[0]])
            needy_request = table.request[int(pending[needy])]
            victim_slot = self._preempt(core.choose_victim(), needy_request)
            pending = pending[needy:]
            if victim_slot == pending[0]:
                if core.strategies.preset.self_victim_ends_phase:
                    break
                granted = self.cap
            else:
                granted = int(counts[needy])
            pending = pending[pending != victim_slot]
        self._advance()

    def _serve(self, slots: SlotArray, counts: Counts, growth: Counts, growing: SlotArray) -> None:
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
        self._served.append(_Served(slots, counts))

    def _preempt(self, victim: Request, needy: Request | None) -> int:
        """Suspend a running request and undo what this pass has given it. Returns the slot it had."""
        slot = victim.slot
        for served in self._served:
            mine = served.slots == slot
            if mine.any():
                count = int(served.counts[mine].sum())
                self.budget += count
                if served.sampled is not None:
                    self.core.take_back(victim, count)
                    served.sampled = served.sampled[~mine]
                served.slots, served.counts = served.slots[~mine], served.counts[~mine]
        self._grown.pop(slot, None)
        self.core.preempt(victim, needy)
        self.preempted.append(victim)
        return slot

    def _advance(self) -> None:
        """The rows served but not yet moved will be computed: move their counters, seal blocks that become full."""
        for served in self._served:
            if served.sampled is None:
                scheduled = served.counts > 0
                if not scheduled.all():
                    served.slots, served.counts = served.slots[scheduled], served.counts[scheduled]
                served.sampled = self.core.advance(served.slots, served.counts)

    # --- those who wait -------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Admit until a test binds. Swapped requests return first; a head that doesn't fit blocks those behind it."""
        core = self.core
        if not len(core.waiting):
            return
        allowed = core.strategies.batch.admissions(len(core.table), len(core.waiting), core.table.limit)
        if self._limits_hold() is None:  # else nobody will be tested
            core.strategies.admission.begin(core.running_columns(), core.pool.num_free)
        while allowed > 0 and (head := core.waiting.next_swapped()) is not None:
            bound = self._limits_hold() or self._return(head)
            if bound is not None and not (bound == AdmissionTest.BLOCKS and self._reclaim(head)):
                core.hold(head, bound)
                return
            allowed -= bound is None
        while allowed > 0:
            bound = self._limits_hold()
            first = self._first(exact=bound is None)
            if first is None:
                return
            bound = bound or self._enter(first)
            if bound == AdmissionTest.BLOCKS and self._reclaim(first):
                continue
            if bound is not None:
                core.hold(first, bound)
                if self._make_way(first, bound) or not self._pass_by(first, bound):
                    return
            allowed -= 1

    def _first(self, *, exact: bool) -> Request | None:
        """The next one who may enter. While a plain limit holds, the order isn't made anew just to name the head."""
        waiting, core = self.core.waiting, self.core
        if core.paused != "no":
            return next(filter(core.may_enter, waiting.candidates(core.view, core.now())), None)
        if not exact:
            return waiting.front(core.now())
        return next(waiting.candidates(core.view, core.now()), None)

    def _reclaim(self, head: Request) -> bool:
        """When nothing runs, what keeps the head out are blocks of requests that don't: the newest gives its up.

        It computes them again, or hits those that nobody has overwritten by then.
        """
        core = self.core
        if len(core.table) or self._anything:
            return False
        holder = core.waiting.newest_holder(head)
        if holder is not None:
            core.drop_kept(holder)
            core.strategies.admission.begin(core.running_columns(), core.pool.num_free)
        return holder is not None

    def _limits_hold(self) -> AdmissionTest | None:
        """The two plain limits: tokens left in this step, slots left in the batch."""
        if self.budget <= 0:
            return AdmissionTest.TOKENS
        if len(self.core.table) >= self.core.table.limit:
            return AdmissionTest.SLOTS
        return None

    def _pass_by(self, head: Request, bound: AdmissionTest) -> bool:
        """Let one of those behind a head that lacks blocks enter in its place, a bounded number of times."""
        core = self.core
        if bound not in (AdmissionTest.BLOCKS, AdmissionTest.WATERMARK) or not core.strategies.preset.guarded:
            return False
        if head.num_bypassed >= core.config.max_bypasses:
            return False
        for request in list(islice(core.waiting.candidates(core.view, core.now()), 1, LOOK_PAST + 1)):
            if core.may_enter(request) and self._enter(request) is None:
                head.num_bypassed += 1
                return True
        return False

    def _enter(self, request: Request) -> AdmissionTest | None:
        """Test, look up, allocate and size the first chunk as one decision. The test that binds, or None."""
        bound = self._limits_hold()
        if bound is not None:
            return bound
        core, pool, size = self.core, self.core.pool, self.core.block_size
        known = request.num_tokens
        held = request.blocks
        hit = held or core.find_hit(request)
        start = request.kept // size * size if held else len(hit) * size
        fetch = bool(request.kv_source) and not held
        if fetch:
            count, first = 0, max(0, (known - 1) // size - len(hit))
        else:
            count = min((known - 1 if request.open else known) - start, self.cap, self.budget)
            first = max(0, -(-(start + count) // size) - len(hit))
        candidate = self._candidate(request, hit, first)
        bound = core.strategies.admission.test(candidate, pool.num_free, pool.num_blocks, self._others)
        if bound is not None:
            return bound
        if not held:
            pool.hold(hit)
        taken = pool.take(first)
        if fetch:
            core.external.fetch_kv(request, hit + taken, len(hit))
            return None
        if count == 0:  # an open request with nothing to compute before its next part
            core.external.wait_for_input(request, hit + taken, start)
            return None
        core.strategies.admission.admitted(candidate)
        self._begin(request, hit + taken, start, count)
        return None

    def _candidate(self, request: Request, hit: list[int], first: int) -> Candidate:
        """A waiter with these leading blocks, its own or cached ones, and `first` more to take now."""
        pool, size = self.core.pool, self.core.block_size
        reused = 0 if request.blocks else pool.count_free(hit)
        return Candidate(
            now=first + reused,
            whole=max(0, -(-request.num_tokens // size) - len(hit)) + reused,
            known_tokens=request.num_tokens,
            total_tokens=request.max_total,
            matched_tokens=len(hit) * size,
            reused=reused,
        )

    def _return(self, request: Request) -> AdmissionTest | None:
        """Bring a swapped request back: new pages, and copies into them before this step reads."""
        core, pool, size = self.core, self.core.pool, self.core.block_size
        known, kept = request.num_tokens, request.kept
        count = min(known - kept, self.cap, self.budget)
        if count <= 0:
            return AdmissionTest.TOKENS  # the token that its last step sampled is still in flight
        now, whole = -(-(kept + count) // size), -(-known // size)
        candidate = Candidate(now=now, whole=whole, known_tokens=known, total_tokens=request.max_total)
        bound = core.strategies.admission.test(candidate, pool.num_free, pool.num_blocks, self._others)
        if bound is not None:
            return bound
        blocks = pool.take(now)
        for device, host in zip(blocks, request.host_blocks, strict=False):
            self._swap_in += (device, host)
        core.strategies.admission.admitted(candidate)
        self._begin(request, blocks, kept, count)
        return None

    def _begin(self, request: Request, blocks: list[int], start: int, count: int) -> None:
        """A request runs from here on: its first `count` tokens after `start` are in this step."""
        slot = self.core.admit(request, blocks, start)
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
        self._served.append(_Served(np.array([slot], np.intp), np.array([count], np.int32)))
        self._advance()

    def _make_way(self, head: Request, bound: AdmissionTest) -> bool:
        """An urgent head takes slots or blocks from running requests that are less urgent by more than the threshold.

        All or nothing, counting its whole prompt and what the victims share with it, with one another and with others.
        Nobody else enters in this pass, and nobody has: a newcomer may rely on blocks that a victim was to fill.
        """
        core, threshold = self.core, self.core.config.priority_preemption_threshold
        if core.strategies.queue.name != "priority" or threshold < 0 or bound == AdmissionTest.TOKENS or self._new:
            return False
        table = core.table
        if not len(table) or int(table.priority[table.order].max()) - head.priority <= threshold:
            return False
        running = table.requests()
        holders = [Holder(r.priority, r.arrival, 0) for r in running]
        count = 1 if len(table) >= table.limit else 0
        victims = make_room(head.priority, 0, count, holders, threshold=threshold)
        while victims is not None and self._lacking_without(head, [running[i] for i in victims]) > 0:
            victims = make_room(head.priority, 0, len(victims) + 1, holders, threshold=threshold)
        if not victims:
            return False
        for index in victims:
            self._preempt(running[index], head)
        core.strategies.admission.begin(core.running_columns(), core.pool.num_free)
        return self._enter(head) is None

    def _lacking_without(self, head: Request, victims: list[Request]) -> int:
        """Blocks that admission would still ask for if these had left. Touches nothing."""
        core, pool, size = self.core, self.core.pool, self.core.block_size
        leaving = Counter(block for victim in victims for block in victim.blocks)
        freed = sum(1 for block, count in leaving.items() if pool.refs[block] == count)
        hit = head.blocks or core.find_hit(head)
        final = (head.num_tokens - 1 if head.open else head.num_tokens) - len(hit) * size
        first = max(0, -(-min(final, self.cap, self.core.token_budget) // size))
        candidate = self._candidate(head, hit, first)
        if not head.blocks:
            shared = sum(1 for block in hit if leaving[block] and pool.refs[block] == leaving[block])
            candidate = replace(
                candidate,
                now=candidate.now + shared,
                whole=candidate.whole + shared,
                reused=candidate.reused + shared,
            )
        gone = {victim.slot for victim in victims}
        rows = core.table.order[[slot not in gone for slot in core.table.order.tolist()]]
        admission, free = core.strategies.admission, pool.num_free + freed
        admission.begin(core.running_columns(rows), free)
        lacking = admission.lacking(candidate, free, pool.num_blocks, len(rows) > 0)
        admission.begin(core.running_columns(), pool.num_free)
        return lacking

    # --- the step -------------------------------------------------------------------------------------------

    def build(self, step_id: int) -> Step | None:
        """The step, or None if nothing is to be done. `flight` holds its record afterwards."""
        core, table = self.core, self.core.table
        served = [entry for entry in self._served if len(entry.slots)]
        if not served and not core.suspension.copies and not (core.left and core.external.orders):
            return None
        slots = np.concatenate([entry.slots for entry in served]) if served else np.empty(0, np.intp)
        counts = np.concatenate([entry.counts for entry in served]) if served else np.empty(0, np.int32)
        sampled = np.concatenate([entry.sampled for entry in served if entry.sampled is not None] or [slots > 0])
        self.num_rows, self.num_tokens = len(slots), int(counts.sum())
        assert self.num_tokens <= core.token_budget
        ids = table.id[slots]
        copies = (len(core.suspension.copies) + len(self._swap_in)) // 2
        self.flight = Flight(
            step_id, ids, table.incarnation[slots], slots[sampled], ids[sampled], self.num_tokens, copies,
            core.suspension.copied,
        )  # fmt: skip
        rows = np.empty(table.capacity, np.int32)
        rows[slots] = np.arange(len(slots), dtype=np.int32)
        grown = list(self._grown)
        # A block that was given to somebody else since it was sealed holds that content no longer.
        filled = [(block, block_hash) for block, block_hash in core.filled if core.pool.hash_of[block] == block_hash]
        return Step(
            epoch=core.epoch,
            step_id=step_id,
            ids=ids.tobytes(),
            num_tokens=counts.tobytes(),
            new=self._new,
            left=pack_u64(core.left),
            grow_rows=rows[grown].tobytes(),
            grow_counts=pack_i32([len(self._grown[slot]) for slot in grown]),
            grow_blocks=pack_i32([block for slot in grown for block in self._grown[slot]]),
            filled_blocks=pack_i32([block for block, _ in filled]),
            filled_hashes=b"".join(block_hash for _, block_hash in filled),
            swap_out=pack_i32(core.suspension.copies),
            swap_in=pack_i32(self._swap_in),
        )
