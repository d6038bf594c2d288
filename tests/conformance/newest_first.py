"""A scheduler class that changes one decision: the newest request that waits is the next one to run."""

from __future__ import annotations

from collections.abc import Callable

from protocol.messages import Limits
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler
from scheduler.policies.queue import Fcfs
from scheduler.request import Request


class NewestFirstQueue(Fcfs):
    """Last come, first served; a preempted request still goes to the front."""

    name = "newest-first"

    def push(self, request: Request) -> None:
        self.restore(request)


class NewestFirst(CoreScheduler):
    """Everything as in CoreScheduler, but for the queue."""

    def __init__(self, config: SchedulerConfig, limits: Limits, hash_key: bytes, *, clock: Callable[[], int]) -> None:
        super().__init__(config, limits, hash_key, clock=clock)
        self.strategies.queue = NewestFirstQueue()
