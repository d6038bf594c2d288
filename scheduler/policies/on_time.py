"""Serve first what can still be on time; what is late is served just before it has to be, so that it ends too.

First come, first served makes everybody late as soon as more comes than can be served. To maximise how many are on
time, leave out the longest of those that can't all be (Moore & Hodgson, 1968), and put off what is late as long as it
may wait (`scheduler.policies.late`). Without an objective the queue is first come, first served.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.messages import RequestStatus
from scheduler.policies.late import Late
from scheduler.policies.queue import Fcfs, QueueOptions
from scheduler.request import Request

MOST_JUDGED = 512
"""Fresh waiters whose feasibility is worked out in one pass: the cost of a pass doesn't grow with the queue."""


@dataclass(frozen=True, slots=True)
class Job:
    """Something to be done by `due_ns`; `tokens` are left to compute."""

    due_ns: int
    tokens: int


def feasible(jobs: Sequence[Job], start_ns: float, token_ns: float) -> list[bool]:
    """Which jobs to keep so that as many as possible end in time, one after the other from `start_ns`.

    `jobs` are in order of their due times. Whenever the next one would be late, the longest so far is left out
    (Moore & Hodgson 1968: optimal for one machine); of equals the one due first, so that those left have more time for
    what else may come. O(n log n).
    """
    kept = [True] * len(jobs)
    longest: list[tuple[int, int]] = []
    now = start_ns
    for index, job in enumerate(jobs):
        heapq.heappush(longest, (-job.tokens, index))
        now += job.tokens * token_ns
        while longest and now > job.due_ns:
            tokens, out = heapq.heappop(longest)
            now += tokens * token_ns
            kept[out] = False
    return kept


class OnTime(Fcfs):
    """First-come order of arrival underneath; who is fresh, late or resumed is told from it at each pass."""

    name = "on-time"

    def __init__(self, options: QueueOptions | None = None) -> None:
        super().__init__(options)
        self.ttft_ns = int(self.options.slo_ttft_s * 1e9)
        self.late = Late(
            int(self.options.grace_s * 1e9), self.options.patience, self.options.ahead, self.options.most_late
        )

    def push(self, request: Request) -> None:
        super().push(request)
        if self.ttft_ns and not request.first_admitted_ns:
            self.late.arrived(request)

    def restore(self, request: Request) -> None:
        super().restore(request)
        if self.ttft_ns and not request.first_admitted_ns:
            self.late.arrived(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        if self.ttft_ns:
            self.late.left(request)

    def finished(self, request: Request) -> None:
        if self.ttft_ns:
            self.late.work.learn(request.num_prompt, max(request.num_cached, 0), request.num_outputs)

    def due_ns(self, request: Request) -> int:
        """When the request's first token is due."""
        return request.arrival_ns + self.ttft_ns

    def resumed(self) -> list[Request]:
        """Those that ran before, in their order; they stand at the front."""
        found = []
        for request in self._queue.values():
            if request.status != RequestStatus.PREEMPTED:
                break
            found.append(request)
        return found

    def overdue(self, now_ns: int) -> Iterator[Request]:
        """Those whose first token can't be on time any more, oldest first."""
        for request in self._queue.values():
            if request.status == RequestStatus.PREEMPTED:
                continue
            if self.due_ns(request) > now_ns:
                return
            yield request

    def fresh(self, now_ns: int) -> list[Request]:
        """Those whose first token isn't due yet, the first `MOST_JUDGED` of the latest, in order of arrival."""
        found: list[Request] = []
        for request in reversed(self._queue.values()):
            if self.due_ns(request) <= now_ns or request.status == RequestStatus.PREEMPTED:
                break
            found.append(request)
            if len(found) == MOST_JUDGED:
                break
        found.reverse()
        return found
