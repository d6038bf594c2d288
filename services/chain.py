"""What this API process knows about the processes behind it: is the chain alive, and what does the model allow.

Answers /health and /ready, and decides when waiting for an absent scheduler or runner has been long enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol.channels import ClientChannel
from protocol.messages import Limits, SchedulerStatus
from services.config import ApiConfig
from services.errors import ApiError, unavailable

RETRY_AFTER_S = 5


class Chain:
    """The state of scheduler and runner as seen through one link."""

    def __init__(self, config: ApiConfig, channel: ClientChannel[Any], clock: Callable[[], float]) -> None:
        self.limits: Limits | None = None
        self.status: SchedulerStatus | None = None
        self.refusal: ApiError | None = None
        self._config = config
        self._channel = channel
        self._clock = clock
        self._away_since: float | None = clock()
        self._waiters: set[asyncio.Future[None]] = set()

    def update(self, status: SchedulerStatus | None, limits: Limits | None) -> None:
        """Take in a report, or its absence after a new handshake."""
        self.status = status
        if limits is not None:
            self.limits = limits
        self.observe()

    def observe(self) -> None:
        """Look at the link again; call it regularly and after every change."""
        if self.ready:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = self._clock()
        if self.ready or self.given_up:
            self._wake()

    def refuse(self, error: ApiError) -> None:
        """From now on nobody may wait for the chain or begin anything with it."""
        self.refusal = error
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def ready(self) -> bool:
        """True while a scheduler with a working runner is on the line."""
        return (
            self._channel.connected
            and self.limits is not None
            and self.status is not None
            and self.status.runner == "ready"
        )

    @property
    def connected(self) -> bool:
        """True while the link to a scheduler is open."""
        return self._channel.connected

    @property
    def bounds_waiting(self) -> bool:
        """True while the scheduler ends requests that wait for too long, whatever they ask for."""
        return self.status is not None and self.status.waiting_timeout_ms > 0

    @property
    def given_up(self) -> bool:
        """True once the chain has been away for longer than requests may wait."""
        return self._away_since is not None and self._clock() - self._away_since >= self._config.engine_wait_s

    def problem(self) -> str:
        """Why the chain can't be trusted right now, or "" if it is alive."""
        silent = self._channel.silent_for
        if not self._channel.connected:
            return "no scheduler is connected"
        if silent > self._config.heartbeat_timeout_s:
            return f"the scheduler has been silent for {silent:.1f} s"
        if self.status is None:
            return "the scheduler has not reported yet"
        if self.status.runner != "ready":
            return f"the runner is {self.status.runner}"
        if self.status.stalled_ms > self._config.stall_timeout_s * 1000:
            return f"work is pending but no step has finished for {self.status.stalled_ms / 1000:.1f} s"
        return ""

    def replicas(self) -> dict[str, int]:
        """Of several runners with the same model, how many are up; empty where there is one."""
        status = self.status
        if status is None or status.replicas == 1:
            return {}
        return {"replicas": status.replicas, "replicas_up": status.replicas_up}

    def absence(self) -> ApiError:
        """The 503 for a chain that was waited for in vain."""
        return unavailable(
            f"Not available: {self.problem() or 'starting'}; waited {self._config.engine_wait_s:g} s",
            "engine_unavailable",
            RETRY_AFTER_S,
        )

    async def wait_for_limits(self) -> Limits:
        """The model's limits, as soon as they are known. Raises ApiError 503 once the chain is away for too long."""
        while True:
            if self.refusal is not None:
                raise self.refusal
            if self.given_up:
                raise self.absence()
            if self.limits is not None:
                return self.limits
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
