"""A pass by plan: where objectives are told, who gets how much is decided for the step as a whole, then carried out.

Plans are made by `policies.paced`; here they meet the pool and the queue. What a step took teaches the pace that the
next plans go by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from protocol.messages import StepResult
from scheduler.entering import candidate, enter
from scheduler.making_way import reclaim
from scheduler.policies.admission import AdmissionTest
from scheduler.policies.batch import UNLIMITED, Counts
from scheduler.policies.on_time import OnTime
from scheduler.policies.pace import StepPace, StepSize
from scheduler.policies.paced import Paced, Plan, Situation
from scheduler.request import Request
from scheduler.table import SlotArray

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler
    from scheduler.flight import Flight
    from scheduler.passes import Pass


class Planner:
    """Makes plans for passes, and keeps what they are made from: step times, and when the device will be free."""

    def __init__(self, core: CoreScheduler) -> None:
        self._core = core
        self._pace = StepPace()
        self._free_at_ns = 0

    @property
    def _policy(self) -> Paced | None:
        batch = self._core.strategies.batch
        return batch if isinstance(batch, Paced) and batch.plans else None

    def plan(self, this: Pass) -> Plan | None:
        """The step to build; None without objectives, or while there is no prefill to fit in."""
        core, policy = self._core, self._policy
        if policy is None or core.paused != "no":
            return None
        queue = core.waiting.queue
        return policy.plan(
            Situation(
                table=core.table,
                num_waiting=len(core.waiting),
                queue=queue if isinstance(queue, OnTime) else None,
                pace=self._pace,
                now_ns=core.now(),
                start_ns=max(core.now(), self._free_at_ns),
                budget=this.budget,
                matched=core.view.matched,
                fits=lambda request: _fits(this, request),
            )
        )

    def sent(self, flight: Flight) -> None:
        """A step is on its way."""
        if self._policy is not None:
            self._free_at_ns = max(self._core.now(), self._free_at_ns) + self._pace.predict(_size(flight))

    def returned(self, flight: Flight, result: StepResult) -> None:
        """Its result is here."""
        if self._policy is None or not result.execute_ns:
            return
        self._pace.learn(_size(flight), result.execute_ns - result.copy_ns)
        if not self._core.flights:
            self._free_at_ns = 0

    def coasted(self, first: StepSize, times_ns: Iterable[int]) -> None:
        """Steps of decodes alone were sent and came back one after the other, `first` the size of the first."""
        if self._policy is not None:
            self._pace.learn_decodes(first, times_ns)
            self._free_at_ns = 0

    def note_first_tokens(self, slots: SlotArray, outputs: Counts) -> None:
        """Rows have got a token, the number `outputs` of each counted from 0: those that got their first one are due
        the others from here on."""
        if self._policy is None or np.count_nonzero(outputs) == len(outputs):
            return
        core, table, now = self._core, self._core.table, self._core.now()
        for slot in slots[outputs == 0].tolist():
            request = table.request[slot]
            assert request is not None
            ttft_ns = core.config.slo_ttft_s * 1e9
            request.first_token_ns, request.timely = now, not ttft_ns or now - request.arrival_ns <= ttft_ns
            table.first_ns[slot], table.timely[slot] = now, request.timely


def _size(flight: Flight) -> StepSize:
    return StepSize(flight.num_tokens, flight.num_attended, len(flight.ids))


def _fits(this: Pass, request: Request) -> bool:
    """Whether the waiter's whole prompt would be let in now, beside those that run; if not, the test holds it."""
    core, pool, size = this.core, this.core.pool, this.core.block_size
    hit = request.blocks or core.find_hit(request)
    first = max(0, -(-request.num_tokens // size) - len(hit))
    this.begin_admission()
    offered = candidate(this, request, hit, first)
    bound = core.strategies.admission.test(offered, pool.num_free, pool.num_blocks, len(core.table) > 0)
    if bound is None and not core.suspension.may_stay(request):
        bound = AdmissionTest.BLOCKS
    if bound is not None:
        core.hold(request, bound)
    return bound is None


def carry_out(plan: Plan, this: Pass) -> None:
    """Serve the plan's rows, then let its entrants in, as far as the tests of admission agree. Those swapped out come
    back first, as they do everywhere."""
    core = this.core
    this.budget = plan.budget
    this.caps = np.full(core.table.capacity, UNLIMITED, np.int32)
    this.caps[plan.rows] = plan.caps
    this.run_rows(plan.rows)
    if this.preempted:
        return
    if not plan.entrants and (plan.entrants is None or not this.anything):
        this.admit_waiting()
        return
    this.begin_admission(anew=True)
    if not this.return_swapped():
        return
    for request, most in plan.entrants:
        this.cap = most
        bound = enter(this, request)
        if bound == AdmissionTest.BLOCKS and reclaim(this, request):
            bound = enter(this, request)
        if bound is not None:
            core.hold(request, bound)
    bound, first = this.limits_hold(), core.waiting.front(core.now())
    if bound is not None and first is not None:
        core.hold(first, bound)
