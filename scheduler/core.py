"""The scheduler that Triptych ships: requests and their states, with the five decisions left to strategies.

Here is what happens to one request: it comes, waits, enters, is suspended, ends. One pass over all of them is
`scheduler.passes`, applying a result `scheduler.results`, orders from operators `scheduler.control`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
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
    Rejected,
    RequestStatus,
    Step,
    StepResult,
    Submit,
)
from scheduler import control, results
from scheduler.blocks import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.external import External
from scheduler.hashing import extend_hashes, root_hash
from scheduler.interface import Scheduler, Stats
from scheduler.outbox import Outbox
from scheduler.passes import Flight, Pass
from scheduler.policies.admission import AdmissionTest, Running
from scheduler.policies.batch import Counts
from scheduler.presets import Strategies, choose
from scheduler.request import Request
from scheduler.suspension import Suspension
from scheduler.table import RowTable, SlotArray
from scheduler.timeline import History
from scheduler.validation import check_submit
from scheduler.view import CacheView
from scheduler.waiting import WaitingRoom

log = logging.getLogger("triptych.scheduler")

S = RequestStatus


class CoreScheduler(Scheduler):
    """Continuous batching at iteration level over a paged pool with a prefix cache."""

    def __init__(self, config: SchedulerConfig, limits: Limits, hash_key: bytes, *, clock: Callable[[], int]) -> None:
        self.config = config
        self.now = clock
        self.stats = Stats()
        self.epoch = 0
        self.view = CacheView(self)
        self.paused = "no"
        self.draining = False
        self.requests: dict[int, Request] = {}
        self.history = History()
        self.outbox = Outbox()
        self.step_id = 0
        self._arrivals = 0
        self._tenants: dict[str, int] = {}
        self._flips = self._flips_before = 0
        self.strategies = self.choose_strategies(config, limits.block_size)
        self.waiting = WaitingRoom(self.strategies.queue, self._max_age_ns())
        self.external = External(self)
        self._install(limits, hash_key)

    def choose_strategies(self, config: SchedulerConfig, block_size: int) -> Strategies:
        """The five decisions for a configuration. A subclass that changes one of them starts here."""
        return choose(config, block_size)

    def _max_age_ns(self) -> int:
        return int(self.config.max_queue_age_s * 1e9) if self.strategies.preset.guarded else 0

    def _token_budget(self) -> int:
        most = self.limits.max_num_batched_tokens
        return min(self.config.max_num_batched_tokens or most, most)

    def _install(self, limits: Limits, hash_key: bytes) -> None:
        """Fresh pool, rows and cache for a runner that holds nothing."""
        self.limits = limits
        self.block_size = limits.block_size
        self.token_budget = self._token_budget()
        self.pool = BlockPool(limits.num_blocks)
        self.table = RowTable(min(self.config.max_num_seqs, limits.max_num_seqs), limits.block_size)
        self._hash_key = hash_key
        self._plain_root = root_hash(hash_key)
        self.is_eos = np.zeros(limits.vocab_size, np.bool_)
        self.is_eos[[token for token in limits.eos_token_ids if token < limits.vocab_size]] = True
        self.flights: deque[Flight] = deque()
        self.early: dict[int, StepResult] = {}
        self.left: list[int] = []
        self.filled: list[tuple[int, bytes]] = []
        self.registered: deque[tuple[int, int, bytes]] = deque()
        self.suspension = Suspension(self, limits.host_blocks)

    # --- requests come --------------------------------------------------------------------------------------

    def add(self, peer: int, submit: Submit) -> None:
        rejection = check_submit(submit, self.limits, submit.id in self.requests)
        if rejection is None and not submit.resumed:
            rejection = self._refuse_for_now(submit)
        if rejection is not None:
            self.stats.rejected[rejection.code] = self.stats.rejected.get(rejection.code, 0) + 1
            self.outbox.of(peer).rejected.append(rejection)
            return
        request = self._new_request(peer, submit)
        self.requests[request.id] = request
        self.stats.started += 1
        self.outbox.of(peer).accepted.append(request.id)
        if submit.params.grammar:
            self.external.wait_for_grammar(request)
        else:
            self.waiting.push(request, self.now())
        if submit.emitted:
            results.end_if_complete(self, request)
        elif request.expires_ns:
            self.waiting.expire_at(request)

    def _refuse_for_now(self, submit: Submit) -> Rejected | None:
        """The 503 for a request that comes at a bad time, unless it is urgent enough to displace another waiter."""
        if self.draining:
            return Rejected(submit.id, "draining", "this scheduler is draining", 503, 5)
        limit, waiting = self.config.max_num_queued_reqs, len(self.waiting) + len(self.waiting.parked)
        if not limit or waiting < limit:
            return None
        if self.strategies.queue.name == "priority":
            fresh = (request for request in self.strategies.queue if not request.first_admitted_ns)
            least = max(fresh, key=lambda request: (request.priority, request.arrival), default=None)
            if least is not None and submit.priority < least.priority:
                least.end_code = "displaced"
                least.end_message = f"the queue is full ({limit} requests) and a more urgent request has come"
                self.finish(least, S.ERROR)
                return None
        text = f"{waiting} requests are waiting, the limit is {limit}; retry later"
        return Rejected(submit.id, "queue_full", text, 503, 1)

    def _new_request(self, peer: int, submit: Submit) -> Request:
        self._arrivals += 1
        now, num_prompt = self.now(), len(submit.prompt) >> 2
        timeout_ns = submit.timeout_ms * 1_000_000 or int(self.config.waiting_timeout_s * 1e9)
        request = Request(
            id=submit.id,
            peer=peer,
            params=submit.params,
            data=bytearray(submit.prompt + submit.emitted),
            num_prompt=num_prompt,
            max_total=0,
            priority=submit.priority,
            arrival=self._arrivals,
            label=submit.label,
            salt=submit.cache_salt,
            tenant=submit.tenant,
            routing_key=submit.routing_key,
            kv_source=submit.kv_source,
            open=submit.open,
            arrival_ns=now,
            arrival_processed=self.processed_tokens(),
            deadline_ns=now + submit.deadline_ms * 1_000_000 if submit.deadline_ms else 0,
            expires_ns=now + timeout_ns if timeout_ns else 0,
            num_cached=0 if submit.emitted else -1,
        )
        self.limit_length(request)
        request.timeline.add(now, "arrived", prompt_tokens=num_prompt, emitted=len(submit.emitted) >> 2)
        return request

    def limit_length(self, request: Request) -> None:
        """Where the request ends at the latest: its own limit, the context, or the whole pool and one token more."""
        capacity = self.pool.num_usable * self.block_size
        most = request.num_prompt + request.params.max_tokens
        request.max_total = min(most, self.limits.max_model_len, capacity + 1)

    def extend(self, peer: int, message: Extend) -> None:
        request = self.requests.get(message.id)
        if request is not None and request.peer == peer and request.open and len(message.tokens) % 4 == 0:
            self.external.extend(request, message)

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
        request.held_back(test)
        self.stats.held_passes[test] = self.stats.held_passes.get(test, 0) + 1

    def may_enter(self, request: Request) -> bool:
        """While new requests are paused, only those that have run before may enter."""
        return self.paused == "no" or request.first_admitted_ns > 0

    def expire(self) -> None:
        """End requests that have waited for their first admission longer than they may."""
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
        if not self.config.enable_prefix_caching:
            return []
        limit = (request.num_tokens - 1) // self.block_size
        self._hash_up_to(request, limit)
        return self.pool.longest_hit(request.hashes, limit)

    def _hash_up_to(self, request: Request, num_blocks: int) -> None:
        if len(request.hashes) < num_blocks:
            root = root_hash(self._hash_key, [("salt", request.salt)]) if request.salt else self._plain_root
            extend_hashes(self._hash_key, root, request.data, request.hashes, num_blocks, 4 * self.block_size)

    def admit(self, request: Request, blocks: list[int], start: int) -> int:
        """Make a waiting request run with these blocks, all held by it; `start` tokens have KV. Returns its slot."""
        self.waiting.remove(request)
        request.transition(S.RUNNING)
        request.incarnation += 1
        request.blocks, request.kept = blocks, 0
        self.suspension.empty(request)
        self.note_admission(request)
        if request.num_cached < 0:
            request.num_cached = min(start, request.num_prompt)
            self.stats.prompt_tokens += request.num_prompt
            self.stats.prefix_queried_tokens += request.num_prompt
            self.stats.prefix_hit_tokens += request.num_cached
            if self.strategies.queue.wants_charges:
                self.strategies.queue.charge({request.tenant: float(request.num_prompt)})
        replayed = max(0, request.high_water - start)
        request.num_replayed += replayed
        self.stats.replayed_tokens += replayed
        request.timeline.add(self.now(), "admitted", cached=start, replayed=replayed, held=dict(request.held))
        params = request.params
        usual_end = not params.eos_token_ids or set(params.eos_token_ids) == set(self.limits.eos_token_ids)
        repetition = params.repetition_max_pattern > 0
        watched = bool(params.stop_token_ids) or params.min_tokens > 0 or not usual_end or repetition
        self.external.saw_admission(request)
        tenant = self._tenants.setdefault(request.tenant, len(self._tenants))
        sealed = 0
        while sealed < start // self.block_size and self.pool.hash_of[blocks[sealed]] is not None:
            sealed += 1
        return self.table.enter(request, start, sealed, watched, tenant)

    def note_admission(self, request: Request) -> None:
        """The wait for the first admission is over."""
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
        self.seal_full(slots)
        return reached

    def take_back(self, request: Request, count: int) -> None:
        """Undo `advance` for a row that leaves before its step is sent: nothing of it will be computed."""
        self.table.computed[request.slot] -= count
        mine = set(request.blocks)
        undone = {block for step_id, block, _ in self.registered if step_id == self.step_id + 1 and block in mine}
        for block in undone:
            self.pool.forget(block)
        self.registered = deque(entry for entry in self.registered if entry[1] not in undone)
        self.filled = [entry for entry in self.filled if entry[0] not in undone]

    def seal_full(self, slots: SlotArray) -> None:
        """Make findable the blocks of these rows whose tokens are all known and computed (or in flight)."""
        table, size = self.table, self.block_size
        full = np.minimum(table.computed[slots], table.known[slots]) // size
        for index in np.flatnonzero(full > table.sealed[slots]).tolist():
            slot = int(slots[index])
            table.flush(slot)
            request = table.request[slot]
            assert request is not None
            upto = int(full[index])
            if self.config.enable_prefix_caching:
                self._hash_up_to(request, upto)
                for block_index in range(int(table.sealed[slot]), upto):
                    block, block_hash = request.blocks[block_index], request.hashes[block_index]
                    if self.pool.hash_of[block] is None:
                        self.pool.register(block, block_hash)
                        self.filled.append((block, block_hash))
                        self.registered.append((self.step_id + 1, block, block_hash))
            table.sealed[slot] = upto

    def choose_victim(self) -> Request:
        """The running request that gives its blocks up. Guarded presets spare those that have been victims too often,
        and never take one that would free nothing while another would free something."""
        candidates = self.table.requests()
        if self.strategies.preset.guarded:
            bound = self.config.max_preemptions or len(self.requests) + (1 << 30)
            useful = [r for r in candidates if self.pool.count_recoverable(r.blocks)]
            candidates = [r for r in useful if r.num_preemptions < bound] or useful or candidates
        return self.strategies.victim.choose(candidates, self.pool)

    def preempt(self, request: Request, needy: Request | None = None, *, may_swap: bool = True) -> None:
        """Suspend a running request: its tokens stay, its row and blocks go, its place in the queue is kept."""
        computed = int(self.table.computed[request.slot])
        request.high_water = max(request.high_water, computed)
        self.table.leave([request.slot])
        self.left.append(request.id)
        request.transition(S.PREEMPTED)
        request.num_preemptions += 1
        self.stats.preemptions += 1
        may_swap = may_swap and not request.open  # a session may have nothing to compute when it comes back
        swapped = may_swap and self.suspension.swap(request, computed)
        self.pool.release(request.blocks)
        request.blocks = []
        way = "swap" if swapped else "recompute"
        by = {"by": str(needy.id), "by_label": needy.label} if needy else {"by": "", "by_label": ""}
        request.timeline.add(self.now(), "preempted", **by, computed=computed, recovery=way)
        if swapped:
            self.waiting.swapped.append(request)
        else:
            self.waiting.push(request, self.now(), keep_place=not self.strategies.preset.victims_rejoin_tail)

    def drop_kept(self, request: Request) -> None:
        """A request that doesn't run gives up the KV it has kept, on the device or the host, to compute it again."""
        if request.slot < 0:
            self.suspension.forget(request)
            request.high_water = max(request.high_water, request.kept)
            self.pool.release(request.blocks)
            request.blocks, request.kept = [], 0

    def running_columns(self, rows: SlotArray | None = None) -> Running:
        """The running rows, or these of them, as admission sees them."""
        table = self.table
        rows = table.order if rows is None else rows
        return Running(table.blocks[rows], table.prompt[rows], table.known[rows], table.total[rows])

    # --- requests end ---------------------------------------------------------------------------------------

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request from whatever state it is in: its blocks, its place and its row go, its peer is told."""
        if request.slot >= 0:
            self.table.leave([request.slot])
            self.left.append(request.id)
        else:
            self.waiting.remove(request)
        request.transition(status)
        self.pool.release(request.blocks)
        self.suspension.empty(request)
        request.blocks = []
        del self.requests[request.id]
        self.stats.finished[status.name] = self.stats.finished.get(status.name, 0) + 1
        self.stats.preemption_counts.append(request.num_preemptions)
        now = self.now()
        request.timeline.add(now, status.name.lower(), outputs=request.num_outputs)
        self.history.add(request.id, control.record(self, request))
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
        if not self.requests:
            self.strategies.admission.idle()

    # --- steps ----------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        if not self.requests:
            return None
        self.expire()
        if self.paused == "all":
            return None
        before = self.strategies.admission.ratio
        this = Pass(self)
        this.run()
        if this.preempted:
            self._after_preemptions(this, before)
        if self.strategies.queue.flips != self._flips:
            self._flips = self.strategies.queue.flips
            log.info("queue order changed with its length: %d wait", len(self.waiting))
        step = this.build(self.step_id + 1)
        if step is None:
            return None
        if not this.preempted:
            self.strategies.admission.stepped()
        self.step_id += 1
        self.left, self.filled = [], []
        self.suspension.step_sent()
        self.flights.append(this.flight)
        self.stats.steps += 1
        self.stats.step_rows, self.stats.step_tokens = this.num_rows, this.num_tokens
        self.stats.scheduled_tokens += this.num_tokens
        self.external.park_idle_sessions()
        return step

    def _after_preemptions(self, this: Pass, ratio_before: float | None) -> None:
        self.strategies.admission.preempted(self.running_columns())
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
        for request in reversed(self.table.requests()):
            self.preempt(request, may_swap=False)
            request.incarnation += 1
        for request in list(self.requests.values()):
            self.suspension.forget(request)
            request.hashes.clear()
            request.blocks, request.kept = [], 0
        self.external.runner_lost()
        self._install(limits, hash_key)
        for request in list(self.requests.values()):
            self.limit_length(request)
            if request.num_tokens < request.max_total:
                continue
            if request.num_outputs:
                self.finish(request, S.LENGTH)
                continue
            request.end_code = "kv_capacity_exceeded"
            request.end_message = (
                f"the prompt has {request.num_tokens} tokens; this runner holds {request.max_total - 1}"
            )
            self.finish(request, S.IGNORED)

    # --- what others see ------------------------------------------------------------------------------------

    def adopt_inventory(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        if self.config.enable_prefix_caching:
            self.pool.adopt(list(blocks), list(hashes))

    def adopt(self, config: SchedulerConfig) -> None:
        """Go on under another configuration: strategies that it changes are made anew, the queue moves over, running
        rows stay. Raises ValueError, with nothing changed, for one that makes no sense."""
        self.strategies = choose(config, self.block_size, self.strategies)
        self.config = config
        if self.strategies.queue is not self.waiting.queue:
            self._flips_before += self.waiting.queue.flips
            self._flips = 0
        self.waiting.reorder(self.strategies.queue, self._max_age_ns())
        self.token_budget = self._token_budget()
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
    def has_requests(self) -> bool:
        return bool(self.requests)

    def processed_tokens(self) -> int:
        """Prompt tokens computed since the start: the clock of token-based ageing."""
        return self.stats.prompt_tokens - self.stats.prefix_hit_tokens

    def tenant_names(self) -> list[str]:
        """Tenants by the number that rows carry."""
        return list(self._tenants)

    def refresh_stats(self) -> Stats:
        stats = self.stats
        stats.running = len(self.table)
        stats.swapped = len(self.waiting.swapped)
        stats.parked = dict(Counter(request.status.name.lower() for request in self.waiting.parked.values()))
        stats.preempted_waiting = (
            stats.swapped + sum(1 for r in self.waiting.queue if r.num_preemptions) if stats.preemptions else 0
        )
        stats.waiting = len(self.waiting)
        stats.free_blocks, stats.usable_blocks = self.pool.num_free, self.pool.num_usable
        stats.evictions = self.pool.evictions
        stats.swapped_out_blocks = self.suspension.swapped_out_blocks
        stats.draining = self.draining
        stats.queue_flips = self._flips_before + self.strategies.queue.flips
        stats.new_token_ratio = self.strategies.admission.ratio
        return stats

    def check(self) -> list[str]:
        holders = [request.blocks for request in self.requests.values()]
        faults = self.pool.check([*holders, *self.external.holders()])
        waiting = [request.id for request in self.waiting]
        running = [request.id for request in self.table.requests()]
        if len(set(waiting + running)) != len(waiting) + len(running) or set(waiting + running) != set(self.requests):
            faults.append(f"{len(waiting)} waiting and {len(running)} running of {len(self.requests)} requests")
        return faults + self.suspension.check()
