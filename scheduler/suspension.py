"""Suspending requests that run: who goes, what is lost, what is kept on the host, and the copies that put it there.

Order makes the copies safe: those out are in the next step, which the device runs after everything in flight and
before anything that the freed blocks are written with; a host block that a request has come back from is reused only
by a later step than the one that copies it in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.messages import RequestStatus
from scheduler.policies.recovery import HostPool, Loss, MeasuredRates
from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler


class Suspension:
    """The host pool and its bookkeeping. `copies` are the (device, host) pairs, flat, that the next step copies out."""

    def __init__(self, core: CoreScheduler, host_blocks: int) -> None:
        self._core = core
        self._host = HostPool(host_blocks)
        self.rates = MeasuredRates()
        self.copies: list[int] = []
        self.copied: list[tuple[int, int]] = []
        """(id, incarnation) of the requests that `copies` belong to."""
        self.swapped_out_blocks = 0
        self._emptied: list[int] = []

    def is_spared(self, request: Request) -> bool:
        """Whether a guarded preset makes others leave before this one, because it has been a victim often enough."""
        core = self._core
        return core.strategies.preset.guarded and 0 < core.config.max_preemptions <= request.num_preemptions

    def may_stay(self, request: Request) -> bool:
        """Whether a spared request that enters now can stay to its end: it and all spared ones that run could grow to
        their limits together, beside what those hold that are parked. True for all others: they may be sent away."""
        if not self.is_spared(request):
            return True
        core = self._core
        lasting = [request, *(other for other in core.table.requests() if self.is_spared(other))]
        most = sum(-(-(one.max_total - 1) // core.block_size) for one in lasting)
        aside = sum(len(waiter.blocks) for waiter in core.waiting.parked.values())
        return most <= core.pool.num_usable - aside

    def choose_victim(self) -> Request:
        """The running request that gives its blocks up. Guarded presets spare those that have been victims too often,
        and never take one that would free nothing while another would free something."""
        core = self._core
        candidates = core.table.requests()
        for request in candidates:  # a policy may count outputs: the last block's are only in the table so far
            core.table.flush(request.slot)
        if core.strategies.preset.guarded:
            useful = [r for r in candidates if core.pool.count_recoverable(r.blocks)]
            unspared = [r for r in candidates if not self.is_spared(r)]
            candidates = [r for r in useful if not self.is_spared(r)] or unspared or useful or candidates
        return core.strategies.victim.choose(candidates, core.pool)

    def preempt(self, request: Request, needy: Request | None, *, may_swap: bool) -> None:
        """Suspend a running request: its tokens stay, its row and blocks go, its place in the queue is kept."""
        core = self._core
        computed = core.leave_row(request)
        request.transition(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        core.stats.preemptions += 1
        # A session may have nothing to compute when it comes back; a suspect comes back by its own door. What a step in
        # flight tells of a prompt may come when its request is back already, too late: it has to be computed again.
        may_swap = may_swap and not (request.open or request.quarantined or request.owes_prompt)
        swapped = may_swap and self._swap(request, computed)
        core.pool.release(request.blocks)
        request.blocks = []
        way = "swap" if swapped else "recompute"
        by = {"by": str(needy.id), "by_label": needy.label} if needy else {"by": "", "by_label": ""}
        request.timeline.add(core.now(), "preempted", **by, computed=computed, recovery=way)
        if swapped:
            request.queued_ns = core.now()
            core.waiting.swapped.append(request)
        else:
            core.waiting.push(request, core.now(), keep_place=not core.strategies.preset.victims_rejoin_tail)

    def drop_kept(self, request: Request) -> None:
        """A request that doesn't run gives up the KV it has kept, on the device or the host, to compute it again."""
        if request.slot < 0:
            self.forget(request)
            request.high_water = max(request.high_water, request.kept)
            self._core.pool.release(request.blocks)
            request.blocks, request.kept = [], 0

    def _swap(self, request: Request, computed: int) -> bool:
        """Have the victim's KV copied to the host, if the recovery policy wants that. Its blocks are still its own."""
        core = self._core
        num_blocks = -(-computed // core.block_size)
        cached = sum(1 for block in request.blocks[:num_blocks] if core.pool.hash_of[block] is not None)
        loss = Loss(computed, num_blocks, cached * core.block_size, core.limits.kv_bytes_per_block)
        if not core.strategies.recovery.swaps(loss, self._host, self.rates):
            return False
        request.host_blocks = self._host.take(num_blocks)
        request.kept = computed
        for pair in zip(request.blocks, request.host_blocks, strict=False):
            self.copies += pair
        self.copied.append((request.id, request.incarnation))
        self.swapped_out_blocks += num_blocks
        return True

    def forget(self, request: Request) -> None:
        """A suspended request's host copy is of no use: it queues up to recompute."""
        if request.host_blocks:
            core = self._core
            core.waiting.remove(request)
            self.empty(request)
            request.kept = 0
            core.waiting.push(request, core.now(), keep_place=True)

    def empty(self, request: Request) -> None:
        """The request needs its host blocks no longer, once the next step has run."""
        self._emptied += request.host_blocks
        request.host_blocks = []

    def step_sent(self) -> None:
        """A step with all copies so far is on its way."""
        self.copies, self.copied = [], []
        self._host.release(self._emptied)
        self._emptied = []

    def check(self) -> list[str]:
        """Violated invariants as sentences."""
        held = sum(len(request.host_blocks) for request in self._core.requests.values()) + len(self._emptied)
        if held + self._host.num_free != self._host.num_blocks:
            return [f"host: {held} held + {self._host.num_free} free is not {self._host.num_blocks}"]
        return []
