"""A scheduler class that changes one decision: the newest request that waits is the next one to run."""

from __future__ import annotations

from dataclasses import replace

from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler
from scheduler.policies.queue import Fcfs
from scheduler.presets import Strategies
from scheduler.request import Request


class NewestFirstQueue(Fcfs):
    """Last come, first served; a preempted request still goes to the front."""

    name = "newest-first"

    def push(self, request: Request) -> None:
        self.restore(request)


class NewestFirst(CoreScheduler):
    """Everything as in CoreScheduler, but for the queue."""

    def choose_strategies(self, config: SchedulerConfig, block_size: int) -> Strategies:
        return replace(super().choose_strategies(config, block_size), queue=NewestFirstQueue())
