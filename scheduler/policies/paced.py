"""Steps sized by the time they will take: decodes keep their pace, prefill gets what is left of each step.

A running request's next token is due one TPOT objective after the last one was; the slack that it has gained by being
early is spent when prefill waits. The prefill of a step is dealt to those who can still be on time, then to the late,
who have their own share, as whole steps. Without objectives, and while there is no prefill, this is `mixed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from scheduler.policies.batch import UNLIMITED, BatchOptions, Counts, Mixed
from scheduler.policies.late import Late, Turns
from scheduler.policies.on_time import Job, OnTime, feasible
from scheduler.policies.pace import StepPace, StepSize
from scheduler.request import Request
from scheduler.table import RowTable, SlotArray

MARGIN = 0.92
"""Tokens are aimed this much ahead of their due time: a prediction is no promise."""
LOST_TOKENS = 4
"""A row that is later than this many objectives has lost its own, and no longer shortens the others' steps."""
LONGEST, SHORTEST, UNWATCHED = 5.0, 0.5, 1.25
"""Bounds of a step in objectives, and its length when no decode row has anything to lose."""
LEAST_TOKENS = 64
SPARE_SLOTS = 0.25
"""Share of the slots that the late leave to those who may come on time."""
TTFT_MARGIN = 0.97
HURRY = 0.2
"""Length of a step in objectives while a late row that decodes has been here for longer than the late may wait."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a plan is made of. `start_ns`: when this step will begin on the device; `budget`: its tokens at most."""

    table: RowTable
    num_waiting: int
    queue: OnTime | None
    """Who waits, where the queue's policy is to serve in time."""
    pace: StepPace
    now_ns: int
    start_ns: int
    budget: int
    matched: Callable[[Request], int]
    """Tokens of a waiter that the prefix cache holds."""
    fits: Callable[[Request], bool]
    """Whether the blocks are there for a waiter to enter now."""


@dataclass(slots=True)
class Plan:
    """A step as it should become: `rows` in order with the most that each may compute (`caps`), then `entrants` with
    theirs, as far as the tests of admission let them. No `entrants`: the queue's own order decides."""

    rows: SlotArray
    caps: Counts
    budget: int
    entrants: list[tuple[Request, int]] | None


@dataclass(slots=True)
class _Work:
    """Prefill to be dealt: a running row (`slot`) or a waiter."""

    tokens: int
    due_ns: int
    request: Request
    slot: int = -1
    granted: int = 0


class Paced(Mixed):
    """`mixed` with objectives. `tpot_ns` 0: steps are as large as the budget allows."""

    name = "paced"

    def __init__(self, options: BatchOptions | None = None) -> None:
        super().__init__(options)
        self.tpot_ns = int(self.options.slo_tpot_s * 1e9)
        self.ttft_ns = int(self.options.slo_ttft_s * 1e9)

    @property
    def plans(self) -> bool:
        return self.tpot_ns > 0 or self.ttft_ns > 0

    def plan(self, now: Situation) -> Plan | None:
        """The step to build, or None where there is no prefill to fit in."""
        table = now.table
        order = table.order
        left = np.minimum(table.target[order], table.final[order]) - table.computed[order]
        prefilling = (left > 1) | (table.target[order] == table.prompt[order])
        if not (prefilling.any() or now.num_waiting):
            return None
        decodes = order[~prefilling]
        limit_ns = self._step_ns(now, decodes)
        if limit_ns and self._overdue(now, decodes):
            limit_ns = HURRY * self.tpot_ns
            decodes = decodes[~table.timely[decodes] | (self._slack_ns(now, decodes) <= limit_ns)]
        size = now.budget
        if limit_ns:
            attended = int(table.computed[decodes].sum()) + len(decodes)
            size = min(size, now.pace.tokens_within(limit_ns, attended))
        room = max(size - len(decodes), min(LEAST_TOKENS, now.budget - len(decodes)), 0)
        deal = _Deal(now, self.ttft_ns, room, limit_ns)
        deal.run(order[prefilling], left[prefilling])
        rows, caps = deal.running()
        return Plan(
            rows=np.concatenate((decodes, rows)),
            caps=np.concatenate((np.full(len(decodes), UNLIMITED, np.int32), caps)),
            budget=len(decodes) + room,
            entrants=None if now.queue is None else deal.entrants,
        )

    def _step_ns(self, now: Situation, decodes: SlotArray) -> float:
        """How long this step may take, from the slack of the decode rows that have something to lose; 0: no limit."""
        if not self.tpot_ns:
            return 0.0
        watched = decodes[now.table.timely[decodes]]
        if len(watched):
            slack = self._slack_ns(now, watched)
            slack = slack[slack > -LOST_TOKENS * self.tpot_ns]
            if len(slack):
                return float(np.clip(slack.min(), SHORTEST * self.tpot_ns, LONGEST * self.tpot_ns))
        return UNWATCHED * self.tpot_ns

    def _slack_ns(self, now: Situation, rows: SlotArray) -> npt.NDArray[np.float64]:
        """How long after this step's start the next token of each of these decode rows is due [R]."""
        table = now.table
        made = table.target[rows] - table.prompt[rows]
        return table.first_ns[rows] + made * (self.tpot_ns * MARGIN) - now.start_ns

    def _overdue(self, now: Situation, decodes: SlotArray) -> bool:
        """Whether a late row decodes that came longer ago than the late may wait. How many tokens it still has to make
        is unknown, so that all that can be done for it is to make steps short: then the others sit out those in which
        they have nothing due, and lose nothing."""
        if now.queue is None:
            return False
        table, since_ns = now.table, now.now_ns - now.queue.late.bound_ns
        late = decodes[~table.timely[decodes]]
        return bool((table.arrival_ns[late] < since_ns).any())


class _Deal:
    """Deals the prefill of one step, `room` tokens, to rows and waiters: who was preempted first, then the late their
    share, then those who can be on time, except for those that are too much work: they come after the late that are
    due soon. What is left goes again to the late."""

    def __init__(self, now: Situation, ttft_ns: int, room: int, limit_ns: float) -> None:
        self._now, self._ttft_ns = now, ttft_ns
        self._room, self._size = room, max(room, 1)
        self._step_ns = limit_ns or float(now.pace.predict(StepSize(self._size + 1, 0, 1)))
        self._resumed: list[_Work] = []
        self._timely: list[_Work] = []
        self._late: list[_Work] = []
        self._late_waiters: Iterator[_Work] = iter(())
        self._given_late = 0
        self.entrants: list[tuple[Request, int]] = []
        """Who may enter, in order, with the tokens of their first chunk at most."""

    def run(self, rows: SlotArray, left: Counts) -> None:
        """Deal. `rows` are prefilling, `left` [R] is what each has to compute."""
        self._sort_rows(rows, left)
        self._rows = [*self._resumed, *self._timely, *self._late]
        share = self._sort_waiters()
        self._deal(self._resumed, self._room)
        late = self._now.queue.late if self._now.queue is not None else None
        turns = late.turns if late is not None else Turns()
        self._deal_late(self._room if turns.next(share * self._room, self._size) else 0)
        small, large = self._by_work(late)
        missed = self._deal_timely(small, share)
        if large and late is not None:
            self._deal_late(self._room, late.owed.due_ns)
            missed += self._deal_timely(large, share)
        self._deal_late(self._room)
        turns.took(self._given_late)
        self._deal(missed, self._room)

    def _by_work(self, late: Late | None) -> tuple[list[_Work], list[_Work]]:
        """The timely, and those of them that are too much work to come before the late."""
        if late is None:
            return self._timely, []
        lengths = [work.request.num_prompt for work in self._timely]
        too_much = late.too_much(lengths, [work.tokens for work in self._timely], self._now.pace)
        small: list[_Work] = []
        large: list[_Work] = []
        for work, much in zip(self._timely, too_much, strict=True):
            (large if much and work.slot < 0 else small).append(work)
        return small, large

    def _deal_timely(self, works: list[_Work], share: float) -> list[_Work]:
        """To those of `works` that can be on time. Returns the others."""
        kept = self._feasible(works, share)
        self._deal([work for work, keep in zip(works, kept, strict=True) if keep], self._room)
        return [work for work, keep in zip(works, kept, strict=True) if not keep]

    def _sort_rows(self, rows: SlotArray, left: Counts) -> None:
        for slot, tokens in zip(rows.tolist(), left.tolist(), strict=True):
            request = self._now.table.request[slot]
            assert request is not None
            work = _Work(tokens, request.arrival_ns + self._ttft_ns, request, slot)
            if request.first_token_ns:
                self._resumed.append(work)
            elif not self._ttft_ns or work.due_ns > self._now.now_ns:
                self._timely.append(work)
            else:
                self._late.append(work)

    def _sort_waiters(self) -> float:
        """Adds those who wait. Returns the share of the late."""
        queue, now_ns = self._now.queue, self._now.now_ns
        if queue is None:
            return 0.0
        self._resumed += [self._waiter(request) for request in queue.resumed()]
        self._timely += [self._waiter(request) for request in queue.fresh(now_ns)]
        self._timely.sort(key=lambda work: work.request.arrival)
        if self._ttft_ns:
            queue.late.look(queue.overdue(now_ns), self._now.pace, now_ns)
        overdue = queue.overdue(now_ns)
        first = next(overdue, None)
        if first is not None:
            self._late_waiters = self._with_slots(first, overdue)
        oldest = min((work.request for work in self._late), key=lambda request: request.arrival, default=first)
        if first is not None and oldest is not None and first.arrival < oldest.arrival:
            oldest = first
        return queue.late.share(oldest, now_ns, self._room, self._step_ns) if oldest is not None else 0.0

    def _waiter(self, request: Request) -> _Work:
        tokens = max(1, request.num_tokens - self._now.matched(request))
        return _Work(tokens, request.arrival_ns + self._ttft_ns, request)

    def _with_slots(self, first: Request, others: Iterator[Request]) -> Iterator[_Work]:
        """The late who may enter, oldest first: they leave slots to those who may come on time."""
        table = self._now.table
        most = int(table.limit * (1 - SPARE_SLOTS)) if self._ttft_ns else table.limit
        most = max(most - len(table), 0 if len(table) else 1)
        for request in islice(chain((first,), others), most):
            yield self._waiter(request)

    def _feasible(self, works: list[_Work], share: float) -> list[bool]:
        """Which of the timely to keep, at the pace that steps like this one leave to them."""
        if not self._ttft_ns:
            return [True] * len(works)
        now = self._now
        per_step = max(1.0, self._size * (1.0 - share))
        jobs = [
            Job(int(now.now_ns + (work.due_ns - now.now_ns) * TTFT_MARGIN), work.tokens - work.granted)
            for work in works
        ]
        return feasible(jobs, now.start_ns, self._step_ns / per_step)

    def _deal(self, works: list[_Work], most: int) -> int:
        """Give each what it needs, in order, up to `most` in all. Returns what was given."""
        given = 0
        for work in works:
            count = min(work.tokens - work.granted, most - given, self._room)
            if count > 0 and (work.slot >= 0 or self._now.fits(work.request)):
                given += self._give(work, count)
        return given

    def _deal_late(self, most: int, within_ns: int | None = None) -> None:
        """Of the late first those that run, then who waits, oldest first, or of these only those that have to be served
        within some time. One that lacks blocks holds up the others."""
        before = self._room
        most -= self._deal(self._late, most)
        while most > 0 and self._room > 0 and (work := next(self._late_waiters, None)) is not None:
            if within_ns is not None and self._may_wait(work.request, within_ns):
                self._late_waiters = chain((work,), self._late_waiters)
                break
            if not self._now.fits(work.request):
                self._late_waiters = iter(())
                break
            most -= self._give(work, min(work.tokens, most, self._room))
        self._given_late += before - self._room

    def _may_wait(self, request: Request, within_ns: int) -> bool:
        """Whether a late one may wait for longer than that."""
        queue, now_ns = self._now.queue, self._now.now_ns
        return queue is not None and request.arrival_ns + queue.late.bound_ns > now_ns + within_ns

    def _give(self, work: _Work, count: int) -> int:
        work.granted += count
        self._room -= count
        if work.slot < 0:
            self.entrants.append((work.request, count))
        return count

    def running(self) -> tuple[SlotArray, Counts]:
        """The running rows that compute, in the order of what they are, and how much each may."""
        chosen = [work for work in self._rows if work.granted]
        slots = np.array([work.slot for work in chosen], np.intp)
        return slots, np.array([work.granted for work in chosen], np.int32)
