"""The scheduler process: links, handshakes, epochs and leases around one Scheduler object.

The loop is the idea: take in what has arrived, keep the pipeline full, tell the APIs, and wait.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from protocol import wire
from protocol.channels import ChannelError, ClientChannel, ServerChannel, new_instance
from protocol.columns import i32, u64
from protocol.messages import (
    Abort,
    ApiToScheduler,
    Control,
    ControlReply,
    Extend,
    Goodbye,
    GrammarStatus,
    Heartbeat,
    Hello,
    KvStatus,
    Limits,
    Refused,
    RunnerToScheduler,
    SchedulerStatus,
    StepResult,
    Submit,
    Welcome,
)
from protocol.process import EXIT_REPLACED, StopSignal
from scheduler.config import SchedulerConfig
from scheduler.interface import Scheduler
from scheduler.metrics import Metrics

log = logging.getLogger("triptych.scheduler")

TICK_MS = 200
STATUS_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 10.0

EXIT_OK = 0
EXIT_REFUSED = 3


class Stopped(Exception):
    """The process has to end: `code` is its exit status, the text says why."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def load_scheduler_class(name: str) -> type[Scheduler]:
    """The class at `package.module:Class`. Raises ValueError that says what is wrong with it."""
    module_name, _, class_name = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"scheduler_cls {name!r}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Scheduler)):
        raise ValueError(f"scheduler_cls {name!r} is not a subclass of scheduler.interface.Scheduler")
    return cls


@dataclass(slots=True)
class _Runner:
    """What is known about the runner behind the link."""

    limits: Limits | None = None
    instance: str = ""
    epoch: int = 0
    last_result: float = 0.0
    busy_since: float = 0.0
    refused_since: float = 0.0
    sent: dict[int, float] = field(default_factory=dict)


class SchedulerProcess:
    """Runs one scheduler until it is told to stop, fenced or refused."""

    def __init__(
        self,
        config: SchedulerConfig,
        context: zmq.Context[Any],
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.instance = new_instance()
        self.metrics = metrics
        self.core: Scheduler | None = None
        self._cls = load_scheduler_class(config.scheduler_cls)
        self._clock = clock
        self._runner = _Runner()
        self._peers: dict[bytes, int] = {}
        self._identities: dict[int, bytes] = {}
        self._next_peer = 0
        self._backlog: list[tuple[bytes, Submit | Extend | Abort]] = []
        self._last_status = self._last_check = clock()
        self._last_line = clock()
        self._line_base = (0, 0)
        self._work_since = 0.0
        self.apis: ServerChannel[Any] = ServerChannel(context, config.scheduler_address, ApiToScheduler, clock=clock)
        self.runner: ClientChannel[Any] = ClientChannel(
            context,
            config.runner_address,
            RunnerToScheduler,
            self._hello,
            silence_s=config.runner_silence_s,
            clock=clock,
        )

    def _hello(self) -> Hello:
        return Hello(
            "scheduler",
            wire.PROTOCOL_VERSION,
            wire.SCHEMA_DIGEST,
            self.instance,
            self._runner.epoch,
            self.config.takeover,
        )

    # --- the loop -------------------------------------------------------------------------------------------

    def run(self, stop: StopSignal) -> int:
        """Serve until `stop`; returns the exit status."""
        poller = zmq.Poller()
        poller.register(self.apis.socket, zmq.POLLIN)
        poller.register(self.runner.socket, zmq.POLLIN)
        poller.register(stop.fileno(), zmq.POLLIN)
        self._tick()
        try:
            while not stop.requested:
                poller.poll(TICK_MS)
                self._hear_runner()
                self._hear_apis()
                self._fill_pipeline()
                self._tell_apis()
                self._tick()
            self._leave("shutdown", "the scheduler was asked to stop")
            return EXIT_OK
        except Stopped as end:
            log.error("%s", end)
            self._leave("takeover" if end.code == EXIT_REPLACED else "shutdown", str(end))
            return end.code

    def _leave(self, code: str, why: str) -> None:
        self.runner.leave(Goodbye(code, why))
        for identity in self.apis.peers:
            self.apis.drop(identity, Goodbye(code, why))

    def close(self) -> None:
        """Close both links. Idempotent."""
        self.apis.close()
        self.runner.close()

    def _fill_pipeline(self) -> None:
        """Send steps until enough are in flight or there is nothing to compute."""
        core = self.core
        if core is None or not self.runner.connected:
            return
        while core.in_flight < core.config.pipeline_depth:
            began = time.perf_counter()
            step = core.schedule()
            if step is None:
                break
            self.metrics.observe_pass(time.perf_counter() - began)
            self._runner.sent[step.step_id] = self._clock()
            self.runner.send(step)
            self._send_orders(core)
        self._send_orders(core)

    def _send_orders(self, core: Scheduler) -> None:
        """What a pass orders follows its step: that step says who has left the pages that a transfer is to fill."""
        for order in core.take_orders():
            self.runner.send(order)

    def _tell_apis(self) -> None:
        """One message to each API that has anything to hear. One that can't take it is dropped: it will come back."""
        if self.core is None:
            return
        for peer, outputs in self.core.take_outputs():
            identity = self._identities.get(peer)
            if identity is None:
                continue
            try:
                self.apis.send(identity, outputs)
            except ChannelError as error:
                self._drop(identity, "unreachable", str(error))

    @property
    def _core(self) -> Scheduler:
        """The scheduler object; it exists once a runner has welcomed this process."""
        assert self.core is not None
        return self.core

    # --- the runner's side ----------------------------------------------------------------------------------

    def _hear_runner(self) -> None:
        for message in self.runner.receive():
            if isinstance(message, StepResult):
                self._on_result(message)
            elif isinstance(message, Heartbeat):
                busy_ms = (message.sent_ns - message.busy_since_ns) / 1e6 if message.busy_since_ns else 0.0
                self._runner.busy_since = self._clock() - busy_ms / 1000 if busy_ms else 0.0
            elif isinstance(message, GrammarStatus):
                self._core.on_grammar_status(message)
            elif isinstance(message, KvStatus):
                self._core.on_kv_status(message)
            elif isinstance(message, Welcome):
                self._on_welcome(message)
            elif isinstance(message, Refused):
                self._on_refused(message)
            elif isinstance(message, Goodbye):
                self._on_runner_goodbye(message)

    def _on_result(self, result: StepResult) -> None:
        now = self._clock()
        sent = self._runner.sent.pop(result.step_id, None)
        if sent is not None:
            self.metrics.round_trip_seconds.observe(now - sent)
        self._runner.last_result = now
        self._runner.busy_since = 0.0
        began = time.perf_counter()
        self._core.update(result)
        self.metrics.observe_update(time.perf_counter() - began)

    def _on_welcome(self, welcome: Welcome) -> None:
        """A runner is ours: whatever it held for others is void, what its pages still hold is a warm cache."""
        limits = welcome.limits
        if limits is None:
            raise Stopped(EXIT_REFUSED, "the runner's welcome has no limits")
        known = self._runner
        if known.limits is not None and limits != known.limits:
            log.warning("the runner's limits changed: %s", limits)
        self._runner = _Runner(limits, welcome.instance, welcome.epoch)
        if self.core is None:
            self.core = self._cls(self.config, limits, welcome.hash_key, clock=time.monotonic_ns)
        else:
            self.core.reset_runner(limits, welcome.hash_key)
        self.core.epoch = welcome.epoch
        hashes = welcome.inventory_hashes
        self.core.adopt_inventory(
            i32(welcome.inventory_blocks).tolist(), [hashes[i : i + 16] for i in range(0, len(hashes), 16)]
        )
        log.info(
            "epoch %d on runner %s: %s, %d blocks of %d tokens (%d warm), context %d",
            welcome.epoch, welcome.instance, limits.model, limits.num_blocks - 1, limits.block_size,
            len(hashes) // 16, limits.max_model_len,
        )  # fmt: skip
        backlog, self._backlog = self._backlog, []
        for identity, message in backlog:
            self._on_api_request(identity, message)
        self._send_status()

    def _on_refused(self, refused: Refused) -> None:
        """Another scheduler holds the runner: wait for its lease to end, then give up. Anything else is final."""
        if refused.code != wire.OCCUPIED:
            if refused.code == wire.BAD_FRAME:
                log.error("the runner could not read a frame: %s", refused.message)
                return
            raise Stopped(EXIT_REFUSED, f"the runner refuses this scheduler ({refused.code}): {refused.message}")
        now = self._clock()
        if not self._runner.refused_since:
            self._runner.refused_since = now
            log.warning("%s; waiting %.0f s for its lease to end", refused.message, self.config.lease_s)
        elif now - self._runner.refused_since > self.config.lease_s + 2:
            raise Stopped(EXIT_REFUSED, f"{refused.message}; start with --takeover to replace it")

    def _on_runner_goodbye(self, goodbye: Goodbye) -> None:
        if goodbye.code in ("fenced", "takeover"):
            raise Stopped(EXIT_REPLACED, f"another scheduler has taken over: {goodbye.message}")
        log.warning("the runner left (%s): requests wait for the next one", goodbye.message or goodbye.code)
        self._send_status()

    # --- the APIs' side -------------------------------------------------------------------------------------

    def _hear_apis(self) -> None:
        for identity, message in self.apis.receive():
            if isinstance(message, Submit | Extend | Abort):
                self._on_api_request(identity, message)
            elif isinstance(message, Control):
                self._on_control(identity, message)
            elif isinstance(message, Hello):
                self._on_api_hello(identity, message)
            elif isinstance(message, Goodbye):
                self._drop(identity, "goodbye", message.message or message.code)

    def _on_api_hello(self, identity: bytes, hello: Hello) -> None:
        if hello.role not in ("api", "ctl"):
            self.apis.refuse(identity, Refused("wrong_role", f"this is a scheduler: {hello.role!r} is not api or ctl"))
            return
        if identity in self._peers:
            self._drop(identity, "new session", "the API shook hands again")
        self._next_peer += 1
        self._peers[identity] = self._next_peer
        self._identities[self._next_peer] = identity
        try:
            self.apis.welcome(
                identity,
                Welcome(
                    "scheduler",
                    wire.PROTOCOL_VERSION,
                    wire.SCHEMA_DIGEST,
                    self.instance,
                    self._runner.epoch,
                    self._runner.limits,
                    lease_ms=int(self.config.lease_s * 1000),
                ),
            )
        except ChannelError as error:
            self._drop(identity, "unreachable", str(error))
            return
        if hello.role == "api":
            log.info("API %s connected", hello.instance)

    def _on_control(self, identity: bytes, message: Control) -> None:
        """Answer an order. Before a runner has come there is nothing to give orders to."""
        if self.core is None:
            reply = ControlReply(message.nonce, False, b'{"code": "not_ready", "message": "no runner has come yet"}')
        else:
            reply = self.core.control(message)
        try:
            self.apis.send(identity, reply)
        except ChannelError as error:
            self._drop(identity, "unreachable", str(error))

    def _on_api_request(self, identity: bytes, message: Submit | Extend | Abort) -> None:
        if self.core is None:
            self._backlog.append((identity, message))
            return
        peer = self._peers.get(identity)
        if peer is None:
            return
        if not self.core.has_requests:
            self._work_since = self._clock()
        if isinstance(message, Submit):
            self.core.add(peer, message)
        elif isinstance(message, Extend):
            self.core.extend(peer, message)
        else:
            whole = len(message.ids) // 8 * 8  # what an API sends must not end this process, whatever it is
            self.core.abort(peer, u64(message.ids[:whole]).tolist())

    def _drop(self, identity: bytes, code: str, why: str) -> None:
        """End an API's session and everything it asked for."""
        peer = self._peers.pop(identity, None)
        if peer is None:
            return
        hello = self.apis.peer(identity)
        self.apis.drop(identity, Goodbye(code, why))
        del self._identities[peer]
        self._backlog = [entry for entry in self._backlog if entry[0] != identity]
        ended = self.core.drop_peer(peer) if self.core else 0
        if hello is None or hello.role == "api":
            log.info("API %s left (%s: %s), %d requests ended", hello.instance if hello else "?", code, why, ended)

    # --- what time asks for ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.runner.tick():
            log.error("the runner has been silent for over %.1f s: it counts as gone", self.config.runner_silence_s)
        now = self._clock()
        if now - self._last_status < STATUS_INTERVAL_S:
            return
        self._last_status = now
        if self.core is not None:
            self.core.expire()
        for identity in self.apis.peers:
            if self.apis.silent_for(identity) > self.config.lease_s:
                self._drop(identity, "lease", f"silent for more than {self.config.lease_s:g} s")
        self._send_status()
        self._sync_metrics()
        if self.core is not None and not self.core.has_requests and now - self._last_check > CHECK_INTERVAL_S:
            self._last_check = now
            for fault in self.core.check():
                log.error("self-check: %s", fault)
        if now - self._last_line >= self.config.log_interval_s:
            self._log_line(now)

    def _send_status(self) -> None:
        status = self._status()
        for identity in self.apis.peers:
            try:
                self.apis.send(identity, status)
            except ChannelError as error:
                self._drop(identity, "unreachable", str(error))

    def _status(self) -> SchedulerStatus:
        stats = self.core.refresh_stats() if self.core else None
        return SchedulerStatus(
            epoch=self._runner.epoch,
            runner="ready" if self.runner.connected else "absent",
            running=stats.running if stats else 0,
            waiting=stats.waiting if stats else len(self._backlog),
            kv_usage=1 - stats.free_blocks / stats.usable_blocks if stats and stats.usable_blocks else 0.0,
            stalled_ms=self._stalled_ms(),
            draining=stats.draining if stats else False,
            limits=self._runner.limits,
        )

    def _stalled_ms(self) -> int:
        """How long there has been work without a step coming back."""
        if self.core is None or not self.core.has_requests:
            return 0
        return int(1000 * (self._clock() - max(self._runner.last_result, self._work_since)))

    def _sync_metrics(self) -> None:
        self.metrics.apis.set(len(self._peers))
        self.metrics.runner_up.set(1 if self.runner.connected else 0)
        self.metrics.epoch.set(self._runner.epoch)
        if self.core is not None:
            links = {"api": self.apis.stats, "runner": self.runner.stats}
            self.metrics.sync(self.core.refresh_stats(), self.core.in_flight, links)

    def _log_line(self, now: float) -> None:
        """One row that says how things stand; silent while nothing is live."""
        seconds, self._last_line = now - self._last_line, now
        if self.core is None:
            return
        stats = self.core.refresh_stats()
        done = (stats.scheduled_tokens, stats.generated_tokens)
        scheduled, generated = done[0] - self._line_base[0], done[1] - self._line_base[1]
        self._line_base = done
        if not scheduled and not self.core.has_requests:
            return
        held = stats.usable_blocks - stats.free_blocks
        queried = stats.prefix_queried_tokens
        log.info(
            "running %d, waiting %d, KV %.1f%% (%d of %d blocks), scheduled %.0f tok/s, output %.0f tok/s, "
            "prefix hits %.1f%%, preemptions %d",
            stats.running, stats.waiting, 100 * held / max(stats.usable_blocks, 1), held, stats.usable_blocks,
            scheduled / seconds, generated / seconds, 100 * stats.prefix_hit_tokens / queried if queried else 0.0,
            stats.preemptions,
        )  # fmt: skip
