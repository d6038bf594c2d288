"""Entry point of the scheduler process: `triptych scheduler`."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import replace

import zmq
from prometheus_client import CollectorRegistry

from protocol.channels import AddressError, AddressTaken
from protocol.exposition import ExpositionError, MetricsServer, new_registry, serve_metrics
from protocol.process import (
    EXIT_REPLACED,
    StopSignal,
    Watchdog,
    die_with_parent,
    ensure_private_dir,
    setup_logging,
)
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
        runner_address=",".join(config.runner_addresses),
    )


class _Exposition:
    """The metrics' sockets: opened when the place is ours, closed before it is given up."""

    def __init__(self, config: SchedulerConfig, registry: CollectorRegistry) -> None:
        self._config = config
        self._registry = registry
        self._server: MetricsServer | None = None

    def open(self, by_force: bool = False) -> None:
        """Raises ExpositionError if another process has them."""
        self._server = serve_metrics(
            self._registry,
            unix_path=os.path.join(self._config.runtime_dir, "scheduler.metrics.sock"),
            host=self._config.metrics_host,
            port=self._config.metrics_port,
            by_force=by_force,
        )

    def take_over(self, by_force: bool) -> None:
        """Like `open`, but serving goes on without metrics if need be."""
        try:
            self.open(by_force)
        except ExpositionError as error:
            log.error("no metrics: %s", error)

    def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()


def run(config: SchedulerConfig) -> int:
    """Run until stopped; returns the exit status.

    2: can't start as configured. 3: refused by the runner. 4: another scheduler has the place, or has taken it.
    """
    setup_logging("scheduler", config.log_level)
    die_with_parent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    registry = new_registry("scheduler")
    exposition = _Exposition(config, registry)
    watchdog = Watchdog.from_environment()
    try:
        ensure_private_dir(config.runtime_dir)
        process = SchedulerProcess(
            with_addresses(config),
            context,
            Metrics.of_replicas(registry, len(config.runner_addresses)),
            on_bound=exposition.take_over,
            beat=watchdog.beat,
        )
        if process.links.apis.bound:
            exposition.open()
    except AddressTaken as taken:
        log.error("can't start: %s; start with --takeover to replace it", taken)
        context.destroy(linger=0)
        return EXIT_REPLACED
    except (AddressError, ExpositionError, OSError, ValueError) as error:
        log.error("can't start: %s", error)
        context.destroy(linger=0)
        return EXIT_CONFIG
    gc.freeze()
    watchdog.beat()  # from now on a hang is noticed: the loop's first beat comes half a second later
    try:
        with StopSignal() as stop:
            return process.run(stop)
    finally:
        exposition.close()
        process.close()
        context.term()
