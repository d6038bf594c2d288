"""One runner and the Scheduler object that commands it: the pipeline between them, what is measured and logged of it.

A scheduler process has one of these, or several that know nothing of each other (`scheduler.dispatch`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.columns import i32
from protocol.messages import GrammarStatus, Heartbeat, KvStatus, Limits, Outputs, StepResult, Welcome
from scheduler.config import SchedulerConfig
from scheduler.interface import Scheduler, Stats
from scheduler.metrics import Metrics

if TYPE_CHECKING:
    from protocol.runner_links import RunnerLink

log = logging.getLogger("triptych.scheduler")

CHECK_INTERVAL_S = 10.0
SLOWEST_TIMES = 10


@dataclass(slots=True)
class _Runner:
    """What is known about the progress of the runner behind the link."""

    last_result: float = 0.0
    busy_since: float = 0.0
    slowest_s: float = 0.0
    sent: dict[int, float] = field(default_factory=dict)


class Replica:
    """`link` is set by the process before anything is called. `core` exists once a runner has welcomed the process.

    `name` opens its log lines: empty for the only one.
    """

    link: RunnerLink

    def __init__(
        self,
        number: int,
        name: str,
        config: SchedulerConfig,
        cls: type[Scheduler],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self.config = config
        self.metrics = metrics
        self.core: Scheduler | None = None
        self.down_since: float | None = None
        """When it was first seen without its runner; None while it has one."""
        self._name = name
        self._cls = cls
        self._clock = clock
        self.on_welcomed: Callable[[Replica, bool, bool], None] = lambda replica, new, warm: None
        """Called after a welcome: whether `core` has just been made, and whether the runner's cache is warm."""
        self._runner = _Runner()
        self._work_since = 0.0
        self._last_check = self._last_line = clock()
        self._line_base = (0, 0)

    @property
    def up(self) -> bool:
        """Whether its runner takes steps."""
        return self.core is not None and self.link.up

    def get_core(self) -> Scheduler:
        """The scheduler object, of a replica that has had a runner."""
        assert self.core is not None
        return self.core

    def begin_work(self) -> None:
        """A request is about to come."""
        if not self.get_core().has_requests:
            self._work_since = self._clock()

    def work(self) -> list[tuple[int, Outputs]]:
        """Send steps until enough are in flight or there is nothing to compute; what the APIs are to be told."""
        core = self.core
        if core is None:
            return []
        if self.link.up:
            self._fill_pipeline(core)
        return core.take_outputs()

    def _fill_pipeline(self, core: Scheduler) -> None:
        channel = self.link.channel
        while core.in_flight < core.config.pipeline_depth:
            began = time.perf_counter()
            step = core.schedule()
            if step is None:
                break
            self.metrics.observe_pass(time.perf_counter() - began)
            self._runner.sent[step.step_id] = self._clock()
            channel.send(step)
            self._send_orders(core)
        self._send_orders(core)

    def _send_orders(self, core: Scheduler) -> None:
        """What a pass orders follows its step: that step says who has left the pages that a transfer is to fill."""
        for order in core.take_orders():
            self.link.channel.send(order)

    def _clock_ns(self) -> int:
        return int(self._clock() * 1e9)

    # --- the runner's side ----------------------------------------------------------------------------------

    def on_runner(self, message: StepResult | GrammarStatus | KvStatus | Heartbeat) -> None:
        """Results, progress, and answers to orders."""
        if isinstance(message, StepResult):
            self._on_result(message)
        elif isinstance(message, Heartbeat):
            busy_ms = (message.sent_ns - message.busy_since_ns) / 1e6 if message.busy_since_ns else 0.0
            self._runner.busy_since = self._clock() - busy_ms / 1000 if busy_ms else 0.0
        elif isinstance(message, GrammarStatus):
            self.get_core().on_grammar_status(message)
        else:
            self.get_core().on_kv_status(message)

    def _on_result(self, result: StepResult) -> None:
        now = self._clock()
        sent = self._runner.sent.pop(result.step_id, None)
        if sent is not None:
            self.metrics.observe_round_trip(now - sent)
        self._runner.last_result = now
        self._runner.slowest_s = max(self._runner.slowest_s, result.execute_ns / 1e9)
        self._runner.busy_since = 0.0
        began = time.perf_counter()
        try:
            self.get_core().update(result)
        except Exception:  # it may be applied in part: only what the APIs have been told counts from here on
            step = result.step_id
            log.exception("%sstep %d: its result can't be applied, starting over with the runner", self._name, step)
            self.link.rejoin(f"the result of step {step} can't be applied")
        self.metrics.observe_update(time.perf_counter() - began)

    def on_welcome(self, welcome: Welcome, limits: Limits) -> None:
        """A new epoch. What the runner's pages still hold is a warm cache."""
        self._runner = _Runner()
        self.down_since = None
        new = self.core is None
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
            "%sepoch %d on runner %s: %s, %d blocks of %d tokens (%d warm), context %d",
            self._name, welcome.epoch, welcome.instance, limits.model, limits.num_blocks - 1, limits.block_size,
            len(hashes) // 16, limits.max_model_len,
        )  # fmt: skip
        self.on_welcomed(self, new, bool(hashes))

    # --- what time asks for ---------------------------------------------------------------------------------

    def keep_time(self, now: float) -> Stats | None:
        """End what has waited too long, check an idle core, log a line if it is time; how things stand."""
        core = self.core
        self._watch_step(now)
        if self.link.up:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now
        self.metrics.runner_up.set(1 if self.link.up else 0)
        self.metrics.runner_stuck.set(1 if self.link.state == "stuck" else 0)
        self.metrics.epoch.set(self.link.epoch)
        if core is None:
            return None
        core.expire()
        if not core.has_requests and now - self._last_check > CHECK_INTERVAL_S:
            self._last_check = now
            for fault in core.check():
                log.error("%sself-check: %s", self._name, fault)
        stats = core.refresh_stats()
        self.metrics.sync(stats, core.in_flight, {"runner": self.link.channel.stats})
        if now - self._last_line >= self.config.log_interval_s:
            self._log_line(now, stats)
        return stats

    def _watch_step(self, now: float) -> None:
        """A runner whose step never comes to an end is as good as dead, although it sends heartbeats."""
        state, allowed = self._runner, self.config.step_deadline_s
        if not allowed or not state.busy_since or not self.link.up:
            return
        busy_s = now - state.busy_since
        if busy_s > max(allowed, SLOWEST_TIMES * state.slowest_s):
            self.link.give_up(f"its step has not returned for {busy_s:.1f} s (step_deadline_s {allowed:g})")
            state.busy_since = 0.0

    def stalled_ms(self) -> int:
        """How long there has been work without a step coming back."""
        if self.core is None or not self.core.has_requests:
            return 0
        return int(1000 * (self._clock() - max(self._runner.last_result, self._work_since)))

    def _log_line(self, now: float, stats: Stats) -> None:
        """One row that says how things stand; silent while nothing is live."""
        seconds, self._last_line = now - self._last_line, now
        done = (stats.scheduled_tokens, stats.generated_tokens)
        scheduled, generated = done[0] - self._line_base[0], done[1] - self._line_base[1]
        self._line_base = done
        if not scheduled and not self.get_core().has_requests:
            return
        held = stats.usable_blocks - stats.free_blocks
        queried = stats.prefix_queried_tokens
        log.info(
            "%srunning %d, waiting %d, KV %.1f%% (%d of %d blocks), scheduled %.0f tok/s, output %.0f tok/s, "
            "prefix hits %.1f%%, preemptions %d",
            self._name, stats.running, stats.waiting, 100 * held / max(stats.usable_blocks, 1), held,
            stats.usable_blocks, scheduled / seconds, generated / seconds,
            100 * stats.prefix_hit_tokens / queried if queried else 0.0, stats.preemptions,
        )  # fmt: skip
