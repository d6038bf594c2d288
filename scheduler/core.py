"""The scheduler that Triptych ships: requests, queue, blocks and rows, with the five decisions left to strategies."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from protocol.columns import i32, u64
from protocol.messages import (
    Finished,
    Limits,
    Outputs,
    Rejected,
    RequestStatus,
    RowError,
    Step,
    StepFailure,
    StepResult,
    Submit,
    TokenLogprobs,
)
from scheduler.blocks import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.hashing import extend_hashes, root_hash
from scheduler.interface import Scheduler, Stats
from scheduler.outbox import Outbox
from scheduler.passes import Flight, Pass, is_live_waiting
from scheduler.policies.admission import AdmissionTest
from scheduler.policies.batch import Counts
from scheduler.presets import choose
from scheduler.request import Request
from scheduler.table import RowTable, SlotArray
from scheduler.validation import check_submit

log = logging.getLogger("triptych.scheduler")

S = RequestStatus


class CoreScheduler(Scheduler):
    """Continuous batching at iteration level over a paged pool with a prefix cache."""

    def __init__(self, config: SchedulerConfig, limits: Limits, hash_key: bytes, *, clock: Callable[[], int]) -> None:
        self.config = config
        self.stats = Stats()
        self.epoch = 0
        self.strategies = choose(config)
        self.requests: dict[int, Request] = {}
        self._clock = clock
        self._outbox = Outbox()
        self._step_id = 0
        self._arrivals = 0
        self._install(limits, hash_key)

    def _install(self, limits: Limits, hash_key: bytes) -> None:
        """Fresh pool, rows and cache for a runner that holds nothing."""
        self.limits = limits
        self.block_size = limits.block_size
        self.token_budget = min(self.config.max_num_batched_tokens, limits.max_num_batched_tokens)
        self.pool = BlockPool(limits.num_blocks)
        self.table = RowTable(min(self.config.max_num_seqs, limits.max_num_seqs), limits.block_size)
        self._hash_key = hash_key
        self._plain_root = root_hash(hash_key)
        self._is_eos = np.zeros(limits.vocab_size, np.bool_)
        self._is_eos[[token for token in limits.eos_token_ids if token < limits.vocab_size]] = True
        self._flights: deque[Flight] = deque()
        self._left: list[int] = []
        self._filled: list[tuple[int, bytes]] = []
        self._registered: deque[tuple[int, int, bytes]] = deque()

    # --- requests come and go -------------------------------------------------------------------------------

    def add(self, peer: int, submit: Submit) -> None:
        rejection = check_submit(submit, self.limits, submit.id in self.requests)
        queued = len(self.strategies.queue)
        limit = self.config.max_num_queued_reqs
        if rejection is None and limit and queued >= limit and not submit.resumed:
            text = f"{queued} requests are waiting, the limit is {limit}; retry later"
            rejection = Rejected(submit.id, "queue_full", text, 503, 1)
        if rejection is not None:
            self.stats.rejected[rejection.code] = self.stats.rejected.get(rejection.code, 0) + 1
            self._outbox.of(peer).rejected.append(rejection)
            return
        self._arrivals += 1
        num_prompt = len(submit.prompt) >> 2
        capacity = self.pool.num_usable * self.block_size
        request = Request(
            id=submit.id,
            peer=peer,
            params=submit.params,
            data=bytearray(submit.prompt + submit.emitted),
            num_prompt=num_prompt,
            max_total=min(num_prompt + submit.params.max_tokens, self.limits.max_model_len, capacity + 1),
            priority=submit.priority,
            arrival=self._arrivals,
            label=submit.label,
            salt=submit.cache_salt,
            arrival_ns=self._clock(),
            num_cached=0 if submit.emitted else -1,
        )
        self.requests[request.id] = request
        self.stats.started += 1
        self._outbox.of(peer).accepted.append(request.id)
        self.strategies.queue.push(request)
        if submit.emitted:
            self._end_if_complete(request)

    def abort(self, peer: int, ids: Iterable[int]) -> None:
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is not None and request.peer == peer:
                self.finish(request, S.ABORTED)

    def drop_peer(self, peer: int) -> int:
        mine = [request for request in self.requests.values() if request.peer == peer]
        for request in mine:
            self.finish(request, S.ABORTED)
        self._outbox.forget(peer)
        return len(mine)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request from whatever state it is in: its blocks, its place and its row go, its peer is told."""
        if is_live_waiting(request):
            self.strategies.queue.remove(request)
        elif request.slot >= 0:
            self.table.leave([request.slot])
            self._left.append(request.id)
        request.transition(status)
        self.pool.release(request.blocks)
        request.blocks = []
        del self.requests[request.id]
        self.stats.finished[status.name] = self.stats.finished.get(status.name, 0) + 1
        admitted = request.first_admitted_ns or self._clock()
        self._outbox.of(request.peer).finished.append(
            Finished(
                id=request.id,
                status=status,
                stop_token=request.stop_token,
                num_output_tokens=request.num_tokens - request.num_prompt,
                num_cached_tokens=max(request.num_cached, 0),
                num_preemptions=request.num_preemptions,
                queue_ns=admitted - request.arrival_ns,
                code=request.end_code,
                message=request.end_message,
            )
        )

    def preempt(self, request: Request) -> None:
        """Suspend a running request: its tokens stay, its row and blocks go, its place in the queue is kept."""
        request.high_water = max(request.high_water, int(self.table.computed[request.slot]))
        self.table.leave([request.slot])
        request.transition(S.PREEMPTED)
        self.strategies.recovery.suspend(request, self.pool)
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._left.append(request.id)
        self.strategies.queue.restore(request)

    # --- one pass -------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        if not self.requests:
            return None
        this = Pass(self)
        this.running()
        if not this.preempted:
            this.waiting()
        else:
            log.warning(
                "pool full: preempted %d requests (%d running, %d waiting, %d of %d blocks free)",
                len(this.preempted), len(self.table), len(self.strategies.queue), self.pool.num_free,
                self.pool.num_usable,
            )  # fmt: skip
        step = this.build(self.epoch, self._step_id + 1, self._left, self._filled)
        if step is None:
            return None
        self._step_id += 1
        self._left, self._filled = [], []
        self._flights.append(this.flight)
        self.stats.steps += 1
        self.stats.step_rows, self.stats.step_tokens = this.num_rows, this.num_tokens
        self.stats.scheduled_tokens += this.num_tokens
        return step

    def hold(self, request: Request, test: AdmissionTest) -> None:
        """The head of the queue was not admitted in this pass, because of `test`."""
        request.held_by = test
        request.held_passes += 1
        self.stats.held_passes[test] = self.stats.held_passes.get(test, 0) + 1

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

    def admit(self, request: Request, hit: list[int], taken: list[int]) -> int:
        """Make a queued request run with these blocks, all of them held by it already. Returns its slot."""
        self.strategies.queue.remove(request)
        request.transition(S.RUNNING)
        request.incarnation += 1
        request.blocks = hit + taken
        start = len(hit) * self.block_size
        if not request.first_admitted_ns:
            request.first_admitted_ns = self._clock()
            self.stats.queue_seconds.append((request.first_admitted_ns - request.arrival_ns) / 1e9)
        if request.num_cached < 0:
            request.num_cached = min(start, request.num_prompt)
            self.stats.prompt_tokens += request.num_prompt
            self.stats.prefix_queried_tokens += request.num_prompt
            self.stats.prefix_hit_tokens += request.num_cached
        self.stats.replayed_tokens += max(0, request.high_water - start)
        params = request.params
        usual_end = not params.eos_token_ids or set(params.eos_token_ids) == set(self.limits.eos_token_ids)
        watched = bool(params.stop_token_ids) or params.min_tokens > 0 or not usual_end
        return self.table.enter(request, start, watched)

    def advance(self, slots: SlotArray, counts: Counts) -> npt.NDArray[np.bool_]:
        """These rows will compute `counts` more tokens. Returns which of them sample: those that reach their target."""
        table = self.table
        computed = table.computed[slots] + counts
        table.computed[slots] = computed
        reached: npt.NDArray[np.bool_] = computed == table.target[slots]
        table.target[slots[reached]] += 1
        self._seal_full(slots)
        return reached

    def _seal_full(self, slots: SlotArray) -> None:
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
                    self.pool.register(block, block_hash)
                    self._filled.append((block, block_hash))
                    self._registered.append((self._step_id + 1, block, block_hash))
            table.sealed[slot] = upto

    # --- one result -----------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> None:
        flight = self._land(result)
        if flight is None:
            return
        if result.failure is not None:
            self._fail(flight, result.failure)
            return
        while self._registered and self._registered[0][0] <= flight.step_id:
            self._registered.popleft()
        for error in result.errors:
            self._fail_row(error)
        self._apply_tokens(flight, result)

    def _land(self, result: StepResult) -> Flight | None:
        """The flight that this result ends; None for a result of another epoch, or one that came before."""
        if result.epoch == self.epoch:
            for index, flight in enumerate(self._flights):
                if flight.step_id == result.step_id:
                    del self._flights[index]
                    return flight
        log.debug("ignored the result of step %d of epoch %d", result.step_id, result.epoch)
        return None

    def _apply_tokens(self, flight: Flight, result: StepResult) -> None:
        ids, positions, tokens = u64(result.ids), i32(result.positions), i32(result.tokens)
        incarnations = i32(result.incarnations)
        slots = self._slots_of(flight, ids, incarnations)
        table = self.table
        valid = (
            (slots >= 0)
            & (table.id[slots] == ids)
            & (table.incarnation[slots] == incarnations)
            & (table.known[slots] == positions)
            & table.live[slots]
        )
        fresh: set[tuple[int, int]] | None = set() if result.logprobs else None
        if not valid.all():
            late = ~valid
            columns = (ids[late].tolist(), incarnations[late].tolist(), positions[late].tolist(), tokens[late].tolist())
            for request_id, incarnation, position, token in zip(*columns, strict=True):
                self._apply_late(request_id, incarnation, position, token, fresh)
            slots, ids, positions, tokens = slots[valid], ids[valid], positions[valid], tokens[valid]
        if len(slots):
            table.tail[slots, positions % self.block_size] = tokens
            table.known[slots] = positions + 1
            outputs = positions - table.prompt[slots]
            self._outbox.add_tokens(table.peer[slots], ids, outputs, tokens)
            self.stats.generated_tokens += len(slots)
            self._seal_full(slots)
            if fresh is not None:
                fresh.update(zip(ids.tolist(), positions.tolist(), strict=True))
        if fresh is not None:
            self._pass_on_logprobs(result.logprobs, fresh)
        if len(slots):
            self._end_rows(slots, tokens)

    def _slots_of(self, flight: Flight, ids: npt.NDArray[np.uint64], incarnations: npt.NDArray[np.int32]) -> SlotArray:
        """The slots that rows had when the step was sent; -1 for a row that the step didn't sample."""
        if len(ids) == len(flight.sampled_ids) and bool((ids == flight.sampled_ids).all()):
            return flight.sampled_slots
        known = dict(zip(flight.sampled_ids.tolist(), flight.sampled_slots.tolist(), strict=True))
        return np.array([known.get(request_id, -1) for request_id in ids.tolist()], np.intp)

    def _end_rows(self, slots: SlotArray, tokens: npt.NDArray[np.int32]) -> None:
        """Finish the rows whose newest token ends them. A stop on the last allowed token is a stop."""
        table = self.table
        stopped = table.heeds_eos[slots] & self._is_eos[tokens]
        for index in np.flatnonzero(table.watched[slots]).tolist():
            request = table.request[int(slots[index])]
            assert request is not None
            num_outputs = int(table.known[slots[index]] - table.prompt[slots[index]])
            stopped[index] = self._stops(request, int(tokens[index]), num_outputs)
        ended = stopped | (table.known[slots] >= table.total[slots])
        for index in np.flatnonzero(ended).tolist():
            request = table.request[int(slots[index])]
            assert request is not None
            if stopped[index]:
                request.stop_token = int(tokens[index])
            self.finish(request, S.STOPPED if stopped[index] else S.LENGTH)

    def _stops(self, request: Request, token: int, num_outputs: int) -> bool:
        """Whether `token`, the newest of `num_outputs`, ends the request."""
        params = request.params
        if num_outputs < params.min_tokens:
            return False
        ends = params.eos_token_ids or self.limits.eos_token_ids
        return token in params.stop_token_ids or (not params.ignore_eos and token in ends)

    def _apply_late(
        self, request_id: int, incarnation: int, position: int, token: int, fresh: set[tuple[int, int]] | None
    ) -> None:
        """A token for a request that left its row since: still its next one if it waits with the same incarnation."""
        request = self.requests.get(request_id)
        if (
            request is None
            or request.status != S.PREEMPTED
            or request.incarnation != incarnation
            or request.num_tokens != position
        ):
            self.stats.stale_tokens += 1
            return
        request.data += token.to_bytes(4, "little", signed=True)
        self.stats.generated_tokens += 1
        self._outbox.add_tokens(
            np.array([request.peer], np.int32),
            np.array([request_id], np.uint64),
            np.array([position - request.num_prompt], np.int32),
            np.array([token], np.int32),
        )
        if fresh is not None:
            fresh.add((request_id, position))
        self._end_if_complete(request)

    def _end_if_complete(self, request: Request) -> None:
        """Finish a waiting request whose known outputs already end it."""
        token = int.from_bytes(request.data[-4:], "little", signed=True)
        if self._stops(request, token, request.num_tokens - request.num_prompt):
            request.stop_token = token
            self.finish(request, S.STOPPED)
        elif request.num_tokens >= request.max_total:
            self.finish(request, S.LENGTH)

    def _pass_on_logprobs(self, entries: list[TokenLogprobs], fresh: set[tuple[int, int]]) -> None:
        for entry in entries:
            request = self.requests.get(entry.id)
            if request is not None and (entry.id, entry.position) in fresh:
                self._outbox.of(request.peer).logprobs.append(
                    TokenLogprobs(
                        entry.id, entry.position - request.num_prompt, entry.logprob, entry.rank, entry.top_ids,
                        entry.top_logprobs,
                    )
                )  # fmt: skip

    # --- failure --------------------------------------------------------------------------------------------

    def _fail_row(self, error: RowError) -> None:
        request = self.requests.get(error.id)
        if request is not None and request.incarnation == error.incarnation:
            request.end_code, request.end_message = error.code, error.message
            for block in request.blocks:
                self.pool.forget(block)  # whatever made this row fail may be in its KV: nobody else shall read it
            self.finish(request, S.ERROR)

    def _fail(self, flight: Flight, failure: StepFailure) -> None:
        """A step failed: nothing it would have written can be trusted, nor what later steps built on it.

        Its requests are computed again under a new incarnation, so that what the steps behind it report about them
        is stale. A request that has been part of too many failed steps ends with an error.
        """
        self.stats.failed_steps += 1
        log.error("step %d failed (%s): %s", flight.step_id, failure.code, failure.message)
        for step_id, block, block_hash in self._registered:
            if step_id >= flight.step_id and self.pool.hash_of[block] == block_hash:
                self.pool.forget(block)
        self._registered.clear()
        self._filled.clear()
        for request_id, incarnation in zip(flight.ids.tolist(), flight.incarnations.tolist(), strict=True):
            request = self.requests.get(request_id)
            if request is None or request.incarnation != incarnation:
                continue
            request.num_failures += 1
            if request.num_failures >= self.config.max_step_failures:
                request.end_code, request.end_message = failure.code, failure.message
                self.finish(request, S.ERROR)
                continue
            if request.status == S.RUNNING:
                self.preempt(request)
            request.incarnation += 1

    def reset_runner(self, limits: Limits, hash_key: bytes) -> None:
        for request in reversed(self.table.requests()):
            self.preempt(request)
            request.incarnation += 1
        self._install(limits, hash_key)
        for request in self.requests.values():
            request.hashes.clear()
        for request in list(self.requests.values()):
            capacity = self.pool.num_usable * self.block_size
            request.max_total = min(request.max_total, limits.max_model_len, capacity + 1)
            if request.num_tokens >= request.max_total:
                self.finish(request, S.LENGTH)

    # --- what others see ------------------------------------------------------------------------------------

    def adopt_inventory(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        if self.config.enable_prefix_caching:
            self.pool.adopt(list(blocks), list(hashes))

    def take_outputs(self) -> list[tuple[int, Outputs]]:
        return self._outbox.take(self.epoch, self._step_id)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    def refresh_stats(self) -> Stats:
        """Bring the levels in `stats` up to date."""
        stats = self.stats
        stats.running = len(self.table)
        stats.waiting = len(self.strategies.queue)
        stats.free_blocks, stats.usable_blocks = self.pool.num_free, self.pool.num_usable
        stats.evictions = self.pool.evictions
        return stats

    def check(self) -> list[str]:
        faults = self.pool.check([request.blocks for request in self.requests.values()])
        queued = {request.id for request in self.strategies.queue}
        running = {request.id for request in self.table.requests()}
        if queued & running or queued | running != set(self.requests):
            faults.append(f"{len(queued)} queued and {len(running)} running of {len(self.requests)} requests")
        return faults
