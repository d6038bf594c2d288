"""The scheduler that Triptych ships: requests and their states, with the five decisions left to strategies.

Here is what happens to one request: it comes, waits, enters, is suspended, ends. One pass over all of them is
`scheduler.passes`, applying a result `scheduler.results`, orders from operators `scheduler.control`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.messages import (
    Control,
    ControlReply,
    Extend,
    Finished,
    GrammarStatus,
    KvStatus,
    Limits,
    Outputs,
    RequestStatus,
    Step,
    StepResult,
    Submit,
)
from scheduler import arrivals, control, levels, moving, results
from scheduler.blocks import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.draining import DrainingPages
from scheduler.external import External
from scheduler.flight import Flight
from scheduler.heads import Heads
from scheduler.interface import Door, HandedOver, Scheduler, Stats
from scheduler.outbox import Outbox
from scheduler.passes import Pass
from scheduler.planning import Planner
from scheduler.policies.admission import AdmissionTest, Running
from scheduler.policies.batch import Counts
from scheduler.presets import Strategies, choose, keep
from scheduler.request import Request
from scheduler.sealing import Sealing
from scheduler.suspects import Suspects
from scheduler.suspension import Suspension
from scheduler.table import RowTable, SlotArray
from scheduler.tenants import Tenants
from scheduler.timeline import History
from scheduler.view import CacheView
from scheduler.waiting import WaitingRoom

log = logging.getLogger("triptych.scheduler")

S = RequestStatus
MAX_INCARNATION = (1 << 31) - 1
"""Incarnations are 32-bit columns: after this one comes 1 again, long after anything of its first bearer."""


class CoreScheduler(Scheduler):
    """Continuous batching at iteration level over a paged pool with a prefix cache."""

    def __init__(self, config: SchedulerConfig, limits: Limits, hash_key: bytes, *, clock: Callable[[], int]) -> None:
        self.config = config
        self.now = clock
        self.stats = Stats()
        self.epoch = 0
        self.view = CacheView(self)
        self.planner = Planner(self)
        self.paused = "no"
        self.draining = False
        self.requests: dict[int, Request] = {}
        self.history = History()
        self.outbox = Outbox()
        self.step_id = 0
        self.num_arrived = 0
        self.tenants = Tenants()
        self._incarnation = 0
        self._built_for = config.max_num_seqs
        self._flips = self._flips_before = 0
        self.strategies = self.choose_strategies(config, limits.block_size)
        self.waiting = WaitingRoom(self.strategies.queue, self._max_age_ns())
        self.external = External(self)
        self.heads = Heads(self)
        self.suspects = Suspects(self)
        self._install(limits, hash_key)

    def choose_strategies(self, config: SchedulerConfig, block_size: int) -> Strategies:
        """The five decisions for a configuration. A subclass that changes one of them starts here."""
        return choose(config, block_size)

    def _max_age_ns(self) -> int:
        return int(self.config.max_queue_age_s * 1e9) if self.strategies.preset.guarded else 0

    def size_steps(self) -> None:
        """How many tokens a step may compute: by the settings, the runner, and failures of late."""
        most = self.limits.max_num_batched_tokens
        self.token_budget = min(self.config.max_num_batched_tokens or most, most, self.suspects.most_tokens)

    def _install(self, limits: Limits, hash_key: bytes) -> None:
        """Fresh pool, rows and cache for a runner that holds nothing."""
        self.limits = limits
        self.block_size = limits.block_size
        self.size_steps()
        self.pool = BlockPool(limits.num_blocks)
        self.draining_pages = DrainingPages(self.pool)
        self.table = RowTable(min(self._built_for, limits.max_num_seqs), limits.block_size)
        self.table.limit = min(self.config.max_num_seqs, self.table.capacity)
        self.sealing = Sealing(self, hash_key)
        self.is_eos = np.zeros(limits.vocab_size, np.bool_)
        self.is_eos[[token for token in limits.eos_token_ids if token < limits.vocab_size]] = True
        self.flights: deque[Flight] = deque()
        self.early: dict[int, StepResult] = {}
        self.left: list[int] = []
        self.suspension = Suspension(self, limits.host_blocks)

    # --- requests come --------------------------------------------------------------------------------------

    def add(self, peer: int, submit: Submit) -> None:
        arrivals.add(self, peer, submit)

    def extend(self, peer: int, message: Extend) -> None:
        request = self.requests.get(message.id)
        if request is not None and request.peer == peer and request.open and len(message.tokens) % 4 == 0:
            self.external.extend(request, message)

    def cached_tokens(self, submit: Submit) -> int:
        return arrivals.cached_tokens(self, submit)

    def hand_over(self, most_tokens: int) -> list[HandedOver]:
        return moving.hand_over(self, most_tokens)

    def take_in(self, handed_over: HandedOver) -> None:
        moving.take_in(self, handed_over)

    def abort(self, peer: int, ids: Iterable[int]) -> None:
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is not None and request.peer == peer:
                self.finish(request, S.ABORTED)

    def drop_peer(self, peer: int) -> int:
        mine = [request for request in self.requests.values() if request.peer == peer]
        for request in mine:
            self.finish(request, S.ABORTED)
        self.outbox.forget(peer)
        return len(mine)

    # --- requests wait --------------------------------------------------------------------------------------

    def hold(self, request: Request, test: AdmissionTest) -> None:
        """The head of those who wait was not admitted in this pass, because of `test`."""
        self.heads.hold(request, test)

    def may_enter(self, request: Request) -> bool:
        """While new requests are paused, only those that have run before may enter."""
        return self.paused == "no" or request.first_admitted_ns > 0

    def expire(self) -> None:
        """End requests that have waited for their first admission longer than they may; pages whose delay is over come
        back."""
        if self.draining_pages.next_ns is not None:
            self.draining_pages.release_due(self.now())
        for request_id in self.waiting.expired(self.now()):
            request = self.requests.get(request_id)
            if request is not None and not request.first_admitted_ns:
                waited = (self.now() - request.arrival_ns) / 1e9
                request.end_code, request.end_message = "waiting_timeout", f"not admitted within {waited:.1f} s"
                self.finish(request, S.ERROR)
        if self.waiting.parked:
            self.external.expire_transfers()

    # --- requests run ---------------------------------------------------------------------------------------

    def find_hit(self, request: Request) -> list[int]:
        """Cached blocks for the request's leading tokens; at least one token is left to compute."""
        return self.sealing.find_hit(request)

    def renew(self, request: Request) -> None:
        """What is in flight for this request, or was for another one with its id, is stale from now on."""
        self._incarnation = self._incarnation % MAX_INCARNATION + 1
        request.incarnation = self._incarnation

    def admit(self, request: Request, blocks: list[int], start: int) -> int:
        """Make a waiting request run with these blocks, all held by it; `start` tokens have KV. Returns its slot."""
        self.waiting.remove(request)
        request.transition(S.RUNNING)
        self.renew(request)
        request.blocks, request.kept = blocks, 0
        self.suspension.empty(request)
        self.note_admission(request)
        if request.num_cached < 0:
            request.num_cached = min(start, request.num_prompt)
            self.stats.prompt_tokens += request.num_prompt
            self.stats.prefix_queried_tokens += request.num_prompt if self.config.enable_prefix_caching else 0
            self.stats.prefix_hit_tokens += request.num_cached
            if self.strategies.queue.wants_charges:
                self.strategies.queue.charge({request.tenant: float(request.num_prompt)})
        replayed = max(0, request.high_water - start)
        request.num_replayed += replayed
        self.stats.replayed_tokens += replayed
        request.timeline.add(
            self.now(),
            "admitted",
            cached=start,
            replayed=replayed,
            held=dict(request.held),
            held_ms=request.held_ms(self.now()),
        )
        self.external.saw_admission(request)
        tenant = self.tenant_number(request.tenant)
        sealed = self.sealing.count_sealed(blocks[: start // self.block_size])
        return self.table.enter(request, start, sealed, results.is_watched(self, request), tenant)

    def note_admission(self, request: Request) -> None:
        """It waits no longer, and if this is its first admission, that wait is measured."""
        request.let_go(self.now())
        if not request.first_admitted_ns:
            now = request.first_admitted_ns = self.now()
            self.stats.queue_seconds.append((now - request.arrival_ns) / 1e9)

    def advance(self, slots: SlotArray, counts: Counts) -> npt.NDArray[np.bool_]:
        """These rows will compute `counts` more tokens. Returns which of them sample: those that reach their target."""
        table = self.table
        computed = table.computed[slots] + counts
        table.computed[slots] = computed
        reached: npt.NDArray[np.bool_] = computed == table.target[slots]
        table.target[slots[reached]] += 1
        self.sealing.seal_full(slots)
        return reached

    def take_back(self, request: Request, count: int) -> None:
        """Undo `advance` for a row that leaves before its step is sent: nothing of it will be computed."""
        self.table.computed[request.slot] -= count
        self.sealing.take_back(request.blocks)

    def choose_victim(self) -> Request:
        """The running request that gives its blocks up."""
        return self.suspension.choose_victim()

    def preempt(self, request: Request, needy: Request | None = None, *, may_swap: bool = True) -> None:
        """Suspend a running request, for the sake of `needy`: its tokens stay, its row and blocks go."""
        self.suspension.preempt(request, needy, may_swap=may_swap)

    def drop_kept(self, request: Request) -> None:
        """A request that doesn't run gives up the KV it has kept, on the device or the host, to compute it again."""
        self.suspension.drop_kept(request)

    def running_columns(self, rows: SlotArray | None = None) -> Running:
        """The running rows, or these of them, as admission sees them."""
        table = self.table
        rows = table.order if rows is None else rows
        columns = table.blocks, table.prompt, table.known, table.total, table.tenant, table.incarnation
        return Running(*(column[rows] for column in columns))

    def leave_row(self, request: Request) -> int:
        """A running request gives up its slot. Returns how many of its tokens were computed; those that it was to
        compute again and hadn't come to don't count as replayed."""
        computed = int(self.table.computed[request.slot])
        not_replayed = max(0, request.high_water - computed)
        request.num_replayed -= not_replayed
        self.stats.replayed_tokens -= not_replayed
        request.high_water = max(request.high_water, computed)
        self.table.leave([request.slot])
        self.left.append(request.id)
        return computed

    # --- requests end ---------------------------------------------------------------------------------------

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request from whatever state it is in: its blocks, its place and its row go, its peer is told."""
        tenant = self.tenant_number(request.tenant)
        self.vacate(request)
        request.transition(status)
        self.stats.finished[status.name] = self.stats.finished.get(status.name, 0) + 1
        self.stats.preemption_counts.append(request.num_preemptions)
        now = self.now()
        request.let_go(now)
        request.timeline.add(now, status.name.lower(), outputs=request.num_outputs)
        self.outbox.of(request.peer).finished.append(
            Finished(
                id=request.id,
                status=status,
                stop_token=request.stop_token,
                num_output_tokens=request.num_outputs,
                num_cached_tokens=max(request.num_cached, 0),
                num_preemptions=request.num_preemptions,
                queue_ns=(request.first_admitted_ns or now) - request.arrival_ns,
                code=request.end_code,
                message=request.end_message,
            )
        )
        self.history.add(request.id, control.record(self, request))
        if request.num_outputs and status not in (S.ERROR, S.IGNORED):
            self.strategies.admission.finished(tenant, request.num_outputs, at_limit=status == S.LENGTH)
            self.strategies.queue.finished(request)
        if not self.requests:
            self.strategies.admission.idle()

    def vacate(self, request: Request) -> None:
        """A request leaves from whatever state it is in: its row or its place goes, and all blocks that it holds."""
        if request.slot >= 0:
            self.leave_row(request)
        else:
            self.waiting.remove(request)
        self.draining_pages.retire(request.blocks, self.now(), int(self.config.page_release_delay_s * 1e9))
        self.suspension.empty(request)
        request.blocks = []
        del self.requests[request.id]
        if self.tenants.leave(request.tenant):
            self.strategies.queue.tenant_gone(request.tenant)

    # --- steps ----------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        self.expire()
        if not self.requests:
            return None
        self.heads.begin_pass()
        this = Pass(self)
        before = self.strategies.admission.ratio
        if self.paused != "all":
            this.run()
        self.heads.end_pass()
        if self.paused == "all":
            return None
        if this.preempted:
            self._after_preemptions(this, before)
        if self.strategies.queue.flips != self._flips:
            self._flips = self.strategies.queue.flips
            order, waiting = self.strategies.queue.in_force, len(self.waiting)
            log.info("queue order changed with its length: %s from now on, %d wait", order, waiting)
        step = this.build(self.step_id + 1)
        if step is None:
            return None
        self.step_id += 1
        self.left = []
        self.sealing.step_sent()
        self.suspension.step_sent()
        self.flights.append(this.flight)
        self.planner.sent(this.flight)
        self.stats.steps += 1
        self.stats.step_rows, self.stats.step_tokens = this.num_rows, this.num_tokens
        self.stats.scheduled_tokens += this.num_tokens
        self.external.park_idle_sessions()
        return step

    def _after_preemptions(self, this: Pass, ratio_before: float | None) -> None:
        ratio, recovery = self.strategies.admission.ratio, self.strategies.recovery
        log.warning(
            "preempted %d requests (%s): %d running, %d waiting, %d of %d blocks free%s%s",
            len(this.preempted),
            ", ".join(str(request.id) for request in this.preempted[:4]),
            len(self.table),
            len(self.waiting),
            self.pool.num_free,
            self.pool.num_usable,
            f", ratio {ratio_before:.3f} -> {ratio:.3f}" if ratio is not None else "",
            f"; {recovery.last}" if recovery.last else "",
        )

    def update(self, result: StepResult) -> None:
        results.apply(self, result)

    def reset_runner(self, limits: Limits, hash_key: bytes) -> None:
        self.suspects.runner_died(self.flights)
        for request in reversed(self.table.requests()):
            self.preempt(request, may_swap=False)
            self.renew(request)
        for request in list(self.requests.values()):
            self.suspension.forget(request)
            request.hashes.clear()
            request.blocks, request.kept = [], 0
            self.waiting.isolate(request)
        self.external.runner_lost()
        self.heads.forget()
        self._install(limits, hash_key)
        arrivals.fit_again(self)

    # --- what others see ------------------------------------------------------------------------------------

    def adopt_inventory(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        if self.config.enable_prefix_caching:
            self.pool.adopt(list(blocks), list(hashes))

    def adopt(self, config: SchedulerConfig) -> None:
        """Go on under another configuration: strategies that it changes are made anew, the queue moves over, running
        rows stay. Raises ValueError, with nothing changed, for one that makes no sense."""
        self.strategies = keep(self.strategies, self.choose_strategies(config, self.block_size))
        self.config = config
        if self.strategies.queue is not self.waiting.queue:
            self._flips_before += self.waiting.queue.flips
            self._flips = 0
        self.waiting.reorder(self.strategies.queue, self._max_age_ns())
        self.size_steps()
        self.table.limit = min(config.max_num_seqs, self.table.capacity)

    def on_grammar_status(self, status: GrammarStatus) -> None:
        self.external.on_grammar_status(status)

    def on_kv_status(self, status: KvStatus) -> None:
        self.external.on_kv_status(status)

    def control(self, message: Control) -> ControlReply:
        return control.answer(self, message)

    def take_outputs(self) -> list[tuple[int, Outputs]]:
        return self.outbox.take(self.epoch, self.step_id)

    def take_orders(self) -> list[msgspec.Struct]:
        orders, self.external.orders = self.external.orders, []
        return orders

    @property
    def in_flight(self) -> int:
        return len(self.flights)

    @property
    def wakes_ns(self) -> int | None:
        return self.draining_pages.next_ns

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    def processed_tokens(self) -> int:
        """Prompt tokens computed since the start: the clock of token-based ageing."""
        return self.stats.prompt_tokens - self.stats.prefix_hit_tokens

    @property
    def queue_flips(self) -> int:
        """How often the queue's order has changed with its length, under all queue policies so far."""
        return self._flips_before + self.strategies.queue.flips

    def tenant_number(self, name: str) -> int:
        """The number by which rows and strategies know a tenant."""
        return self.tenants.number(name)

    def refresh_stats(self) -> Stats:
        levels.refresh(self)
        return self.stats

    def door(self) -> Door:
        return arrivals.door(self)

    def check(self) -> list[str]:
        return levels.faults(self)
