"""An isolated scheduler: the real class with a fake runner that samples by formula and checks as it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from protocol.columns import F32, f32, i32, pack_i32, pack_u64, u64
from protocol.messages import (
    Control,
    Extend,
    FetchKv,
    Finished,
    KvStatus,
    Limits,
    PromptLogprobs,
    Rejected,
    RequestStatus,
    SamplingParams,
    Step,
    StepFailure,
    StepResult,
    Submit,
)
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler
from scheduler.request import Request

Sample = Callable[[int, int], int]


def limits(usable_blocks: int, block_size: int = 16, **changes: Any) -> Limits:
    values: dict[str, Any] = {
        "model": "fake",
        "block_size": block_size,
        "num_blocks": usable_blocks + 1,
        "max_model_len": 4096,
        "vocab_size": 50_000,
        "max_num_seqs": 4096,
        "max_num_batched_tokens": 65536,
        "eos_token_ids": (2,),
    }
    return Limits(**(values | changes))


def default_sample(request_id: int, position: int) -> int:
    """A token that no end set contains, different for each request and position."""
    return 1000 + (request_id * 7919 + position * 104729) % 40000


SUBMIT_FIELDS = (
    *("priority", "cache_salt", "emitted", "resumed", "tenant", "label", "routing_key", "kv_source", "open"),
    *("timeout_ms", "deadline_ms", "adapter", "adapter_generation", "prompt_logprobs_from"),
)


class FakeRunner:
    """Executes steps in order over an array of block contents; a read of anything not written is an error."""

    def __init__(self, limits: Limits, sample: Sample = default_sample) -> None:
        self.size = limits.block_size
        self.sample = sample
        self.rows: dict[int, dict[str, Any]] = {}
        self.content: list[list[int | None]] = [[None] * self.size for _ in range(limits.num_blocks)]
        self.host: list[list[int | None]] = [[None] * self.size for _ in range(limits.host_blocks)]
        self.scheduled: list[dict[int, int]] = []
        self.void: set[int] = set()
        self.void_pages: set[int] = set()
        self.fault: Callable[[dict[int, int]], str] = lambda counts: ""
        """The code with which a step of these rows (id -> tokens) fails; empty if it doesn't."""

    def execute(self, step: Step, failure: str = "") -> StepResult:
        """Run a step. With `failure` it fails: nothing is copied or written, and its requests are void until they
        arrive anew, as is what they would have written."""
        for request_id in u64(step.left).tolist():
            self.rows.pop(request_id, None)
            self.void.discard(request_id)
        for new in step.new:  # what arrivals are given afresh is written in this step, before anybody reads
            self.void_pages.difference_update(i32(new.block_ids).tolist()[-(-new.num_computed // self.size) :])
        for new in step.new:
            counted_on = i32(new.block_ids)[: -(-new.num_computed // self.size)].tolist()
            swapped_in = set(i32(step.swap_in).tolist()[::2])
            if self.void_pages.intersection(counted_on) - swapped_in:
                failure = failure or "voided_page"
        failure = failure or self.fault(self._to_compute(step))
        if failure:
            return self._fail(step, failure)
        out, back = i32(step.swap_out).tolist(), i32(step.swap_in).tolist()
        for device, host in zip(out[::2], out[1::2], strict=True):
            self.host[host] = list(self.content[device])
        for device, host in zip(back[::2], back[1::2], strict=True):
            self.content[device] = list(self.host[host])
            self.void_pages.discard(device)
        for new in step.new:
            self.void.discard(new.id)
            self.rows[new.id] = {
                "incarnation": new.incarnation,
                "tokens": i32(new.tokens).tolist(),
                "computed": new.num_computed,
                "blocks": i32(new.block_ids).tolist(),
                "untold": range(max(new.prompt_logprobs_from, 1), new.num_prompt),
                "tells": new.params.prompt_logprobs >= 0,
            }
        ids, counts = u64(step.ids).tolist(), i32(step.num_tokens).tolist()
        assert len(set(ids)) == len(ids), "an id is scheduled twice"
        assert all(count > 0 for count in counts), "a row of zero tokens"
        grown = iter(i32(step.grow_blocks).tolist())
        for row, count in zip(i32(step.grow_rows).tolist(), i32(step.grow_counts).tolist(), strict=True):
            blocks = [next(grown) for _ in range(count)]
            if ids[row] in self.void:
                self.void_pages.update(blocks)
            else:
                self.rows[ids[row]]["blocks"] += blocks
        self.scheduled.append(dict(zip(ids, counts, strict=True)))
        alive = [(i, n) for i, n in zip(ids, counts, strict=True) if i not in self.void]
        ids, counts = [i for i, _ in alive], [n for _, n in alive]
        told = self._tell_prompts(ids, counts)
        self._write(ids, counts)
        for block in i32(step.filled_blocks).tolist():
            written = None not in self.content[block] or block in self.void_pages
            assert written, f"block {block} is called full and is not"
        return msgspec.structs.replace(self._sample(step, ids, counts), prompt_logprobs=told)

    def _tell_prompts(self, ids: list[int], counts: list[int]) -> list[PromptLogprobs]:
        """What computing these tokens tells of their prompts: as the log-probability of each its negative position."""
        found = []
        for request_id, count in zip(ids, counts, strict=True):
            row = self.rows[request_id]
            first = max(row["computed"] + 1, row["untold"].start)
            end = min(row["computed"] + count + 1, row["untold"].stop)
            if row["tells"] and first < end:
                own = -np.arange(first, end, dtype=F32)
                ranks = pack_i32([1] * len(own))
                found.append(PromptLogprobs(request_id, row["incarnation"], first, own.tobytes(), ranks))
        return found

    def _to_compute(self, step: Step) -> dict[int, int]:
        arrived = {new.id for new in step.new}
        counts = zip(u64(step.ids).tolist(), i32(step.num_tokens).tolist(), strict=True)
        return {i: count for i, count in counts if i in arrived or i not in self.void}

    def _fail(self, step: Step, code: str) -> StepResult:
        ids = u64(step.ids).tolist()
        self.scheduled.append(dict(zip(ids, i32(step.num_tokens).tolist(), strict=True)))
        for new in step.new:
            self.void_pages.update(i32(new.block_ids).tolist()[new.num_computed // self.size :])
        self.void_pages.update(i32(step.grow_blocks).tolist())
        for request_id in ids:
            row = self.rows.pop(request_id, None)
            if row is not None:
                self.void_pages.update(row["blocks"][row["computed"] // self.size :])
        self.void.update(ids)
        return StepResult(step.epoch, step.step_id, failure=StepFailure(code, "made to fail"))

    def _write(self, ids: list[int], counts: list[int]) -> None:
        for request_id, count in zip(ids, counts, strict=True):
            row = self.rows[request_id]
            start = row["computed"]
            assert start + count <= len(row["tokens"]), "computes a token that nobody knows"
            for position in range(start, start + count):
                block = row["blocks"][position // self.size]
                assert block != 0, "writes to the null block"
                self.content[block][position % self.size] = row["tokens"][position]
                self.void_pages.discard(block)
            row["computed"] = start + count
        for request_id in ids:
            row = self.rows[request_id]
            for position in range(row["computed"]):
                seen = self.content[row["blocks"][position // self.size]][position % self.size]
                assert seen == row["tokens"][position], f"request {request_id} reads a foreign token at {position}"

    def _sample(self, step: Step, ids: list[int], counts: list[int]) -> StepResult:
        done, positions, tokens = [], [], []
        for request_id in ids:
            row = self.rows[request_id]
            if row["computed"] == len(row["tokens"]):
                token = self.sample(request_id, len(row["tokens"]))
                done.append(request_id)
                positions.append(len(row["tokens"]))
                tokens.append(token)
                row["tokens"].append(token)
        return StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            ids=pack_u64(done),
            incarnations=pack_i32([self.rows[request_id]["incarnation"] for request_id in done]),
            positions=pack_i32(positions),
            tokens=pack_i32(tokens),
        )


class Isolated:
    """Scheduler and fake runner together, with results `delay` steps late, and every event that a client would see."""

    def __init__(
        self,
        usable_blocks: int,
        *,
        delay: int = 0,
        sample: Sample = default_sample,
        limit: Limits | None = None,
        **config: Any,
    ) -> None:
        self.limits = limit or limits(usable_blocks)
        config.setdefault("watermark", 0.0)
        self.config = SchedulerConfig(pipeline_depth=delay + 1, **config)
        self.now = 0
        self.core = CoreScheduler(self.config, self.limits, b"k" * 16, clock=lambda: self.now)
        self.core.epoch = 1
        self.runner = FakeRunner(self.limits, sample)
        self.pending: deque[StepResult] = deque()
        self.delay = delay
        self.tokens: dict[int, list[int]] = {}
        self.accepted: list[int] = []
        self.rejected: dict[int, Rejected] = {}
        self.finished: dict[int, Finished] = {}
        self.told: dict[int, list[float]] = {}
        """Of prompts: what an API keeps, which misses no position and has each once."""
        self.steps: list[Step | None] = []

    def add(self, request_id: int, prompt: int | list[int], max_tokens: int = 4, **params: Any) -> None:
        """Add a request of `prompt` tokens (ids, or how many). Keywords of Submit go there, others are parameters."""
        tokens = prompt if isinstance(prompt, list) else [default_sample(request_id, j) for j in range(prompt)]
        outer = {key: params.pop(key) for key in SUBMIT_FIELDS if key in params}
        if "emitted" in outer:
            outer["emitted"] = pack_i32(outer["emitted"])
        params.setdefault("ignore_eos", True)
        peer = params.pop("peer", 0)
        self.core.add(peer, Submit(request_id, pack_i32(tokens), SamplingParams(max_tokens, **params), **outer))
        self.collect()

    def extend(self, request_id: int, tokens: list[int], *, last: bool = False, peer: int = 0) -> None:
        self.core.extend(peer, Extend(request_id, pack_i32(tokens), last))
        self.collect()

    def orders(self) -> list[Any]:
        """What the runner is asked for beside steps."""
        return self.core.take_orders()

    def deliver_kv(self, order: FetchKv, tokens: list[int], arrived: int) -> None:
        """A transfer ends: `arrived` of the prompt's `tokens` have their KV in its pages."""
        pages, first = (
            i32(order.block_ids).tolist(),
            order.num_tokens - len(i32(order.block_ids)) * self.limits.block_size,
        )
        for position in range(first, arrived):
            page, offset = divmod(position - first, self.limits.block_size)
            self.runner.content[pages[page]][offset] = tokens[position]
        self.core.on_kv_status(KvStatus(order.id, order.incarnation, arrived, "" if arrived else "no such source"))
        self.collect()

    def control(self, action: str, **arguments: str) -> Any:
        """An operator's order; returns the body of an answer that is ok."""
        reply = self.core.control(Control(1, action, arguments))
        self.collect()
        body = msgspec.json.decode(reply.body)
        assert reply.ok, body
        return body

    def refused_control(self, action: str, **arguments: str) -> Any:
        """An operator's order that has to be refused; returns the answer."""
        reply = self.core.control(Control(1, action, arguments))
        assert not reply.ok
        return msgspec.json.decode(reply.body)

    def request(self, request_id: int) -> Request:
        return self.core.requests[request_id]

    def running(self) -> list[int]:
        """Ids in order of admission."""
        return [request.id for request in self.core.table.requests()]

    def preempt(self, request_id: int) -> None:
        """Suspend as a pass would, between two passes; nothing happens to a request that doesn't run."""
        request = self.core.requests.get(request_id)
        if request is not None and request.status == RequestStatus.RUNNING:
            self.core.preempt(request)

    def lose_runner(self, limit: Limits | None = None) -> None:
        """The runner is replaced by one that holds nothing; what was in flight never comes back."""
        self.limits = limit or self.limits
        self.pending.clear()
        self.core.reset_runner(self.limits, b"n" * 16)
        self.core.epoch += 1
        self.runner = FakeRunner(self.limits, self.runner.sample)
        self.collect()

    def abort(self, *ids: int, peer: int = 0) -> None:
        self.core.abort(peer, ids)
        self.collect()

    def step(self) -> dict[int, int]:
        """One pass, and the result that is due. Returns what was scheduled."""
        self.now += 1_000_000
        step = self.core.schedule()
        self.steps.append(step)
        scheduled: dict[int, int] = {}
        if step is not None:
            self.pending.append(self.runner.execute(step))
            scheduled = self.runner.scheduled[-1]
            assert sum(scheduled.values()) <= self.core.token_budget
        if self.pending and (len(self.pending) > self.delay or step is None):
            self.core.update(self.pending.popleft())
        self.collect()
        faults = self.core.check()
        assert not faults, faults
        return scheduled

    def fail_next(self, code: str = "device_error") -> None:
        """One pass whose step fails on the runner; its result comes when it is due."""
        self.now += 1_000_000
        step = self.core.schedule()
        if step is not None:
            self.pending.append(self.runner.execute(step, code))
        if self.pending and (len(self.pending) > self.delay or step is None):
            self.core.update(self.pending.popleft())
        self.collect()

    def collect(self) -> None:
        for _, outputs in self.core.take_outputs():
            self.accepted += u64(outputs.accepted).tolist()
            for rejection in outputs.rejected:
                self.rejected[rejection.id] = rejection
            for part in outputs.prompt_logprobs:
                told = self.told.setdefault(part.id, [])
                assert part.position <= len(told) + 1 < part.end, f"request {part.id}: {part} after {len(told)}"
                told += f32(part.logprobs)[len(told) + 1 - part.position :].tolist()
            columns = (u64(outputs.ids), i32(outputs.positions), i32(outputs.tokens))
            for request_id, position, token in zip(*(c.tolist() for c in columns), strict=True):
                assert request_id not in self.finished, "a token after the end"
                stream = self.tokens.setdefault(request_id, [])
                assert position == len(stream), f"request {request_id}: token {position} after {len(stream)}"
                stream.append(token)
            for end in outputs.finished:
                assert end.id not in self.finished, "two ends"
                self.finished[end.id] = end

    def drain(self, most: int = 10_000) -> int:
        """Step until nothing is live or in flight; returns the number of steps. The five invariants hold after."""
        for count in range(most):
            if not self.core.has_requests and not self.pending:
                self.check_drained()
                return count
            self.step()
        raise AssertionError(f"still live after {most} steps: {list(self.core.requests)}")

    def check_drained(self) -> None:
        pool = self.core.pool
        assert pool.num_free == pool.num_usable
        assert not any(pool.refs)
        assert not self.core.requests and not len(self.core.strategies.queue) and not len(self.core.table)
        assert set(self.accepted) == set(self.finished)
        stats = self.core.stats
        assert stats.started == sum(stats.finished.values())

    def status(self, request_id: int) -> RequestStatus:
        return self.finished[request_id].status


def solo_tokens(request_id: int, prompt: int, max_tokens: int, sample: Sample = default_sample) -> list[int]:
    """What a request emits when nobody disturbs it."""
    return [sample(request_id, prompt + n) for n in range(max_tokens)]


def as_ids(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.uint64)
