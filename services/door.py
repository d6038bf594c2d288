"""Whether the scheduler's queue is full, as far as this API process knows: what would be refused there is refused here.

Only what is certain is refused; the scheduler decides about the rest. It knows nothing of HTTP and reads no body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from protocol.messages import SchedulerStatus
from services.chain import Chain
from services.errors import RETRY_AFTER_S, ApiError

NEWS_S = 1.0
"""How long what the scheduler last said counts: two of its status periods."""


class Door:
    """Follows this process's requests that wait for their first token, and what the scheduler says of its queue."""

    def __init__(self, chain: Chain, clock: Callable[[], float]) -> None:
        self._chain = chain
        self._clock = clock
        self._waiting: dict[int, int] = {}
        self._priorities: Counter[int] = Counter()
        self._since_report = 0
        """Submitted here since then, less those that have left: the report doesn't know them."""
        self._full_at: float | None = None
        self._retry_after_s = RETRY_AFTER_S

    @property
    def waiting(self) -> int:
        """Requests of this process without a first token, those on their way to the scheduler included."""
        return len(self._waiting)

    def enter(self, request_id: int, priority: int) -> None:
        """A request is submitted."""
        self._waiting[request_id] = priority
        self._priorities[priority] += 1
        self._since_report += 1

    def leave(self, request_id: int) -> None:
        """A request has its first token, or has ended: there may be room."""
        self._full_at = None
        priority = self._waiting.pop(request_id, None)
        if priority is not None:
            self._since_report -= 1
            self._priorities[priority] -= 1
            if not self._priorities[priority]:
                del self._priorities[priority]

    def close(self, retry_after_s: int) -> None:
        """The scheduler has refused a request because its queue is full. What it asked for is asked for here too. Of
        several replicas' queues only one was: that says nothing of the next request."""
        self._retry_after_s = retry_after_s or RETRY_AFTER_S
        status = self._chain.status
        if status is None or status.replicas == 1:
            self._full_at = self._clock()

    def hear(self, status: SchedulerStatus) -> None:
        """The scheduler has reported: this also counts what its other APIs have submitted."""
        self._since_report = 0
        full = 0 < status.queue_limit <= status.queued
        self._full_at = self._clock() if full else None

    def refusal(self, priority: int | None = None) -> ApiError | None:
        """The 503 for a request that the scheduler would refuse now. Without a priority, only if none would help."""
        status = self._chain.status
        if status is None or not self._chain.connected or status.draining or not self._full(status):
            return None
        if status.displaces and (priority is None or priority < self._least_urgent(status)):
            return None
        text = f"The queue is full: {status.queue_limit} requests may wait; retry later"
        return ApiError(503, text, code="queue_full", retry_after_s=self._retry_after_s)

    def _full(self, status: SchedulerStatus) -> bool:
        """The scheduler has just said so, or what was sent since fills the queue even if a whole batch has left it."""
        if self._full_at is not None and self._clock() - self._full_at < NEWS_S:
            return True
        limits = self._chain.limits
        left = limits.max_num_seqs * max(1, status.replicas_up) if limits is not None else 0
        return 0 < status.queue_limit <= status.queued + self._since_report - left

    def _least_urgent(self, status: SchedulerStatus) -> int:
        """The highest priority that is known to wait, here or elsewhere."""
        known = [*self._priorities, *([status.least_urgent] if status.queued else [])]
        return max(known, default=0)
