"""Entry point of the scheduler process: `triptych scheduler`."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import replace

import zmq

from protocol.channels import AddressError
from protocol.exposition import ExpositionError, new_registry, serve_metrics
from protocol.process import StopSignal, die_with_parent, ensure_private_dir, setup_logging
from scheduler.config import SchedulerConfig
from scheduler.metrics import Metrics
from scheduler.process import SchedulerProcess

log = logging.getLogger("triptych.scheduler")

EXIT_CONFIG = 2


def with_addresses(config: SchedulerConfig) -> SchedulerConfig:
    """Fill in the addresses that follow from the runtime directory."""
    return replace(
        config,
        scheduler_address=config.scheduler_address or f"ipc://{config.runtime_dir}/scheduler.sock",
        runner_address=config.runner_address or f"ipc://{config.runtime_dir}/runner.sock",
    )


def run(config: SchedulerConfig) -> int:
    """Run until stopped; returns the exit status (2: can't start as configured, 3: refused by the runner)."""
    setup_logging("scheduler", config.log_level)
    die_with_parent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    registry = new_registry("scheduler")
    try:
        runtime_dir = ensure_private_dir(config.runtime_dir)
        process = SchedulerProcess(with_addresses(config), context, Metrics(registry))
        exposition = serve_metrics(
            registry,
            unix_path=os.path.join(runtime_dir, "scheduler.metrics.sock"),
            host=config.metrics_host,
            port=config.metrics_port,
        )
    except (AddressError, ExpositionError, OSError, ValueError) as error:
        log.error("can't start: %s", error)
        context.destroy(linger=0)
        return EXIT_CONFIG
    gc.freeze()
    try:
        with StopSignal() as stop:
            return process.run(stop)
    finally:
        exposition.close()
        process.close()
        context.term()
