"""The API's end of the link to the scheduler: submits, aborts, distributes what comes back, and resubmits the journal.

Runs on the event loop through the raw socket's descriptor. It knows tokens, not text, and nothing about HTTP bodies.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import zmq

from protocol import wire
from protocol.channels import ChannelError, ClientChannel, new_instance
from protocol.columns import i32, pack_u64, u64
from protocol.messages import (
    Abort,
    ControlReply,
    Finished,
    Goodbye,
    Hello,
    Outputs,
    Refused,
    Rejected,
    RequestStatus,
    SamplingParams,
    SchedulerStatus,
    SchedulerToApi,
    Submit,
    Welcome,
)
from protocol.security import LinkSecurity
from services.chain import Chain
from services.config import ApiConfig
from services.door import Door
from services.errors import ApiError, ended
from services.journal import Call, Generation, RecentCalls, Terms
from services.metrics import ApiMetrics
from services.questions import Questions

log = logging.getLogger("triptych.engine")

TICK_S = 0.2
COSTS_WAIT_S = 0.5
_COUNTER_BITS = 56
"""Of a request id; the 8 above them are the number of the API process."""


class Engine:
    """Owns the link, the journal and the request ids of one API process. Use from one event loop only."""

    def __init__(
        self,
        config: ApiConfig,
        metrics: ApiMetrics,
        context: zmq.Context[Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        random_bits: Callable[[int], int] = secrets.randbits,
        on_fatal: Callable[[str], None] = log.error,
    ) -> None:
        self.instance = new_instance()
        self.epoch = 0
        self.calls: set[Call] = set()
        self.recent = RecentCalls()
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._wall_ns = wall_ns
        self._random_bits = random_bits
        self._on_fatal = on_fatal
        # Neighbours on one machine can't meet, and a process that is started again begins far from where it was.
        self._ids = config.process_number << _COUNTER_BITS
        self._next_id = random_bits(_COUNTER_BITS)
        self._live: dict[int, Generation] = {}
        self._stopping: dict[int, Generation] = {}
        self._aborts: list[int] = []
        self._flush_planned = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._channel: ClientChannel[Any] = ClientChannel(
            context,
            config.scheduler_link,
            SchedulerToApi,
            self._hello,
            clock=clock,
            security=LinkSecurity.of(config.curve_key_file),
        )
        self.chain = Chain(config, self._channel, clock)
        self.door = Door(self.chain, clock)
        self.questions = Questions(self._channel, random_bits)
        metrics.gauge("requests_running", "Generations (choices) in progress, queued ones included.", self.num_live)
        metrics.gauge("link_connected", "1 while the link to the scheduler is open.", lambda: self._channel.connected)
        metrics.gauge("link_lost_frames", "Frames from the scheduler that never arrived.", self._lost_frames)

    def num_live(self) -> int:
        """Generations without a terminal event."""
        return len(self._live)

    def _lost_frames(self) -> int:
        return self._channel.stats.lost_frames

    def _hello(self) -> Hello:
        return Hello("api", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, self.instance, self.epoch)

    # --- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the running event loop and begin to shake hands."""
        self._loop = asyncio.get_running_loop()
        self._channel.attach(self._receive)
        self._tick()

    def close(self, goodbye: str = "shutdown") -> None:
        """Leave the scheduler and close the socket. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._channel.leave(Goodbye(goodbye))
        self._channel.close()

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(TICK_S, self._tick)
        try:
            self._channel.tick()
            now = self._clock()
            self._give_up()
            self._retry_unsent()
            self._expire(now)
            for call in self.calls:
                call.keep(now, self._config.sse_ping_s)
        except Exception:
            log.exception("housekeeping failed; it is tried again in %.1f s", TICK_S)

    def _give_up(self) -> None:
        self.chain.observe()
        if self.chain.given_up:
            for generation in list(self._live.values()):
                self._fail(generation, self.chain.absence())

    def _expire(self, now: float) -> None:
        limit = self._config.request_timeout_s
        for generation in list(self._live.values()) if limit > 0 else ():
            if now - generation.arrived >= limit:
                self._drop(generation)
                self._fail(
                    generation,
                    ApiError(504, f"The request took longer than the limit of {limit:g} s", code="request_timeout"),
                )

        # What a stopped request cost is nice to know, but nobody waits long for it.
        for generation in list(self._stopping.values()):
            if now - generation.stopped_at > COSTS_WAIT_S:
                self._settle(generation, None)

    # --- what the routes call ---------------------------------------------------------------------------------

    def submit(
        self,
        call: Call,
        prompt: bytes,
        params: SamplingParams,
        terms: Terms,
    ) -> Generation:
        """Add one generation to a call and send it, now or as soon as a scheduler is there. `prompt`: i32 column."""
        request_id = self._ids | self._next_id
        self._next_id = (self._next_id + 1) & ((1 << _COUNTER_BITS) - 1)
        submit = Submit(
            request_id,
            prompt,
            params,
            arrival_ns=self._wall_ns(),
            label=call.label,
            priority=terms.priority,
            cache_salt=terms.cache_salt,
            tenant=terms.tenant,
            timeout_ms=terms.timeout_ms,
            deadline_ms=terms.deadline_ms,
            routing_key=terms.routing_key,
        )
        generation = Generation(call, len(call.generations), submit, call.arrived)
        self.recent.add(call, request_id)
        call.generations.append(generation)
        self._live[request_id] = generation
        self.door.enter(request_id, terms.priority)
        self.calls.add(call)
        if self.chain.refusal is not None:
            self._fail(generation, self.chain.refusal)
        elif self._channel.connected:
            self._send(generation)
        return generation

    def draw_seed(self) -> int:
        """A seed for a request that brings none."""
        return self._random_bits(63)

    def stop(self, generation: Generation) -> None:
        """End a generation whose text is complete: the scheduler is told, what it cost may still arrive."""
        if self._forget(generation):
            self._stopping[generation.id] = generation
            generation.stopped_at = self._clock()
            self._abort(generation.id)

    def release(self, call: Call) -> None:
        """The handler is done with a call, whatever happened: abort what still runs, forget the rest."""
        self.calls.discard(call)
        for generation in call.generations:
            if self._live.get(generation.id) is generation:
                self._drop(generation)
            if generation.id in self._stopping:
                generation.released = True  # counted when its costs arrive
            else:
                self._metrics.generation_over(generation, self._clock())

    def refuse_all(self, error: ApiError) -> None:
        """End every live generation with `error`, and any that may still be submitted."""
        self.chain.refuse(error)
        for generation in list(self._live.values()):
            self._drop(generation)
            self._fail(generation, error)

    # --- sending ----------------------------------------------------------------------------------------------

    def _send(self, generation: Generation) -> None:
        """Send a Submit within the session. A full link leaves it unsent for the next tick, a bad value ends it."""
        try:
            self._channel.send(generation.resume(self._clock()))
            generation.sent = True
        except ChannelError as error:
            log.warning("request %d waits for the link: %s", generation.id, error)
        except Exception as error:
            log.exception("request %d can't be encoded", generation.id)
            self._fail(generation, ApiError(400, f"The request can't be encoded: {error}", code="invalid_value"))

    def _retry_unsent(self) -> None:
        if not self._channel.connected:
            return
        for generation in list(self._live.values()):
            if not generation.sent:
                self._send(generation)
        if self._aborts:
            self._flush_aborts()

    def _forget(self, generation: Generation) -> bool:
        """Out of the journal. Whether it was there."""
        self.door.leave(generation.id)
        return self._live.pop(generation.id, None) is not None

    def _drop(self, generation: Generation) -> None:
        """Out of the journal, and the scheduler told so."""
        if self._forget(generation):
            self._abort(generation.id)

    def _abort(self, request_id: int) -> None:
        self._aborts.append(request_id)
        if not self._flush_planned and self._loop is not None:
            self._flush_planned = True
            self._loop.call_soon(self._flush_aborts)

    def _flush_aborts(self) -> None:
        self._flush_planned = False
        if not self._aborts or not self._channel.connected:
            return
        try:
            self._channel.send(Abort(pack_u64(self._aborts)))
        except ChannelError as error:
            log.warning("%d aborts wait for the link: %s", len(self._aborts), error)
        else:
            self._aborts.clear()

    # --- receiving --------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while messages := self._channel.receive():
            for message in messages:
                try:
                    self._handle(message)
                except Exception:
                    log.exception("a %s from the scheduler could not be handled", type(message).__name__)

    def _handle(self, message: object) -> None:
        if isinstance(message, Outputs):
            self._on_outputs(message)
        elif isinstance(message, SchedulerStatus):
            self.chain.update(message, message.limits)
            self.door.hear(message)
        elif isinstance(message, ControlReply):
            self.questions.answered(message)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, Goodbye):
            log.info("the scheduler left (%s %s); %d requests wait", message.code, message.message, len(self._live))
            self.chain.observe()

    def _on_welcome(self, welcome: Welcome) -> None:
        """A session is open: whatever scheduler this is, it gets every live request with the tokens that are here."""
        log.info("scheduler %s, epoch %d; %d live requests", welcome.instance, welcome.epoch, len(self._live))
        self.epoch = max(self.epoch, welcome.epoch)
        self._flush_aborts()
        for generation in list(self._live.values()):
            if generation.sent:
                self._metrics.resubmitted.inc()
                generation.sent = False
            finished = generation.settled()
            if finished is not None:
                self._finish(generation, finished)
            else:
                self._send(generation)
        for generation in list(self._stopping.values()):
            self._settle(generation, None)
        self.chain.update(None, welcome.limits)

    def _on_refused(self, refused: Refused) -> None:
        if refused.code in (wire.BAD_VERSION, wire.BAD_DIGEST):
            self._on_fatal(f"the scheduler refused this API: {refused.message}")
        else:
            log.error("the scheduler refused: %s %s", refused.code, refused.message)

    def _on_outputs(self, outputs: Outputs) -> None:
        now = self._clock()
        live = self._live
        for request_id in u64(outputs.accepted).tolist():
            generation = live.get(request_id)
            if generation is not None and not generation.accepted:
                generation.accepted = True
                generation.touch()
        for rejected in outputs.rejected:
            self._on_rejected(rejected)
        for part in outputs.prompt_logprobs:
            generation = live.get(part.id)
            if generation is not None and generation.prompt_report is not None:
                generation.prompt_report.add(part)
                generation.touch()
        for logprobs in outputs.logprobs:
            generation = live.get(logprobs.id)
            if generation is not None and logprobs.position == len(generation.logprobs):
                generation.logprobs.append(logprobs)
        if outputs.ids:
            self._on_tokens(outputs, now)
        for finished in outputs.finished:
            self._on_finished(finished)

    def _on_tokens(self, outputs: Outputs, now: float) -> None:
        metrics, live, fresh = self._metrics, self._live, 0
        gaps: list[float] = []
        columns = (u64(outputs.ids).tolist(), i32(outputs.positions).tolist(), i32(outputs.tokens).tolist())
        for request_id, position, token in zip(*columns, strict=True):
            generation = live.get(request_id)
            if generation is None:
                continue  # aborted or ended here, and the scheduler didn't know yet
            tokens = generation.tokens
            if position != len(tokens):
                self._out_of_order(generation, position)
                continue
            tokens.append(token)
            fresh += 1
            if generation.last_token:
                gaps.append(now - generation.last_token)
            else:
                generation.first_token = now
                self.door.leave(request_id)
                metrics.first_token.observe(now - generation.arrived)
            generation.last_token = now
            generation.touch()
        metrics.inter_token.observe_all(gaps)
        metrics.generation_tokens.inc(fresh)

    def _out_of_order(self, generation: Generation, position: int) -> None:
        missing = position - len(generation.tokens)
        if missing < 0:
            self._metrics.duplicate_tokens.inc()
            return
        self._lost(generation, missing)

    def _lost(self, generation: Generation, count: int) -> None:
        log.error("request %d: %d tokens after position %d are missing", generation.id, count, len(generation.tokens))
        self._metrics.lost_tokens.inc(count)
        self._drop(generation)
        self._fail(generation, ApiError(500, f"{count} tokens of the answer were lost", code="tokens_lost"))

    def _on_rejected(self, rejected: Rejected) -> None:
        generation = self._live.get(rejected.id)
        if generation is not None:
            self._fail(
                generation,
                ApiError(
                    rejected.status,
                    rejected.message,
                    code=rejected.code,
                    param=rejected.param or None,
                    retry_after_s=rejected.retry_after_s,
                ),
            )
            if rejected.code == "queue_full":
                self.door.close(rejected.retry_after_s)

    def _on_finished(self, finished: Finished) -> None:
        stopped = self._stopping.get(finished.id)
        if stopped is not None:
            self._settle(stopped, finished)
            return
        generation = self._live.get(finished.id)
        if generation is None:
            return
        missing = finished.num_output_tokens - len(generation.tokens)
        if missing > 0:
            self._lost(generation, missing)
        else:
            self._finish(generation, finished)

    def _settle(self, generation: Generation, finished: Finished | None) -> None:
        """A stopped generation's costs are known (or never will be)."""
        self._stopping.pop(generation.id, None)
        generation.finished = finished or Finished(generation.id, RequestStatus.STOPPED)
        if generation.released:
            self._metrics.generation_over(generation, self._clock())
        else:
            generation.touch()

    def _finish(self, generation: Generation, finished: Finished) -> None:
        self._forget(generation)
        if finished.status in (RequestStatus.ERROR, RequestStatus.ABORTED, RequestStatus.IGNORED):
            name = finished.status.name.lower()
            message = finished.message or f"The request was ended by the scheduler ({name})"
            generation.error = ended(finished.code or name, message)
        else:
            generation.finished = finished
        generation.touch()

    def _fail(self, generation: Generation, error: ApiError) -> None:
        self._forget(generation)
        if not generation.over:
            generation.error = error
            generation.touch()
