"""A whole scheduler in one file: first come, first served, one step in flight, preemption by recomputing.

It shares nothing with the `scheduler` package, only `protocol`, and keeps the wire contract all the same.
docs/write-your-own-scheduler.md walks through it. Run it in place of `triptych scheduler`; it reads the same
environment variables: TRIPTYCH_RUNTIME_DIR, TRIPTYCH_SCHEDULER_ADDRESS, TRIPTYCH_RUNNER_ADDRESS, TRIPTYCH_LEASE_S,
TRIPTYCH_RUNNER_SILENCE_S.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from protocol import wire
from protocol.channels import ChannelError, ClientChannel, ServerChannel, new_instance
from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import (
    Abort,
    ApiToScheduler,
    Control,
    ControlReply,
    Finished,
    Goodbye,
    Hello,
    Limits,
    NewRequest,
    Outputs,
    Refused,
    Rejected,
    RequestStatus,
    RunnerToScheduler,
    SchedulerStatus,
    Step,
    StepResult,
    Submit,
    TokenLogprobs,
    Welcome,
)
from protocol.process import EXIT_REPLACED, StopSignal, die_with_parent, ensure_private_dir, setup_logging

STATUS_S = 0.4
MOST_WAITING = 1000
MOST_FAILURES = 3
EXIT_REFUSED = 3


# --- 1. what is remembered of a request -----------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """Its tokens are progress; its pages and `computed` are residency, which preemption takes away."""

    submit: Submit
    api: bytes
    tokens: list[int]
    num_prompt: int
    arrived_ns: int
    admitted_ns: int = 0
    incarnation: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    preemptions: int = 0
    failures: int = 0


@dataclass
class Mail:
    """What one API has to be told with the next message."""

    accepted: list[int] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class MinimalScheduler:
    """Owns both links and all requests. `run` is the loop."""

    def __init__(self, context: zmq.Context[Any], environ: dict[str, str]) -> None:
        directory = ensure_private_dir(environ.get("TRIPTYCH_RUNTIME_DIR", "/tmp/triptych"))
        here = environ.get("TRIPTYCH_SCHEDULER_ADDRESS") or f"ipc://{directory}/scheduler.sock"
        there = environ.get("TRIPTYCH_RUNNER_ADDRESS") or f"ipc://{directory}/runner.sock"
        self.lease_s = float(environ.get("TRIPTYCH_LEASE_S", "10"))
        silence_s = float(environ.get("TRIPTYCH_RUNNER_SILENCE_S", "5"))
        self.instance = new_instance()
        self.apis: ServerChannel[Any] = ServerChannel(context, here, ApiToScheduler)
        self.runner: ClientChannel[Any] = ClientChannel(
            context, there, RunnerToScheduler, self._hello, silence_s=silence_s
        )
        self.limits: Limits | None = None
        self.epoch = 0
        self.step_id = 0
        self.in_flight = 0
        self.computing: list[Request] = []
        self.free: list[int] = []
        self.left: list[int] = []
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.mail: dict[bytes, Mail] = {}
        self.early: list[tuple[bytes, Submit | Abort]] = []
        self.last_status = 0.0
        self.exit_code: int | None = None

    # --- 2. the loop ------------------------------------------------------------------------------------------

    def run(self, stop: StopSignal) -> int:
        """Serve until told to stop; the exit status."""
        poller = zmq.Poller()
        for source in (self.apis.socket, self.runner.socket, stop.fileno()):
            poller.register(source, zmq.POLLIN)
        while not stop.requested and self.exit_code is None:
            self.hear_runner()
            self.hear_apis()
            self.send_step()
            self.tell_apis()
            self.tick()
            poller.poll(200)
        goodbye = Goodbye("shutdown", "the minimal scheduler ends")
        self.runner.leave(goodbye)
        for api in self.apis.peers:
            self.apis.drop(api, goodbye)
        return self.exit_code or 0

    def tick(self) -> None:
        """Heartbeats, leases, and the status that every API lives by."""
        self.runner.tick()
        if time.monotonic() - self.last_status < STATUS_S:
            return
        self.last_status = time.monotonic()
        for api in self.apis.peers:
            if self.apis.silent_for(api) > self.lease_s:
                self.drop(api, Goodbye("lease", "silent for too long"))
        now = time.monotonic_ns()
        for request in list(self.waiting):
            waited_ms = (now - request.arrived_ns) // 1_000_000
            if 0 < request.submit.timeout_ms <= waited_ms and not request.admitted_ns:
                self.finish(request, RequestStatus.ERROR, "waiting_timeout", f"not admitted within {waited_ms} ms")
        pool = self.limits.num_blocks - 1 if self.limits else 1
        used = (pool - len(self.free)) / pool if self.limits else 0.0
        ready = "ready" if self.runner.connected else "absent"
        waiting = len(self.waiting) + len(self.early)
        status = SchedulerStatus(self.epoch, ready, len(self.running), waiting, used, limits=self.limits)
        for api in self.apis.peers:
            self.send(api, status)

    def send(self, api: bytes, message: Any) -> None:
        """An API that can't be reached has lost its session: it will shake hands and submit again."""
        try:
            self.apis.send(api, message)
        except ChannelError:
            self.drop(api, Goodbye("unreachable"))

    # --- 3. APIs ----------------------------------------------------------------------------------------------

    def hear_apis(self) -> None:
        """Take in what the APIs have sent."""
        for api, message in self.apis.receive():
            if isinstance(message, Hello):
                self.welcome(api, message)
            elif isinstance(message, Submit):
                self.add(api, message)
            elif isinstance(message, Abort):
                self.abort(api, message)
            elif isinstance(message, Control):
                body = b'{"code": "unsupported", "message": "the minimal scheduler has no controls"}'
                self.send(api, ControlReply(message.nonce, False, body))
            elif isinstance(message, Goodbye):
                self.drop(api, None)

    def welcome(self, api: bytes, hello: Hello) -> None:
        """Open a session. Whatever an older session of this API asked for ends: it submits again what is live."""
        if hello.role != "api":
            self.apis.refuse(api, Refused("wrong_role", f"this is a scheduler, {hello.role} is not an API"))
            return
        self.drop(api, None)
        answer = Welcome(
            "scheduler", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, self.instance, self.epoch, self.limits,
            lease_ms=int(1000 * self.lease_s),
        )  # fmt: skip
        try:
            self.apis.welcome(api, answer)
        except ChannelError:
            self.drop(api, None)

    def drop(self, api: bytes, goodbye: Goodbye | None) -> None:
        """End a session and, silently, all its requests."""
        for request in [request for request in self.requests.values() if request.api == api]:
            self.remove(request)
        self.early = [entry for entry in self.early if entry[0] != api]
        self.mail.pop(api, None)
        self.apis.drop(api, goodbye)

    def add(self, api: bytes, submit: Submit) -> None:
        """Accept or reject a request; before the first runner says what fits, it has to wait for that."""
        if self.limits is None:
            self.early.append((api, submit))
            return
        mail = self.mail.setdefault(api, Mail())
        rejected = self.refusal(submit, self.limits)
        if rejected is not None:
            mail.rejected.append(rejected)
            return
        tokens = i32(submit.prompt + submit.emitted).tolist()
        request = Request(submit, api, tokens, len(submit.prompt) // 4, time.monotonic_ns())
        self.requests[submit.id] = request
        self.waiting.append(request)
        mail.accepted.append(submit.id)
        if submit.emitted:
            self.end_if_complete(request)

    def refusal(self, submit: Submit, limits: Limits) -> Rejected | None:
        """Why a request can never run here, with the numbers; or that there are too many already."""
        params, num_prompt = submit.params, len(submit.prompt) // 4
        if not 0 <= submit.id < 2**64:
            return Rejected(submit.id, "invalid_id", f"{submit.id} is not an unsigned 64-bit number")
        if submit.id in self.requests:
            return Rejected(submit.id, "duplicate_id", f"{submit.id} is live already", 409)
        if len(submit.prompt) % 4 or len(submit.emitted) % 4:
            return Rejected(submit.id, "invalid_tokens", "a token column is not whole 32-bit integers")
        if submit.open or submit.kv_source or params.grammar or params.repetition_max_pattern:
            text = "the minimal scheduler has no open prompts, KV sources, grammars or repetition stops"
            return Rejected(submit.id, "unsupported", text)
        if not num_prompt or params.max_tokens < 1:
            text = f"{num_prompt} prompt tokens and max_tokens {params.max_tokens}: at least 1 each"
            return Rejected(submit.id, "invalid_length", text)
        most = min(limits.max_model_len - 1, (limits.num_blocks - 1) * limits.block_size)
        if num_prompt > most:
            return Rejected(submit.id, "prompt_too_long", f"the prompt has {num_prompt} tokens, {most} fit")
        ids = i32(submit.prompt + submit.emitted)
        if ids.min() < 0 or ids.max() >= limits.vocab_size:
            return Rejected(submit.id, "invalid_token_id", f"token ids go from 0 to {limits.vocab_size - 1}")
        if len(self.waiting) >= MOST_WAITING and not submit.resumed:
            return Rejected(submit.id, "queue_full", f"{len(self.waiting)} requests wait", 503, 1)
        return None

    def abort(self, api: bytes, message: Abort) -> None:
        """End these requests of this API in whatever state they are; anything else is ignored."""
        if self.limits is None:
            self.early.append((api, message))  # in its place behind what it aborts
            return
        for request_id in u64(message.ids[: len(message.ids) // 8 * 8]).tolist():
            request = self.requests.get(request_id)
            if request is not None and request.api == api:
                self.finish(request, RequestStatus.ABORTED)

    def tell_apis(self) -> None:
        """One message to each API that has anything to hear."""
        mail, self.mail = self.mail, {}
        for api, news in mail.items():
            ids, positions, tokens = zip(*news.tokens, strict=True) if news.tokens else ((), (), ())
            outputs = Outputs(
                self.epoch, self.step_id, pack_u64(ids), pack_i32(positions), pack_i32(tokens),
                pack_u64(news.accepted), news.rejected, news.finished, news.logprobs,
            )  # fmt: skip
            self.send(api, outputs)

    # --- 4. the one decision: what runs next --------------------------------------------------------------------

    def send_step(self) -> None:
        """Serve who runs, in order of arrival, then let in who waits; send it all as one step."""
        if not self.runner.connected or self.limits is None or self.in_flight:
            return
        budget = self.limits.max_num_batched_tokens
        computing: list[Request] = []
        counts: list[int] = []
        grown: dict[int, list[int]] = {}
        news: list[NewRequest] = []
        preempted = False
        for request in list(self.running):
            count = min(len(request.tokens) - request.computed, budget)
            if request not in self.running or not count:
                continue  # a victim of somebody before it, or nothing left of the budget
            while self.shortage(request, count) > 0 and request in self.running:
                self.preempt(self.running[-1])
                preempted = True
            if request in self.running:
                grown[len(computing)] = self.give(request, count)
                computing.append(request)
                counts.append(count)
                budget -= count
        while self.waiting and budget and not preempted and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            count = min(len(request.tokens), budget)
            if self.shortage(request, count) > 0:
                break
            self.running.append(self.waiting.pop(0))
            self.give(request, count)
            request.incarnation += 1
            request.admitted_ns = request.admitted_ns or time.monotonic_ns()
            computing.append(request)
            counts.append(count)
            budget -= count
            submit = request.submit
            news.append(
                NewRequest(
                    submit.id, request.incarnation, pack_i32(request.tokens), request.num_prompt, 0,
                    pack_i32(request.pages), submit.params,
                )
            )  # fmt: skip
        if not counts:
            return
        self.step_id += 1
        self.in_flight, self.computing = self.step_id, computing
        grown = {row: pages for row, pages in grown.items() if pages}
        step = Step(
            self.epoch,
            self.step_id,
            ids=pack_u64([request.submit.id for request in computing]),
            num_tokens=pack_i32(counts),
            new=news,
            left=pack_u64(self.left),
            grow_rows=pack_i32(list(grown)),
            grow_counts=pack_i32([len(pages) for pages in grown.values()]),
            grow_blocks=pack_i32([page for pages in grown.values() for page in pages]),
        )
        self.left = []
        self.runner.send(step)

    def shortage(self, request: Request, count: int) -> int:
        """How many pages are missing for `count` more tokens."""
        assert self.limits is not None
        pages = -(-(request.computed + count) // self.limits.block_size)
        return pages - len(request.pages) - len(self.free)

    def give(self, request: Request, count: int) -> list[int]:
        """Hand out the pages for `count` more tokens, which the next step computes. Returns the new pages."""
        assert self.limits is not None
        request.computed += count
        pages = -(-request.computed // self.limits.block_size) - len(request.pages)
        taken = [self.free.pop() for _ in range(pages)]
        request.pages += taken
        return taken

    def preempt(self, request: Request) -> None:
        """Take a running request's pages. It keeps its tokens and goes to the front of the queue."""
        self.evict(request)
        request.preemptions += 1
        self.waiting.insert(0, request)

    def evict(self, request: Request) -> None:
        """Take a running request off the runner."""
        self.running.remove(request)
        self.left.append(request.submit.id)
        self.free += request.pages
        request.pages, request.computed = [], 0

    # --- 5. results and ends ------------------------------------------------------------------------------------

    def on_result(self, result: StepResult) -> None:
        """Apply a result, if it is the one that is awaited, to the residencies that it is about."""
        if result.epoch != self.epoch or result.step_id != self.in_flight:
            return
        self.in_flight = 0
        if result.failure is not None:
            self.on_failure(result.failure.code, result.failure.message)
            return
        for error in result.errors:
            request = self.requests.get(error.id)
            if request is not None and request.incarnation == error.incarnation:
                self.finish(request, RequestStatus.ERROR, error.code, error.message)
        logprobs = {entry.id: entry for entry in result.logprobs}
        columns = (u64(result.ids), i32(result.incarnations), i32(result.positions), i32(result.tokens))
        for request_id, incarnation, position, token in zip(*(c.tolist() for c in columns), strict=True):
            request = self.requests.get(request_id)
            if request is None or (request.incarnation, len(request.tokens)) != (incarnation, position):
                continue
            output = position - request.num_prompt
            mail = self.mail.setdefault(request.api, Mail())
            mail.tokens.append((request_id, output, token))
            if request_id in logprobs:
                entry = logprobs[request_id]
                mail.logprobs.append(
                    TokenLogprobs(request_id, output, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs)
                )
            request.tokens.append(token)
            self.end_if_complete(request)

    def on_failure(self, code: str, message: str) -> None:
        """The step is void: its requests are computed again, and end with an error after too many failures."""
        for request in [request for request in reversed(self.computing) if request in self.running]:
            request.failures += 1
            if request.failures >= MOST_FAILURES:
                self.finish(request, RequestStatus.ERROR, code, message)
            else:
                self.preempt(request)

    def end_if_complete(self, request: Request) -> None:
        """End a request whose newest token is its last one. A stop on the last allowed token is a stop."""
        assert self.limits is not None
        params, token = request.submit.params, request.tokens[-1]
        num_outputs = len(request.tokens) - request.num_prompt
        ends = () if params.ignore_eos else params.eos_token_ids or self.limits.eos_token_ids
        pool = (self.limits.num_blocks - 1) * self.limits.block_size
        most = min(request.num_prompt + params.max_tokens, self.limits.max_model_len, pool + 1)
        if num_outputs >= max(params.min_tokens, 1) and (token in ends or token in params.stop_token_ids):
            self.finish(request, RequestStatus.STOPPED, stop_token=token)
        elif len(request.tokens) >= most:
            self.finish(request, RequestStatus.LENGTH)

    def finish(
        self, request: Request, status: RequestStatus, code: str = "", message: str = "", stop_token: int = -1
    ) -> None:
        """End a request from any state and tell its API."""
        self.remove(request)
        end = Finished(
            request.submit.id,
            status,
            stop_token,
            num_output_tokens=len(request.tokens) - request.num_prompt,
            num_preemptions=request.preemptions,
            queue_ns=(request.admitted_ns or time.monotonic_ns()) - request.arrived_ns,
            code=code,
            message=message,
        )
        self.mail.setdefault(request.api, Mail()).finished.append(end)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        del self.requests[request.submit.id]
        if request in self.running:
            self.evict(request)
        else:
            self.waiting.remove(request)

    # --- 6. the runner and its epochs ---------------------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello("scheduler", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, self.instance, self.epoch)

    def hear_runner(self) -> None:
        """Take in what the runner has sent."""
        for message in self.runner.receive():
            if isinstance(message, StepResult):
                self.on_result(message)
            elif isinstance(message, Welcome):
                self.on_welcome(message)
            elif isinstance(message, Refused) and message.code not in (wire.OCCUPIED, wire.BAD_FRAME):
                print(f"the runner refuses: {message.code}: {message.message}", file=sys.stderr)
                self.exit_code = EXIT_REFUSED
            elif isinstance(message, Goodbye):
                self.last_status = 0.0
                if message.code in ("fenced", "takeover"):
                    print(f"replaced: {message.message}", file=sys.stderr)
                    self.exit_code = EXIT_REPLACED

    def on_welcome(self, welcome: Welcome) -> None:
        """A new epoch: the runner holds nothing of ours, so that all that ran is computed again."""
        assert welcome.limits is not None, "a runner's welcome has limits"
        for request in reversed(list(self.running)):
            self.preempt(request)
        self.limits, self.epoch = welcome.limits, welcome.epoch
        self.in_flight, self.left = 0, []
        self.free = list(range(welcome.limits.num_blocks - 1, 0, -1))
        for request in list(self.requests.values()):
            self.end_if_complete(request)  # the new runner may hold less
        early, self.early = self.early, []
        for api, message in early:
            self.add(api, message) if isinstance(message, Submit) else self.abort(api, message)
        self.last_status = 0.0


def main() -> int:
    """Run until SIGTERM, or until another scheduler takes the runner."""
    setup_logging("minimal")
    die_with_parent()
    context: zmq.Context[Any] = zmq.Context()
    scheduler = MinimalScheduler(context, dict(os.environ))
    try:
        with StopSignal() as stop:
            return scheduler.run(stop)
    finally:
        scheduler.apis.close()
        scheduler.runner.close()
        context.term()


if __name__ == "__main__":
    sys.exit(main())
