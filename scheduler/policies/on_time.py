"""Serve first what can still be on time; what is late gets a share that grows with its age, so that it ends too.

First come, first served makes everybody late as soon as more comes than can be served. To maximise how many are on
time, leave out the longest of those that can't all be (Moore & Hodgson, 1968). Without an objective the queue is
first come, first served.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.messages import RequestStatus
from scheduler.policies.queue import Fcfs, QueueOptions
from scheduler.request import Request

MOST_JUDGED = 512
"""Fresh waiters whose feasibility is worked out in one pass: the cost of a pass doesn't grow with the queue."""
MEMORY_NS = 1_800_000_000_000
"""For how long a long wait counts as what this load brings with it."""


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


class Turns:
    """Makes whole steps of a share of each: what is owed adds up until it is a step (deficit round robin, Shreedhar &
    Varghese, 1995). A long prompt in few large chunks attends less than in many small ones."""

    def __init__(self) -> None:
        self._owed = 0.0

    def next(self, share: float, step: int) -> bool:
        """Whether this step, of `step` tokens, is theirs; `share` tokens of it are owed to them. 0 clears the debt."""
        self._owed = min(self._owed + share, 2.0 * step) if share else 0.0
        return share >= step or self._owed >= step

    def took(self, tokens: int) -> None:
        """They got so many tokens, in their turn or because nobody else wanted them."""
        self._owed -= tokens


class LateShare:
    """How much of the prefill the late get. Measures how long first come, first served would have made people wait.

    A waiter's turn in first-come order is when as many prompt tokens have been started as had arrived before it. The
    late get everything once the oldest has waited `patience` times the worst such wait of the last half hour, and
    `grace` more; before, less: (age / that) to the power of `urgency`, at most `most`.

    Work is conserved: at any time the late are owed the whole backlog, in whatever order. If each waits h, those that
    became late within the last h make up that backlog (Little, 1961: work = rate · time), so that fewer are late the
    longer each waits. Hence the high power: little until the bound is near.
    """

    def __init__(self, grace_ns: int, patience: float, most: float, urgency: float = 1.5) -> None:
        self._grace_ns, self._patience, self._most, self._urgency = grace_ns, patience, most, urgency
        self.turns = Turns()
        self._turns: deque[tuple[int, int]] = deque()
        self._arrived = self._started = 0
        self._worst = [0, 0]
        self._window_ns = 0

    def arrived(self, request: Request) -> None:
        """A request joins the queue for the first time."""
        self._turns.append((self._arrived, request.arrival_ns))
        self._arrived += request.num_prompt

    def started(self, request: Request) -> None:
        """It left the queue for the first time, to run or for good."""
        self._started += request.num_prompt

    def of(self, oldest: Request, now_ns: int) -> float:
        """The share of a step's prefill, 0 to 1, when `oldest` is the first of the late."""
        while self._turns and self._turns[0][0] <= self._started:
            self._worst[0] = max(self._worst[0], now_ns - self._turns.popleft()[1])
        if now_ns - self._window_ns > MEMORY_NS // 2:
            self._worst, self._window_ns = [0, self._worst[0]], now_ns
        bound = self.bound_ns
        age = now_ns - oldest.arrival_ns
        if age >= bound:
            return 1.0
        return min(self._most, float((age / bound) ** self._urgency))

    @property
    def bound_ns(self) -> int:
        """The wait beyond which the late go before everybody else."""
        return int(self._patience * max(self._worst)) + self._grace_ns


class OnTime(Fcfs):
    """First-come order of arrival underneath; who is fresh, late or resumed is told from it at each pass."""

    name = "on-time"

    def __init__(self, options: QueueOptions | None = None) -> None:
        super().__init__(options)
        self.ttft_ns = int(self.options.slo_ttft_s * 1e9)
        self.late_share = LateShare(
            int(self.options.grace_s * 1e9), self.options.patience, self.options.most_late, self.options.urgency
        )

    def push(self, request: Request) -> None:
        super().push(request)
        if not request.first_admitted_ns:
            self.late_share.arrived(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        if not request.first_admitted_ns:
            self.late_share.started(request)

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

    def late(self, now_ns: int) -> Iterator[Request]:
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
