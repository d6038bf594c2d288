"""A scheduler for tests of the API: the real protocol over a real socket, tokens from a script.

It runs in a thread, one step per turn of its loop, and gives every live request one token per step. A test scripts
the tokens, holds them back, refuses, dies and returns.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq

from protocol import wire
from protocol.channels import ChannelError, ServerChannel, new_instance
from protocol.columns import F32, i32, pack_i32, pack_u64, u64
from protocol.messages import (
    Abort,
    ApiToScheduler,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Outputs,
    PromptLogprobs,
    Refused,
    Rejected,
    RequestStatus,
    SchedulerStatus,
    Submit,
    TokenLogprobs,
    Welcome,
)

DEADLINE_S = 60.0
POLL_MS = 2
STATUS_EVERY_S = 0.1


@dataclass
class Live:
    """A request that runs: where its tokens come from and how many it has."""

    peer: bytes
    submit: Submit
    tokens: Sequence[int]
    count: int


@dataclass
class Record:
    """What the API has told."""

    submits: list[Submit] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    goodbyes: list[Goodbye] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)


class FakeScheduler:
    """Binds `address` and answers until `stop`. `script` gives a request's tokens; after them come end tokens."""

    def __init__(self, address: str, limits: Limits, script: Callable[[Submit], Sequence[int]], epoch: int = 1) -> None:
        self.address = address
        self.limits = limits
        self.script = script
        self.epoch = epoch
        self.instance = new_instance()
        self.record = Record()
        self.live: dict[int, Live] = {}
        self.held = False
        self.tokens_allowed = 10**9
        self.refuse: Callable[[Submit], Rejected | None] = lambda submit: None
        self.accept = True
        self.refuse_hello: Refused | None = None
        self.cached_tokens = 0
        self.runner = "ready"
        self.stalled_ms = 0
        self.waiting_timeout_ms = 0
        self.queue_limit, self.queued, self.displaces, self.least_urgent = 0, 0, False, 0
        self.replicas: tuple[int, ...] = ()
        self.draining = False
        self.reports = True
        self.silent = False
        self.top: list[tuple[int, float]] | None = None
        self.tell_prompt: Callable[[Submit], list[PromptLogprobs]] = told_in_two
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        self._changed = threading.Condition()
        self._step = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel: ServerChannel = ServerChannel(self._context, address, ApiToScheduler)
        self.start()

    # --- for tests --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, silently as a killed process would. Idempotent."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
        self.channel.close()
        self._context.term()

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` in the scheduler's thread and wait until it is done."""
        done = threading.Event()

        def both() -> None:
            try:
                work()
            finally:
                done.set()

        self._work.put(both)
        assert done.wait(DEADLINE_S)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Block until `condition` holds; it is looked at after every turn of the loop."""
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_S), f"waited in vain for: {what}"

    def forget(self) -> None:
        """Back to defaults between tests."""

        def clear() -> None:
            self.live.clear()
            self.record = Record()
            self.held, self.accept, self.silent = False, True, False
            self.tokens_allowed = 10**9
            self.refuse = lambda submit: None
            self.cached_tokens, self.stalled_ms, self.waiting_timeout_ms = 0, 0, 0
            self.queue_limit, self.queued, self.displaces, self.least_urgent = 0, 0, False, 0
            self.draining, self.reports = False, True
            self.runner = "ready"
            self.top = None
            self.tell_prompt = told_in_two
            self._send_status()

        self.call(clear)

    def report(self, **levels: int) -> None:
        """Say how full the queue is (`queue_limit`, `queued`, ...), now and from now on."""

        def work() -> None:
            for name, value in levels.items():
                setattr(self, name, value)
            self._send_status()

        self.call(work)

    def send_outputs(self, outputs: Outputs) -> None:
        """Send a message as it is to every API."""
        self.call(lambda: self._to_all(outputs))

    # --- the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last_status = 0.0
        while not self._stopping:
            self.channel.socket.poll(POLL_MS)
            while not self._work.empty():
                self._work.get()()
            if self.silent:
                continue
            for peer, message in self.channel.receive():
                self._handle(peer, message)
            if time.monotonic() - last_status > STATUS_EVERY_S:
                last_status = time.monotonic()
                self._send_status()
            if self.live and not self.held:
                self._turn()
            with self._changed:
                self._changed.notify_all()

    def _send_status(self) -> None:
        status = SchedulerStatus(
            self.epoch, self.runner, len(self.live), 0, 0.25, self.stalled_ms, self.draining, self.limits,
            self.waiting_timeout_ms, self.queue_limit, self.queued, self.displaces, self.least_urgent,
            *self.replicas,
        )  # fmt: skip
        self._to_all(Heartbeat(time.time_ns()))
        if self.reports:
            self._to_all(status)

    def _to_all(self, message: object) -> None:
        for peer in self.channel.peers:
            try:
                self.channel.send(peer, message)  # type: ignore[arg-type]
            except ChannelError:
                self.channel.drop(peer)

    def _handle(self, peer: bytes, message: object) -> None:
        if isinstance(message, Hello):
            self.record.hellos.append(message)
            if self.refuse_hello is not None:
                self.channel.refuse(peer, self.refuse_hello)
                return
            welcome = Welcome(
                "scheduler", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, self.instance, self.epoch, self.limits
            )
            self.channel.welcome(peer, welcome)
            self._send_status()
        elif isinstance(message, Submit):
            self._submit(peer, message)
        elif isinstance(message, Abort):
            self._abort(peer, u64(message.ids).tolist())
        elif isinstance(message, Goodbye):
            self.record.goodbyes.append(message)
            self.channel.drop(peer)

    def _submit(self, peer: bytes, submit: Submit) -> None:
        self.record.submits.append(submit)
        rejected = self.refuse(submit)
        if rejected is not None:
            self.channel.send(peer, Outputs(self.epoch, self._step, rejected=[rejected]))
            return
        self.live[submit.id] = Live(peer, submit, self.script(submit), len(submit.emitted) // 4)
        if self.accept:
            self.channel.send(peer, Outputs(self.epoch, self._step, accepted=pack_u64([submit.id])))

    def _abort(self, peer: bytes, ids: list[int]) -> None:
        self.record.aborted += ids
        ended = [live for i in ids if (live := self.live.pop(i, None)) is not None]
        if ended:
            finished = [self._finished(live, RequestStatus.ABORTED, -1) for live in ended]
            self.channel.send(peer, Outputs(self.epoch, self._step, finished=finished))

    def _finished(self, live: Live, status: RequestStatus, stop_token: int) -> Finished:
        return Finished(
            live.submit.id, status, stop_token, live.count, num_cached_tokens=self.cached_tokens, queue_ns=1_000_000
        )

    def _turn(self) -> None:
        """One step: one token for each live request that may have one."""
        self._step += 1
        by_peer: dict[bytes, list[Live]] = {}
        for live in self.live.values():
            if live.count < self.tokens_allowed:
                by_peer.setdefault(live.peer, []).append(live)
        for peer, rows in by_peer.items():
            ids, positions, tokens = [], [], []
            finished: list[Finished] = []
            logprobs: list[TokenLogprobs] = []
            told: list[PromptLogprobs] = []
            for live in rows:
                params = live.submit.params
                if params.prompt_logprobs >= 0 and not live.count:
                    told += self.tell_prompt(live.submit)
                end = params.eos_token_ids[0]
                token = live.tokens[live.count] if live.count < len(live.tokens) else end
                ids.append(live.submit.id)
                positions.append(live.count)
                tokens.append(token)
                if params.logprobs >= 0:
                    logprobs.append(self._logprobs(live, token))
                live.count += 1
                ends = token in params.stop_token_ids or (token in params.eos_token_ids and not params.ignore_eos)
                if ends:
                    finished.append(self._finished(live, RequestStatus.STOPPED, token))
                elif live.count >= params.max_tokens:
                    finished.append(self._finished(live, RequestStatus.LENGTH, -1))
            for end_event in finished:
                del self.live[end_event.id]
            outputs = Outputs(
                self.epoch, self._step, pack_u64(ids), pack_i32(positions), pack_i32(tokens),
                finished=finished, logprobs=logprobs, prompt_logprobs=told,
            )  # fmt: skip
            try:
                self.channel.send(peer, outputs)
            except ChannelError:
                for live in rows:
                    self.live.pop(live.submit.id, None)

    def _logprobs(self, live: Live, token: int) -> TokenLogprobs:
        wanted = live.submit.params.logprobs
        top = self.top if self.top is not None else [(token, -0.5), (5, -1.5), (6, -2.5), (7, -3.5), (8, -4.5)]
        top = top[:wanted]
        return TokenLogprobs(
            live.submit.id, live.count, -0.5, 1,
            pack_i32([i for i, _ in top]), np.array([p for _, p in top], F32).tobytes(),
        )  # fmt: skip


def told_of(submit: Submit, begin: int, end: int) -> PromptLogprobs:
    """Of the prompt token at position p: log-probability -p / 8 and rank 3, behind ids 7 and 5 with -1/8 and -1/4."""
    count, best = end - begin, submit.params.prompt_logprobs
    ids, values = [7, 5, 9, 11, 13][:best], [-0.125, -0.25, -64.0, -65.0, -66.0][:best]
    own = -np.arange(begin, end) / 8
    return PromptLogprobs(
        submit.id, 1, begin, own.astype(F32).tobytes(), pack_i32([3] * count),
        pack_i32(ids * count), np.array(values * count, F32).tobytes(),
    )  # fmt: skip


def told_in_two(submit: Submit) -> list[PromptLogprobs]:
    """All of a prompt in two parts, of which the second repeats the first, as after a preemption."""
    begin, end = max(submit.prompt_logprobs_from, 1), len(submit.prompt) // 4
    parts = [(begin, min(begin + 2, end)), (begin, end)]
    return [told_of(submit, *part) for part in parts if part[0] < part[1]]


def prompt_of(submit: Submit) -> list[int]:
    """The prompt's ids."""
    ids: list[int] = i32(submit.prompt).tolist()
    return ids
