"""A whole scheduler on a page: first come, first served, and whoever lacks pages takes them from the youngest.

It shares nothing with the `scheduler` package, only `protocol`. docs/write-your-own-scheduler.md walks through it.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import zmq
from msgspec.structs import replace

from protocol import messages as msg
from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import RequestStatus
from protocol.process import StopSignal, setup_logging
from protocol.scheduler_links import LinkSettings, SchedulerLinks
from protocol.validation import check_submit


@dataclass(eq=False)
class Request:
    """Its tokens are progress, which nothing takes away; its pages and `computed` are residency, which much does."""

    peer: int
    submit: msg.Submit
    tokens: list[int]
    num_prompt: int
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    queue_ns: int = 0
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    incarnation: int = 0
    num_preemptions: int = 0
    failures: int = 0


class MinimalScheduler:
    """All requests, in order of arrival. One step is in flight at a time; `rows` are the requests that it computes."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.links = SchedulerLinks(context, LinkSettings.from_environment(os.environ), self)
        self.limits: msg.Limits  # from the first Welcome on; no request comes before
        self.step_id = 0
        self.requests: dict[int, Request] = {}
        self.rows: list[Request] = []
        self.free: list[int] = []
        self.left: list[int] = []

    def on_request(self, peer: int, message: msg.Submit | msg.Extend | msg.Abort | msg.Control) -> None:
        """Accept or reject a Submit, end what an Abort names. Outputs that come along are tokens like any other."""
        if isinstance(message, msg.Submit):
            rejected = check_submit(message, self.limits, message.id in self.requests)
            beyond = (message.open, message.kv_source, message.adapter, message.params.grammar)
            if any(beyond) or message.params.repetition_max_pattern:
                rejected = msg.Rejected(message.id, "unsupported", "no open prompts, KV sources, adapters, grammars")
            if rejected is None:
                tokens = i32(message.prompt + message.emitted).tolist()
                self.requests[message.id] = request = Request(peer, message, tokens, len(message.prompt) // 4)
                self.tell(peer, accepted=pack_u64([message.id]))
                self.end_if_complete(request)
            else:
                self.tell(peer, rejected=[rejected])
        elif isinstance(message, msg.Abort):
            for request_id in u64(message.ids[: len(message.ids) // 8 * 8]).tolist():
                found = self.requests.get(request_id)
                if found is not None and found.peer == peer:
                    self.finish(found, RequestStatus.ABORTED)
        elif isinstance(message, msg.Control):
            body = b'{"code": "unsupported", "message": "the minimal scheduler has no controls"}'
            self.links.send(peer, msg.ControlReply(message.nonce, False, body))

    def on_gone(self, peer: int) -> None:
        """An API's session is over: so are its requests. If it returns, it submits again what is live."""
        for request in [request for request in self.requests.values() if request.peer == peer]:
            self.evict(self.requests.pop(request.submit.id))

    def status(self) -> msg.SchedulerStatus:
        """End who has waited too long to be let in; say how things stand."""
        for request in list(self.requests.values()):
            waited_ms = (time.monotonic_ns() - request.arrived_ns) // 1_000_000
            if not request.queue_ns and 0 < request.submit.timeout_ms < waited_ms:
                self.finish(request, RequestStatus.ERROR, code="waiting_timeout", text=f"waited {waited_ms} ms")
        running = sum(bool(request.pages) for request in self.requests.values())
        usage = 1 - len(self.free) / (self.limits.num_blocks - 1) if self.links.limits else 0.0
        return self.links.status(running, len(self.requests) - running + len(self.links.backlog), usage)

    def work(self) -> None:
        """Serve in order of arrival: each gets pages for all its tokens, and computes what is left of the budget."""
        if not self.links.runner.connected or self.rows or not self.requests:
            return
        budget, new = self.limits.max_num_batched_tokens, []
        plan: dict[int, int] = {}  # request id -> number of tokens
        grown: dict[int, int] = {}  # row of the plan -> page
        batch = [r for r in list(self.requests.values())[: self.limits.max_num_seqs] if r.computed < len(r.tokens)]
        for request in batch:
            lacks = -(-len(request.tokens) // self.limits.block_size) - len(request.pages)
            while lacks > len(self.free) and batch[-1] is not request:
                self.evict(batch.pop())
            if lacks > len(self.free) or not budget:
                break
            taken = [self.free.pop() for _ in range(lacks)]
            if not request.pages:
                request.incarnation = self.step_id + 1  # the step that brings it: never the same twice, whatever the id
                request.queue_ns = request.queue_ns or time.monotonic_ns() - request.arrived_ns
                known = (pack_i32(request.tokens), request.num_prompt, 0, pack_i32(taken), request.submit.params)
                new.append(msg.NewRequest(request.submit.id, request.incarnation, *known))
            elif taken:
                grown[len(plan)] = taken[0]  # a step adds one token, so never more than one page
            request.pages += taken
            plan[request.submit.id] = count = min(budget, len(request.tokens) - request.computed)
            request.computed += count
            budget -= count
        self.rows = batch[: len(plan)]
        if self.rows:
            self.step_id += 1
            ids, counts = pack_u64(list(plan)), pack_i32(list(plan.values()))
            growth = (pack_i32(list(grown)), pack_i32([1] * len(grown)), pack_i32(list(grown.values())))
            left, self.left = pack_u64(self.left), []
            self.links.runner.send(msg.Step(self.links.epoch, self.step_id, ids, counts, new, left, *growth))

    def evict(self, request: Request) -> None:
        """Take a request off the runner, if it is there. What it knows it computes again when its turn comes."""
        if request.pages:
            self.left.append(request.submit.id)
            self.free += request.pages
            request.pages, request.computed, request.incarnation = [], 0, 0
            request.num_preemptions += 1

    def on_runner(self, message: msg.StepResult | msg.GrammarStatus | msg.KvStatus | msg.Heartbeat) -> None:
        """Apply the awaited result to the residencies that it is about: compare, don't count."""
        awaited = (self.links.epoch, self.step_id)
        if not self.rows or not isinstance(message, msg.StepResult) or (message.epoch, message.step_id) != awaited:
            return
        rows, self.rows = self.rows, []
        if message.failure is not None:
            for request in rows:
                self.evict(request)  # from here on no row of the result is about it
                request.failures += 1
                if request.failures == 3:
                    self.finish(request, RequestStatus.ERROR, -1, message.failure.code, message.failure.message)
        for error in message.errors:
            found = self.requests.get(error.id)
            if found is not None and found.incarnation == error.incarnation:
                self.finish(found, RequestStatus.ERROR, -1, error.code, error.message)
        for part in message.prompt_logprobs:
            found = self.requests.get(part.id)
            if found is not None and found.incarnation == part.incarnation:
                self.tell(found.peer, prompt_logprobs=[part])  # all of it again after an eviction
        sampled: dict[int, list[Request]] = {}
        columns = (u64(message.ids), i32(message.incarnations), i32(message.positions), i32(message.tokens))
        for request_id, incarnation, position, token in zip(*(column.tolist() for column in columns), strict=True):
            found = self.requests.get(request_id)
            if found is not None and (found.incarnation, len(found.tokens)) == (incarnation, position):
                found.tokens.append(token)
                sampled.setdefault(found.peer, []).append(found)
        for peer, mine in sampled.items():
            outputs = {request.submit.id: len(request.tokens) - 1 - request.num_prompt for request in mine}
            ids, positions = pack_u64(list(outputs)), pack_i32(list(outputs.values()))
            tokens = pack_i32([request.tokens[-1] for request in mine])
            logprobs = [replace(one, position=outputs[one.id]) for one in message.logprobs if one.id in outputs]
            self.tell(peer, ids=ids, positions=positions, tokens=tokens, logprobs=logprobs)
            for request in mine:
                self.end_if_complete(request)

    def on_welcome(self, welcome: msg.Welcome, limits: msg.Limits) -> None:
        """A new epoch: compute everything again, and end what a smaller runner can't hold."""
        for request in self.requests.values():
            self.evict(request)
        self.limits, self.rows, self.left, self.free = limits, [], [], list(range(limits.num_blocks - 1, 0, -1))
        for request in list(self.requests.values()):
            self.end_if_complete(request)

    def end_if_complete(self, request: Request) -> None:
        """End a request whose newest token is its last one. A stop on the last allowed token is a stop."""
        params, limits, last = request.submit.params, self.limits, request.tokens[-1]
        ends = params.stop_token_ids + (() if params.ignore_eos else params.eos_token_ids or limits.eos_token_ids)
        capacity = (limits.num_blocks - 1) * limits.block_size
        if last in ends and len(request.tokens) - request.num_prompt >= max(1, params.min_tokens):
            self.finish(request, RequestStatus.STOPPED, last)
        elif len(request.tokens) >= min(request.num_prompt + params.max_tokens, limits.max_model_len, capacity + 1):
            self.finish(request, RequestStatus.LENGTH)

    def finish(self, request: Request, status: RequestStatus, stop: int = -1, code: str = "", text: str = "") -> None:
        """End a request in whatever state it is, and tell its API, unless that has left meanwhile."""
        if self.requests.pop(request.submit.id, None) is not None:
            counts = (len(request.tokens) - request.num_prompt, 0, request.num_preemptions)
            self.evict(request)
            end = msg.Finished(request.submit.id, status, stop, *counts, request.queue_ns, code, text)
            self.tell(request.peer, finished=[end])

    def tell(self, peer: int, **news: Any) -> None:
        """Send an API these fields of an Outputs."""
        self.links.send(peer, msg.Outputs(self.links.epoch, self.step_id, **news))


if __name__ == "__main__":
    setup_logging("minimal")
    with zmq.Context() as context, StopSignal() as stop, closing(MinimalScheduler(context).links) as links:
        raise SystemExit(links.run(stop))
