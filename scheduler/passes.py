"""One scheduling pass: rows that run are served, then the queue's head may enter. Decides, then builds a Step.

Steady decode is a handful of vector operations over all rows. Only rows that cross a block border, victims and
admissions are touched one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protocol.columns import pack_i32, pack_u64
from protocol.messages import NewRequest, Step
from scheduler.entering import bring_back, enter
from scheduler.flight import Flight
from scheduler.making_way import make_way, reclaim, retract, take_kept
from scheduler.planning import carry_out
from scheduler.policies.admission import AdmissionTest
from scheduler.policies.batch import UNLIMITED, Counts, deal
from scheduler.policies.prefill_budget import Chunk
from scheduler.quarantine import take_turns
from scheduler.request import Request
from scheduler.table import SlotArray

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler

NOBODY: SlotArray = np.empty(0, np.intp)
LOOK_PAST = 8
"""Waiters behind a blocked head that are tried in one pass."""


@dataclass(slots=True)
class _Served:
    """Rows that have been given tokens together: [R] each. `sampled` is None until their counters have been moved."""

    slots: SlotArray
    counts: Counts
    sampled: npt.NDArray[np.bool_] | None = None


def _joined(served: list[_Served]) -> tuple[SlotArray, Counts, npt.NDArray[np.bool_]]:
    """Slots, counts and who samples, of all that have been served; their counters have been moved."""
    if not served:
        return np.empty(0, np.intp), np.empty(0, np.int32), np.empty(0, np.bool_)
    columns = [(entry.slots, entry.counts, entry.sampled) for entry in served if entry.sampled is not None]
    if len(columns) == 1:
        return columns[0]
    slots, counts, sampled = zip(*columns, strict=True)
    return np.concatenate(slots), np.concatenate(counts), np.concatenate(sampled)


class Pass:
    """The state of one pass. Used once: `run()`, then `build()`."""

    def __init__(self, core: CoreScheduler) -> None:
        self.core = core
        if core.suspects.open:
            core.suspects.settle()  # may close the case, and steps are smaller from then on
        self.budget = core.token_budget
        self.cap = core.strategies.batch.cap(len(core.table) + len(core.waiting), self.budget)
        self.caps: Counts | None = None
        """By slot, the most that a row may compute, where a plan says so."""
        self.preempted: list[Request] = []
        self._served: list[_Served] = []
        self._grown: dict[int, list[int]] = {}
        self.new: list[Request] = []
        """Who has entered in this pass."""
        self.swap_in: list[int] = []
        """(device, host) pairs, flat: what the step copies in."""
        self.begun = False
        """Whether the admission policy knows what it admits beside."""
        self.decoding: SlotArray | None = None
        """The rows that decode, where admission counts them apart from those whose prompt is under way."""
        self._decoded = False
        self.short = False
        """Whether somebody was preempted for want of blocks."""

    def run(self) -> None:
        """Decide, and tell the admission policy, once, if somebody was preempted for want of blocks."""
        self._decide()
        if self.short:
            self.core.strategies.admission.preempted(self.core.running_columns())

    def _decide(self) -> None:
        core = self.core
        if core.suspects.open:
            take_turns(self)
        elif (plan := core.planner.plan(self)) is not None:
            carry_out(plan, self)
        else:
            self.serve()

    def serve(self, apart: SlotArray = NOBODY, *, admits: bool = True) -> None:
        """Serve all rows but those `apart`, then admit. A pass that has preempted for want of blocks admits nobody."""
        core, batch = self.core, self.core.strategies.batch
        table, sized = core.table, core.strategies.admission.sizes_prompts
        reserves = core.strategies.admission.reserves
        if reserves and admits:
            self.admit_waiting()
        rows = batch.order(table)
        if len(apart):
            rows = rows[~np.isin(rows, apart)]
        admits = admits and not reserves
        if not (batch.prefill_first or sized):
            self.run_rows(rows)
            if admits and not self.preempted:
                self.admit_waiting()
            return
        behind = batch.prefilling(table, rows)
        prompts, decoding = rows[behind], rows[~behind]
        if not batch.prefill_first:
            self.run_rows(decoding)
        if sized:
            self.decoding = decoding[table.live[decoding]]
            self._continue_prompts(prompts)
        else:
            self.run_rows(prompts)
        if admits and not self.preempted:
            self.admit_waiting()
        if batch.prefill_first and not self.anything:
            self.run_rows(decoding[table.live[decoding]])

    @property
    def anything(self) -> bool:
        return any(len(served.slots) for served in self._served)

    @property
    def others(self) -> bool:
        """Whether a newcomer would share the batch: rows of a prefill-first step that decode come later, but come."""
        return self.anything or (self.core.strategies.batch.prefill_first and len(self.core.table) > 0)

    # --- rows that run --------------------------------------------------------------------------------------

    def _continue_prompts(self, prompts: SlotArray) -> None:
        """Prompts under way get what the admission policy grants them, as far as there are blocks for it."""
        core, table, size = self.core, self.core.table, self.core.block_size
        if not len(prompts):
            return
        self.begin_admission()
        for slot in prompts.tolist():
            if not table.live[slot] or self.budget <= 0:
                continue
            done, known = int(table.computed[slot]), int(min(table.target[slot], table.final[slot]))
            limit = core.strategies.queue.chunk_limit(self.budget, known - done, core.view)
            prompt = Chunk(known, done, int(table.total[slot] - table.prompt[slot]))
            granted = core.strategies.admission.resume(prompt, limit)
            room = (int(table.blocks[slot]) + core.pool.num_free) * size - done
            granted = min(granted, room if room > 0 else granted, self.cap)
            if granted > 0:
                self.run_rows(np.array([slot], np.intp), granted)

    def run_rows(self, pending: SlotArray, cap: int | None = None) -> None:
        """Serve these rows in order, each up to `cap` tokens. Whoever can't get a block makes the victim policy choose,
        and retries."""
        core = self.core
        table, pool, size = core.table, core.pool, core.block_size
        cap = self.cap if cap is None else cap
        granted = cap  # what the first row in `pending` was dealt before somebody made room for it
        while len(pending):
            computed = table.computed[pending]
            wanted = np.minimum(np.minimum(table.target[pending], table.final[pending]) - computed, cap)
            if self.caps is not None:
                wanted = np.minimum(wanted, self.caps[pending])
            wanted[0] = min(wanted[0], granted)
            counts = deal(wanted, self.budget)
            growth = (computed + counts + (size - 1)) // size - table.blocks[pending]
            growing = np.flatnonzero(growth > 0)
            short = np.flatnonzero(np.cumsum(growth[growing]) > pool.num_free) if len(growing) else growing
            if not len(short):
                self._serve(pending, counts, growth, growing)
                break
            needy = int(growing[short[0]])
            lone = table.request[int(pending[needy])] if len(table) == 1 else None
            if lone is not None and take_kept(self, lone):
                continue  # it would make way for itself, for ever
            if wanted[needy] == 1 and (left := retract(self, pending, wanted, needy)) is not None:
                pending = left
                continue
            self.short = True
            self._serve(pending[:needy], counts[:needy], growth, growing[: short[0]])
            needy_request = table.request[int(pending[needy])]
            victim_slot = self.preempt(core.choose_victim(), needy_request)
            pending = pending[needy:]
            if victim_slot == pending[0]:
                if core.strategies.preset.self_victim_ends_phase:
                    break
                granted = cap
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
        if self.core.strategies.admission.counts_decodes and not self._decoded:
            self._decoded = bool(((table.target[slots] - table.computed[slots] == 1) & (counts > 0)).any())
        self.budget -= int(counts.sum())
        self._served.append(_Served(slots, counts))

    def preempt(self, victim: Request, needy: Request | None) -> int:
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
                if np.count_nonzero(scheduled) < len(scheduled):
                    served.slots, served.counts = served.slots[scheduled], served.counts[scheduled]
                served.sampled = self.core.advance(served.slots, served.counts)

    # --- those who wait -------------------------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """Admit until a test binds. Swapped requests return first; a head that doesn't fit blocks those behind it."""
        core = self.core
        if not len(core.waiting):
            return
        allowed = core.strategies.batch.admissions(len(core.table), len(core.waiting), core.table.limit)
        if self.limits_hold() is None:  # else nobody will be tested
            self.begin_admission()
        allowed = self.return_swapped(allowed)
        while allowed > 0:
            bound = self.limits_hold()
            first = self._first(exact=bound is None)
            if first is None:
                return
            bound = bound or enter(self, first)
            if bound == AdmissionTest.BLOCKS and reclaim(self, first):
                continue
            if bound is not None:
                core.hold(first, bound)
                if make_way(self, first, bound) or not self._pass_by(first, bound):
                    return
            allowed -= 1

    def return_swapped(self, allowed: int = UNLIMITED) -> int:
        """Bring back those that were swapped out, `allowed` at most. How many may still enter: none if a test binds."""
        core = self.core
        while allowed > 0 and (head := core.waiting.next_swapped(core.now())) is not None:
            bound = self.limits_hold() or bring_back(self, head)
            if bound is not None and not (bound == AdmissionTest.BLOCKS and reclaim(self, head)):
                core.hold(head, bound)
                return 0
            allowed -= bound is None
        return allowed

    def begin_admission(self, *, anew: bool = False) -> None:
        """Tell the admission policy what it admits beside, once in a pass unless `anew`."""
        if self.begun and not anew:
            return
        self.begun = True
        core, decoding = self.core, self.decoding
        served = 0 if core.strategies.batch.prefill_first or decoding is None else core.token_budget - self.budget
        rows = core.running_columns(decoding)
        core.strategies.admission.draining = core.draining_pages.count()
        core.strategies.admission.begin(rows, core.pool.num_free, core.token_budget, served)

    def _first(self, *, exact: bool) -> Request | None:
        """The next one who may enter. While a plain limit holds, the order isn't made anew just to name the head."""
        waiting, core = self.core.waiting, self.core
        if core.paused != "no":
            return next(filter(core.may_enter, waiting.candidates(core.view, core.now())), None)
        if not exact:
            return waiting.front(core.now())
        return next(waiting.candidates(core.view, core.now()), None)

    def limits_hold(self) -> AdmissionTest | None:
        """The two plain limits: tokens left in this step, slots left in the batch."""
        if self.budget <= 0:
            return AdmissionTest.TOKENS
        if len(self.core.table) >= self.core.table.limit:
            return AdmissionTest.SLOTS
        return None

    def _pass_by(self, head: Request, bound: AdmissionTest) -> bool:
        """Let one of those behind a head that lacks blocks enter in its place, a bounded number of times."""
        core = self.core
        if bound in (AdmissionTest.TOKENS, AdmissionTest.SLOTS) or not core.strategies.preset.guarded:
            return False
        if head.num_bypassed >= core.config.max_bypasses:
            return False
        for request in list(islice(core.waiting.candidates(core.view, core.now()), 1, LOOK_PAST + 1)):
            if core.may_enter(request) and enter(self, request) is None:
                head.num_bypassed += 1
                return True
        return False

    def begin(self, request: Request, blocks: list[int], start: int, count: int) -> None:
        """A request runs from here on: its first `count` tokens after `start` are in this step, or as many as it gets
        in its turn, now or later, if it has entered on a promise."""
        slot = self.core.admit(request, blocks, start)
        self.new.append(request)
        if self.core.strategies.admission.reserves:
            return
        self.budget -= count
        self._served.append(_Served(np.array([slot], np.intp), np.array([count], np.int32)))
        self._advance()

    # --- the step -------------------------------------------------------------------------------------------

    def build(self, step_id: int) -> Step | None:
        """The step, or None if nothing is to be done. `flight` holds its record afterwards."""
        core, table = self.core, self.core.table
        served = [entry for entry in self._served if len(entry.slots)]
        if not served and not core.suspension.copies and not (core.left and core.external.orders):
            return None
        slots, counts, sampled = _joined(served)
        self.num_rows, self.num_tokens = len(slots), int(counts.sum())
        if not self.short:
            core.strategies.admission.stepped(decoded=self._decoded)
        assert self.num_tokens <= core.token_budget
        ids = table.id[slots]
        copies = (len(core.suspension.copies) + len(self.swap_in)) // 2
        self.flight = Flight(
            step_id, ids, table.incarnation[slots], table.computed[slots], slots[sampled], ids[sampled],
            self.num_tokens, copies, core.suspension.copied,
        )  # fmt: skip
        new = self._introduce(slots, counts)
        grown = list(self._grown)
        rows = np.empty(table.capacity, np.int32)
        if grown:
            rows[slots] = np.arange(len(slots), dtype=np.int32)
        core.strategies.batch.served(table, slots)
        filled = core.sealing.filled()
        return Step(
            epoch=core.epoch,
            step_id=step_id,
            ids=ids.tobytes(),
            num_tokens=counts.tobytes(),
            new=new,
            left=pack_u64(core.left),
            grow_rows=rows[grown].tobytes(),
            grow_counts=pack_i32([len(self._grown[slot]) for slot in grown]),
            grow_blocks=pack_i32([block for slot in grown for block in self._grown[slot]]),
            filled_blocks=pack_i32([block for block, _ in filled]),
            filled_hashes=b"".join(block_hash for _, block_hash in filled),
            swap_out=pack_i32(core.suspension.copies),
            swap_in=pack_i32(self.swap_in),
        )

    def _introduce(self, slots: SlotArray, counts: Counts) -> list[NewRequest]:
        """The requests of these rows that the runner doesn't know yet. What they have been given is in their tables."""
        table, found = self.core.table, []
        if np.count_nonzero(table.sent[slots]) == len(slots):
            return []
        for index in np.flatnonzero(~table.sent[slots]).tolist():
            slot = int(slots[index])
            request = table.request[slot]
            assert request is not None
            self._grown.pop(slot, None)
            found.append(request.introduced(int(table.computed[slot] - counts[index])))
        table.sent[slots] = True
        return found
