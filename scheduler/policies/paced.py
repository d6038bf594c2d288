"""Steps sized by the time they will take: decodes keep their pace, prefill gets what is left of each step.

A running request's next token is due one TPOT objective after the last one was; the slack that it has gained by being
early is spent when prefill waits. The prefill of a step is dealt to those who can still be on time, then to the late,
who have their own share. Without objectives, and while there is no prefill, this is `mixed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler.policies.batch import UNLIMITED, BatchOptions, Counts, Mixed
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


@dataclass(frozen=True, slots=True)
class Situation:
    """What a plan is made of. `start_ns`: when this step will begin on the device; `budget`: its tokens at most."""

    table: RowTable
    queue: OnTime | None
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
    theirs, as far as the tests of admission let them."""

    rows: SlotArray
    caps: Counts
    budget: int
    entrants: list[tuple[Request, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Work:
    """Prefill to be dealt: a running row (`slot`) or a waiter."""

    tokens: int
    due_ns: int
    arrival: int
    request: Request
    slot: int = -1
    granted: int = 0


class Paced(Mixed):
    """`mixed` with objectives. `tpot_ns` 0: steps are as large as the budget allows."""

    name = "paced"

    def __init__(self, options: BatchOptions | None = None) -> None:
        super().__init__(options)
        self.tpot_ns = int(self.options.slo_tpot_s * 1e9)

    @property
    def plans(self) -> bool:
        return self.tpot_ns > 0 or self.options.slo_ttft_s > 0

    def plan(self, now: Situation) -> Plan | None:
        """The step to build, or None where there is no prefill to fit in."""
        table = now.table
        order = table.order
        left = np.minimum(table.target[order], table.final[order]) - table.computed[order]
        prefilling = (left > 1) | (table.target[order] == table.prompt[order])
        if not prefilling.any() and (now.queue is None or not len(now.queue)):
            return None
        decodes = order[~prefilling]
        limit_ns = self._step_ns(now, decodes)
        attended = int(table.computed[decodes].sum()) + len(decodes)
        room = min(now.budget, self._tokens(now, limit_ns, attended, len(decodes))) - len(decodes)
        room = max(room, min(LEAST_TOKENS, now.budget - len(decodes)))
        dealt = _Deal(self, now, order[prefilling], left[prefilling], room, limit_ns)
        rows, caps = dealt.running()
        return Plan(
            rows=np.concatenate((decodes, rows)),
            caps=np.concatenate((np.full(len(decodes), UNLIMITED, np.int32), caps)),
            budget=len(decodes) + max(room, 0),
            entrants=dealt.entrants(),
        )

    def _tokens(self, now: Situation, limit_ns: float, attended: int, num_decodes: int) -> int:
        return now.pace.tokens_within(limit_ns, attended) if limit_ns > 0 else now.budget

    def _step_ns(self, now: Situation, decodes: SlotArray) -> float:
        """How long this step may take, from the slack of the decode rows that have something to lose; 0: no limit."""
        if not self.tpot_ns:
            return 0.0
        table, pace = now.table, self.tpot_ns * MARGIN
        watched = decodes[table.timely[decodes]]
        if len(watched):
            made = table.target[watched] - table.prompt[watched]
            slack = table.first_ns[watched] + made * pace - now.start_ns
            slack = slack[slack > -LOST_TOKENS * self.tpot_ns]
            if len(slack):
                return float(np.clip(slack.min(), SHORTEST * self.tpot_ns, LONGEST * self.tpot_ns))
        return UNWATCHED * self.tpot_ns


class _Deal:
    """Deals the prefill of one step to rows and waiters."""

    def __init__(
        self, policy: Paced, now: Situation, rows: SlotArray, left: Counts, room: int, limit_ns: float
    ) -> None:
        self._now, self._room, self._size = now, room, max(room, 1)
        self._limit_ns = limit_ns
        queue, ttft_ns = now.queue, int(policy.options.slo_ttft_s * 1e9)
        late_rows: list[_Work] = []
        timely: list[_Work] = []
        resumed: list[_Work] = []
        for slot, tokens in zip(rows.tolist(), left.tolist(), strict=True):
            request = now.table.request[slot]
            assert request is not None
            work = _Work(tokens, request.arrival_ns + ttft_ns, request.arrival, request, slot)
            if request.num_outputs or request.first_token_ns:
                resumed.append(work)
            elif not ttft_ns or work.due_ns > now.now_ns:
                timely.append(work)
            else:
                late_rows.append(work)
        self._rows = [*resumed, *timely, *late_rows]
        waiting: Iterator[_Work] = iter(())
        oldest: Request | None = min((w.request for w in late_rows), key=lambda r: r.arrival, default=None)
        if queue is not None:
            resumed += [self._waiter(request, 0) for request in queue.resumed()]
            fresh = queue.fresh(now.now_ns) if ttft_ns else []
            timely += [self._waiter(request, queue.due_ns(request)) for request in fresh]
            timely.sort(key=lambda work: work.arrival)
            late = queue.late(now.now_ns) if ttft_ns else iter(queue)
            first = next(late, None)
            if first is not None:
                oldest = first if oldest is None else min(oldest, first, key=lambda r: r.arrival)
                waiting = self._late_waiters(first, late)
        share = queue.late_share.of(oldest, now.now_ns) if queue is not None and oldest is not None else 0.0
        self._entrants: list[tuple[Request, int]] = []
        self._deal(resumed, self._room)
        waiting = self._deal_late(late_rows, waiting, int(share * self._room))
        kept = self._feasible(timely, share)
        self._deal([work for work, keep in zip(timely, kept, strict=True) if keep], self._room)
        waiting = self._deal_late(late_rows, waiting, self._room)
        self._deal([work for work, keep in zip(timely, kept, strict=True) if not keep], self._room)

    def _waiter(self, request: Request, due_ns: int) -> _Work:
        return _Work(max(1, request.num_tokens - self._now.matched(request)), due_ns, request.arrival, request)

    def _late_waiters(self, first: Request, others: Iterator[Request]) -> Iterator[_Work]:
        """The late who may enter, oldest first: they leave slots to those who may come on time."""
        table = self._now.table
        spare = len(table) - int(table.limit * (1 - SPARE_SLOTS))
        if spare >= 0 and len(table):
            return
        yield self._waiter(first, 0)
        for request, _ in zip(others, range(-spare - 1), strict=False):
            yield self._waiter(request, 0)

    def _feasible(self, timely: list[_Work], share: float) -> list[bool]:
        if not timely or not timely[0].due_ns:
            return [True] * len(timely)
        now = self._now
        per_step = max(1.0, self._size * (1.0 - share))
        step_ns = self._limit_ns or float(now.pace.predict(StepSize(self._size + 1, 0, 1)))
        jobs = [
            Job(int(now.now_ns + (work.due_ns - now.now_ns) * TTFT_MARGIN), work.tokens - work.granted)
            for work in timely
        ]
        return feasible(jobs, now.start_ns, step_ns / per_step)

    def _deal(self, works: list[_Work], most: int) -> int:
        """Give each what it needs, in order, up to `most` in all. Returns what was given."""
        given = 0
        for work in works:
            count = min(work.tokens - work.granted, most - given, self._room)
            if count > 0 and (work.slot >= 0 or self._now.fits(work.request)):
                given += self._give(work, count)
        return given

    def _deal_late(self, rows: list[_Work], waiting: Iterator[_Work], most: int) -> Iterator[_Work]:
        """The late: those that run first, then those who wait, oldest first. Returns those who are left."""
        most -= self._deal(rows, most)
        while most > 0 and self._room > 0:
            work = next(waiting, None)
            if work is None or not self._now.fits(work.request):
                break
            most -= self._give(work, min(work.tokens, most, self._room))
        return waiting

    def _give(self, work: _Work, count: int) -> int:
        work.granted += count
        self._room -= count
        if work.slot < 0:
            self._entrants.append((work.request, count))
        return count

    def running(self) -> tuple[SlotArray, Counts]:
        """The running rows that compute, in the order of what they are, and how much each may."""
        chosen = [work for work in self._rows if work.granted]
        slots = np.array([work.slot for work in chosen], np.intp)
        return slots, np.array([work.granted for work in chosen], np.int32)

    def entrants(self) -> list[tuple[Request, int]]:
        """Who may enter, in order, with the tokens of their first chunk at most."""
        return self._entrants
