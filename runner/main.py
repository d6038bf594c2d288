"""The runner process: load, bind, then execute steps one after the other until told to stop.

The main thread computes; the link's thread talks. Nothing is bound before the weights are there, so whoever can
connect can also be served.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable

import msgspec
import zmq

from protocol.channels import AddressError
from protocol.exposition import ExpositionError, serve_metrics
from protocol.messages import StepResult
from protocol.process import (
    EXIT_STUCK,
    PrivateDirError,
    StopSignal,
    Watchdog,
    die_with_parent,
    ensure_private_dir,
    setup_logging,
)
from protocol.security import LinkSecurity, SecurityError
from runner.config import RunnerConfig
from runner.errors import StartError
from runner.executor import Executor
from runner.link import Grant, Item, SchedulerLink, Transfer, Work
from runner.metrics import RunnerMetrics
from runner.step_log import StepLog
from runner.watch import StepWatch

log = logging.getLogger("triptych.runner")

HASH_KEY_BYTES = 32


def build_executor(config: RunnerConfig) -> Executor:
    """The executor that the settings ask for, loaded and ready. StartError says why it can't be."""
    if config.backend == "sim":
        from runner.sim import SimulatedExecutor

        return SimulatedExecutor(config)
    from runner.model_executor import load_executor  # imports torch

    return load_executor(config)


class Loop:
    """Takes what the link hands over, in order: steps are executed, a new scheduler gets a clean batch."""

    def __init__(
        self,
        link: SchedulerLink,
        executor: Executor,
        metrics: RunnerMetrics,
        log_interval_s: float,
        steps: StepLog | None = None,
        *,
        watch: StepWatch | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._link = link
        self._executor = executor
        self._metrics = metrics
        self._steps = steps
        self._watch = watch
        self._log_interval_s = log_interval_s
        self._clock_ns = clock_ns
        self._last_log_ns = self._idle_since_ns = clock_ns()

    def run(self) -> None:
        """Until the link ends."""
        while (item := self._link.next()) is not None:
            self.do(item)

    def do(self, item: Item) -> None:
        """One thing, unless the scheduler that sent it holds the runner no more."""
        if not self._link.is_current(item):
            return
        if isinstance(item, Grant):
            self._executor.clear()
            self._link.grant(item, self._executor.inventory.export())
        elif isinstance(item, Transfer):
            self._executor.transfer(item.order, item.status)
        else:
            self._execute(item)

    def _execute(self, work: Work) -> None:
        started = self._clock_ns()
        self._link.busy_since_ns = time.time_ns()
        result = self._executor.execute(work.step, work.received_ns)
        ended = self._clock_ns()
        self._link.busy_since_ns = 0
        if self._watch is not None:
            self._watch.slowest_s = max(self._watch.slowest_s, (ended - started) / 1e9)
        result = msgspec.structs.replace(
            result,
            queue_ns=started - work.received_ns,
            execute_ns=ended - started,
            idle_ns=max(0, min(work.received_ns, started) - self._idle_since_ns),
        )
        self._link.reply(work, result)
        self._idle_since_ns = ended
        self._observe(work, result, ended)

    def _observe(self, work: Work, result: StepResult, ended_ns: int) -> None:
        try:
            if self._steps is not None and result.failure is None:
                self._steps.add(self._executor.step_size, result, ended_ns)
            self._metrics.step_done(work.step, result, self._executor.num_residents, len(self._executor.inventory))
            seconds = (ended_ns - self._last_log_ns) / 1e9
            if self._log_interval_s and seconds >= self._log_interval_s:
                self._metrics.log_line(seconds)
                self._last_log_ns = ended_ns
        except Exception:
            log.exception("metrics of step %d", work.step.step_id)  # counting must never end computing


def run(config: RunnerConfig) -> int:
    """Serve until SIGTERM or SIGINT. Exit code: 0 after an orderly stop, 1 if it could not start, 5 if a step hung."""
    setup_logging("runner", config.log_level)
    die_with_parent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with StopSignal() as stop:
        try:
            ensure_private_dir(config.runtime_dir)
            began = time.monotonic()
            executor = build_executor(config)
            metrics = RunnerMetrics(executor.limits)
            metrics.loaded(time.monotonic() - began, executor.weight_bytes)
            watch = StepWatch(config.step_deadline_s, Watchdog.from_environment().beat, lambda: os._exit(EXIT_STUCK))
            link = SchedulerLink(
                context,
                config.address,
                executor.limits,
                hash_key=secrets.token_bytes(HASH_KEY_BYTES),
                answer=executor.answer,
                lease_s=config.lease_s,
                stop_fd=stop.fileno(),
                on_beat=watch.turn,
                security=LinkSecurity.of(config.curve_key_file, config.allow_insecure_bind),
            )
        except (StartError, AddressError, SecurityError, PrivateDirError) as error:
            log.error("can't start: %s", error)
            context.term()
            return 1
        try:
            metrics.watch(link)
            steps = StepLog(executor.limits)
            with serve_metrics(
                metrics.registry,
                unix_path=config.metrics_path,
                host=config.metrics_host,
                port=config.metrics_port,
                pages={"/steps": steps.page},
            ):
                link.start()
                watch.turn(0)  # from now on a hang is noticed: the link's first beat comes half a second later
                limits = executor.limits
                log.info(
                    "ready at %s: %s (%s), %d blocks of %d tokens, up to %d tokens a request",
                    *(link.address, limits.model, limits.dtype),
                    *(limits.num_blocks - 1, limits.block_size, limits.max_model_len),
                )
                Loop(link, executor, metrics, config.log_interval_s, steps, watch=watch).run()
        except ExpositionError as error:
            log.error("can't start: %s", error)
            return 1
        finally:
            link.close()
            context.term()
    # Only a broken link ends the loop without a request to stop.
    return 0 if stop.requested else 1
