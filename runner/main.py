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

import zmq

from protocol.channels import AddressError
from protocol.exposition import ExpositionError, serve_metrics
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
from runner.executor import Closing, Executor
from runner.link import SchedulerLink
from runner.loop import loop_for
from runner.metrics import RunnerMetrics
from runner.parallel.place import place_from_environment
from runner.step_log import StepLog
from runner.watch import StepWatch

log = logging.getLogger("triptych.runner")

HASH_KEY_BYTES = 32


def build_executor(config: RunnerConfig) -> Executor:
    """The executor that the settings ask for, loaded and ready. StartError says why it can't be."""
    if config.backend == "sim":
        from runner.sim import SimulatedExecutor

        return SimulatedExecutor(config)
    if config.tensor_parallel_size > 1:
        from runner.parallel.start import start_ranks

        return start_ranks(config)
    if config.device == "cuda":
        from runner.cuda.load import load_device_executor

        return load_device_executor(config)
    from runner.model_executor import load_executor  # imports torch

    return load_executor(config)


def run(config: RunnerConfig, build: Callable[[RunnerConfig], Executor] = build_executor) -> int:
    """Serve what `build` makes until SIGTERM or SIGINT. Exit code: 0 after an orderly stop, 1 if it could not start, 5
    if a step hung."""
    setup_logging("runner", config.log_level)
    die_with_parent()
    try:
        place = place_from_environment(config)
    except StartError as error:
        log.error("can't start: %s", error)
        return 1
    if place is not None and place.rank > 0:
        from runner.parallel.worker import run_started_together

        return run_started_together(config, place)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with StopSignal() as stop:
        try:
            ensure_private_dir(config.runtime_dir)
            began = time.monotonic()
            executor = build(config)
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
                loop_for(executor)(link, executor, metrics, config.log_interval_s, steps, watch=watch).run()
        except ExpositionError as error:
            log.error("can't start: %s", error)
            return 1
        finally:
            link.close()
            if isinstance(executor, Closing):
                executor.close()
            context.term()
    # Only a broken link ends the loop without a request to stop.
    return 0 if stop.requested else 1
