"""The scheduler process: one Scheduler object between its links, and what is measured and logged of it.

Handshakes, epochs and leases are `protocol.scheduler_links`. Each turn keeps the pipeline full and tells the APIs.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from protocol.columns import i32, u64
from protocol.messages import (
    Abort,
    Control,
    ControlReply,
    Extend,
    GrammarStatus,
    Heartbeat,
    KvStatus,
    Limits,
    Outputs,
    Rejected,
    SchedulerStatus,
    StepResult,
    Submit,
    Welcome,
)
from protocol.process import StopSignal
from protocol.scheduler_links import LinkSettings, SchedulerLinks
from protocol.security import LinkSecurity
from scheduler.config import SchedulerConfig
from scheduler.interface import Scheduler
from scheduler.metrics import Metrics

log = logging.getLogger("triptych.scheduler")

CHECK_INTERVAL_S = 10.0
SLOWEST_TIMES = 10
LOGGED = "the scheduler's log has the details"


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
    """What is known about the progress of the runner behind the link."""

    last_result: float = 0.0
    busy_since: float = 0.0
    slowest_s: float = 0.0
    sent: dict[int, float] = field(default_factory=dict)


class SchedulerProcess:
    """Runs one scheduler until it is told to stop, fenced or refused."""

    def __init__(
        self,
        config: SchedulerConfig,
        context: zmq.Context[Any],
        metrics: Metrics,
        *,
        on_bound: Callable[[bool], None] = lambda by_force: None,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.core: Scheduler | None = None
        self._cls = load_scheduler_class(config.scheduler_cls)
        self._clock = clock
        self._runner = _Runner()
        self._last_check = self._last_line = clock()
        self._line_base = (0, 0)
        self._work_since = 0.0
        settings = LinkSettings(
            config.scheduler_address,
            config.runner_address,
            config.lease_s,
            config.runner_silence_s,
            config.takeover,
            LinkSecurity.of(config.curve_key_file, config.allow_insecure_bind),
        )
        self.links = SchedulerLinks(context, settings, self, on_bound=on_bound, beat=beat, clock=clock)

    def run(self, stop: StopSignal) -> int:
        """Serve until `stop`; returns the exit status."""
        return self.links.run(stop)

    def close(self) -> None:
        """Close both links. Idempotent."""
        self.links.close()

    def work(self) -> None:
        """Send steps until enough are in flight or there is nothing to compute; tell the APIs."""
        core = self.core
        if core is None:
            return
        if self.links.runner.connected:
            self._fill_pipeline(core)
        for peer, outputs in core.take_outputs():
            self.links.send(peer, outputs)

    def _fill_pipeline(self, core: Scheduler) -> None:
        while core.in_flight < core.config.pipeline_depth:
            began = time.perf_counter()
            step = core.schedule()
            if step is None:
                break
            self.metrics.observe_pass(time.perf_counter() - began)
            self._runner.sent[step.step_id] = self._clock()
            self.links.runner.send(step)
            self._send_orders(core)
        self._send_orders(core)

    def _send_orders(self, core: Scheduler) -> None:
        """What a pass orders follows its step: that step says who has left the pages that a transfer is to fill."""
        for order in core.take_orders():
            self.links.runner.send(order)

    def _clock_ns(self) -> int:
        return int(self._clock() * 1e9)

    @property
    def _core(self) -> Scheduler:
        """The scheduler object; it exists once a runner has welcomed this process."""
        assert self.core is not None
        return self.core

    # --- the runner's side ----------------------------------------------------------------------------------

    def on_runner(self, message: StepResult | GrammarStatus | KvStatus | Heartbeat) -> None:
        """Results, progress, and answers to orders."""
        if isinstance(message, StepResult):
            self._on_result(message)
        elif isinstance(message, Heartbeat):
            busy_ms = (message.sent_ns - message.busy_since_ns) / 1e6 if message.busy_since_ns else 0.0
            self._runner.busy_since = self._clock() - busy_ms / 1000 if busy_ms else 0.0
        elif isinstance(message, GrammarStatus):
            self._core.on_grammar_status(message)
        else:
            self._core.on_kv_status(message)

    def _on_result(self, result: StepResult) -> None:
        now = self._clock()
        sent = self._runner.sent.pop(result.step_id, None)
        if sent is not None:
            self.metrics.round_trip_seconds.observe(now - sent)
        self._runner.last_result = now
        self._runner.slowest_s = max(self._runner.slowest_s, result.execute_ns / 1e9)
        self._runner.busy_since = 0.0
        began = time.perf_counter()
        try:
            self._core.update(result)
        except Exception:  # it may be applied in part: only what the APIs have been told counts from here on
            log.exception("step %d: its result can't be applied, starting over with the runner", result.step_id)
            self.links.rejoin_runner(f"the result of step {result.step_id} can't be applied")
        self.metrics.observe_update(time.perf_counter() - began)

    def on_welcome(self, welcome: Welcome, limits: Limits) -> None:
        """A new epoch. What the runner's pages still hold is a warm cache."""
        self._runner = _Runner()
        if self.core is None:
            self.core = self._cls(self.config, limits, welcome.hash_key, clock=self._clock_ns)
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

    # --- the APIs' side -------------------------------------------------------------------------------------

    def on_request(self, peer: int, message: Submit | Extend | Abort | Control) -> None:
        """Hand it to the scheduler. What goes wrong with one request or order is the end of that one."""
        try:
            self._hand_over(peer, message)
        except Exception:
            core = self._core
            log.exception("%s of API %d failed", type(message).__name__, peer)
            if isinstance(message, Submit):
                core.stats.rejected["internal_error"] = core.stats.rejected.get("internal_error", 0) + 1
                rejection = Rejected(message.id, "internal_error", LOGGED, 500)
                self.links.send(peer, Outputs(core.epoch, 0, rejected=[rejection]))
            elif isinstance(message, Extend):
                core.abort(peer, [message.id])
            elif isinstance(message, Control):
                body = msgspec.json.encode({"code": "internal_error", "message": LOGGED})
                self.links.send(peer, ControlReply(message.nonce, False, body))

    def _hand_over(self, peer: int, message: Submit | Extend | Abort | Control) -> None:
        if isinstance(message, Control):  # before a runner has come there is nothing to give orders to
            body = b'{"code": "not_ready", "message": "no runner has come yet"}'
            self.links.send(peer, self.core.control(message) if self.core else ControlReply(message.nonce, False, body))
            return
        core = self._core
        if not core.has_requests:
            self._work_since = self._clock()
        if isinstance(message, Submit):
            core.add(peer, message)
        elif isinstance(message, Extend):
            core.extend(peer, message)
        else:
            whole = len(message.ids) // 8 * 8  # what an API sends must not end this process, whatever it is
            core.abort(peer, u64(message.ids[:whole]).tolist())

    def on_gone(self, peer: int) -> None:
        """End everything that an API asked for."""
        ended = self.core.drop_peer(peer) if self.core else 0
        if ended:
            log.info("%d requests ended with their API's session", ended)

    # --- what time asks for ---------------------------------------------------------------------------------

    def status(self) -> SchedulerStatus:
        """End what has waited too long, bring the metrics up to date, check an idle core; how things stand."""
        core, now = self.core, self._clock()
        self._watch_step(now)
        if core is not None:
            core.expire()
            if not core.has_requests and now - self._last_check > CHECK_INTERVAL_S:
                self._last_check = now
                for fault in core.check():
                    log.error("self-check: %s", fault)
        self._sync_metrics()
        if now - self._last_line >= self.config.log_interval_s:
            self._log_line(now)
        stats = core.refresh_stats() if core else None
        return self.links.status(
            running=stats.running if stats else 0,
            waiting=stats.waiting if stats else len(self.links.backlog),
            kv_usage=1 - stats.free_blocks / stats.usable_blocks if stats and stats.usable_blocks else 0.0,
            stalled_ms=self._stalled_ms(),
            draining=stats.draining if stats else False,
            waiting_timeout_ms=int(1000 * (core.config if core else self.config).waiting_timeout_s),
        )

    def _watch_step(self, now: float) -> None:
        """A runner whose step never comes to an end is as good as dead, although it sends heartbeats."""
        state, allowed = self._runner, self.config.step_deadline_s
        if not allowed or not state.busy_since or not self.links.runner.connected:
            return
        busy_s = now - state.busy_since
        if busy_s > max(allowed, SLOWEST_TIMES * state.slowest_s):
            self.links.give_up_runner(f"its step has not returned for {busy_s:.1f} s (step_deadline_s {allowed:g})")
            state.busy_since = 0.0

    def _stalled_ms(self) -> int:
        """How long there has been work without a step coming back."""
        if self.core is None or not self.core.has_requests:
            return 0
        return int(1000 * (self._clock() - max(self._runner.last_result, self._work_since)))

    def _sync_metrics(self) -> None:
        self.metrics.apis.set(len(self.links.peers))
        self.metrics.runner_up.set(1 if self.links.runner.connected else 0)
        self.metrics.runner_stuck.set(1 if self.links.runner_state == "stuck" else 0)
        self.metrics.epoch.set(self.links.epoch)
        if self.core is not None:
            links = {"api": self.links.apis.stats, "runner": self.links.runner.stats}
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
