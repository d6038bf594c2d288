"""What is late: how long it may wait, what it is owed of each step, and who has to give way to it.

Work is conserved: whatever the order, the backlog at any time is the same, and all of it but the last moment's is of
requests that are late. A late one stands in for as much of the backlog as it is work, from its arrival until it is
served. So the fewest are late if those who are have much work each and wait as long as they may: they are served just
before they have to be, and who gives way to them is whoever is the most work of those who come (by one threshold for
all who come within a minute, not the largest of each moment).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from scheduler.policies.pace import StepPace
from scheduler.policies.work import BUCKETS, ExpectedWork, bucket_of
from scheduler.request import Request

SECOND_NS = 1_000_000_000
REFRESH_NS = SECOND_NS // 4
MEMORY_NS = 1800 * SECOND_NS
"""For how long a large backlog counts as what this load brings with it."""
LEAST_LEFT_NS = 2 * SECOND_NS
"""Who is due sooner is owed no more than if it were due then; the bound itself is what keeps it."""
FLOW_NS, MOST_IN_FLOW = 60 * SECOND_NS, 2048
"""How far back arrivals count as what is to come, and how many do at most."""
GROWTH_NS = 40 * SECOND_NS
MOST_DUE = 4096
"""The late that are looked at, the oldest first: what a look costs doesn't grow with the queue."""


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


@dataclass(frozen=True, slots=True)
class Owed:
    """What the late are owed now: prompt tokens to compute per ns. Those of them that have to be served within `due_ns`
    come before every request that is more work than `largest_ns`."""

    tokens: float = 0.0
    largest_ns: float = float("inf")
    due_ns: int = 0


class Backlog:
    """The work of all who wait for the first time, how much that has been at most lately, and how fast it grows."""

    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS)
        self._tokens = np.zeros(BUCKETS)
        self._prompts: dict[int, int] = {}
        """The prompt of each who waits, as it was counted."""
        self._worst = [0.0, 0.0]
        self._window_ns = 0
        self._marks: deque[tuple[int, float]] = deque()

    def add(self, request: Request) -> None:
        """One has come."""
        self.remove(request)
        self._prompts[request.id] = request.num_prompt
        self._change(request.num_prompt, 1)

    def remove(self, request: Request) -> None:
        """One waits no longer, or has never done."""
        prompt = self._prompts.pop(request.id, None)
        if prompt is not None:
            self._change(prompt, -1)

    def _change(self, prompt: int, by: int) -> None:
        bucket = bucket_of(prompt)
        self._counts[bucket] += by
        self._tokens[bucket] += by * prompt

    def worst(self, work: ExpectedWork, costs: tuple[float, float], now_ns: int, ahead_ns: float) -> float:
        """ns of work: the most within the last half hour, or what it will be in `ahead_ns` if it goes on growing."""
        here = work.of_buckets(self._counts, self._tokens, costs)
        if now_ns - self._window_ns > MEMORY_NS // 2:
            self._worst, self._window_ns = [0.0, self._worst[0]], now_ns
        self._worst[0] = max(self._worst[0], here)
        self._marks.append((now_ns, here))
        while self._marks[0][0] < now_ns - GROWTH_NS:
            self._marks.popleft()
        since_ns, before = self._marks[0]
        growth = max(0.0, here - before) / max(now_ns - since_ns, GROWTH_NS // 4)
        return max(*self._worst, here + growth * ahead_ns)


class Late:
    """Says what the late are owed. First come, first served would have a request wait for all the work before it: the
    backlog. The late may wait `patience` times the worst such wait of the last half hour, and `grace_ns` more. Those
    for whom no more than the part `ahead` of that is left are served evenly, in the part `most` of a step at most."""

    def __init__(self, grace_ns: int, patience: float, ahead: float, most: float) -> None:
        self._grace_ns, self._patience, self._ahead, self._most = grace_ns, patience, ahead, most
        self.turns = Turns()
        self.work = ExpectedWork()
        self.bound_ns = grace_ns
        """The wait beyond which the late go before everybody else."""
        self.owed = Owed()
        self._backlog = Backlog()
        self._recent: deque[tuple[int, int]] = deque(maxlen=MOST_IN_FLOW)
        self._looked_ns = -REFRESH_NS

    def arrived(self, request: Request) -> None:
        """A request that hasn't run yet joins the queue."""
        self._backlog.add(request)
        if not self._recent or self._recent[-1][0] <= request.arrival_ns:
            self._recent.append((request.arrival_ns, request.num_prompt))

    def left(self, request: Request) -> None:
        """A request leaves the queue, to run or for good."""
        self._backlog.remove(request)

    def look(self, late: Iterable[Request], pace: StepPace, now_ns: int) -> None:
        """Settle what is owed to `late`, who wait, oldest first. Costs nothing when asked again within a moment."""
        if now_ns - self._looked_ns < REFRESH_NS:
            return
        self._looked_ns = now_ns
        costs = pace.work_ns
        worst = self._backlog.worst(self.work, costs, now_ns, self._ahead * self.bound_ns)
        self.bound_ns = int(self._patience * worst) + self._grace_ns
        until_ns = int(self._ahead * self.bound_ns)
        since_ns = now_ns + until_ns - self.bound_ns
        due = [(r.arrival_ns, r.num_prompt) for r in islice(_before(late, since_ns), MOST_DUE)]
        if not due:
            self.owed = Owed()
            return
        arrivals, prompts = np.array(due, np.float64).T
        left_ns = np.maximum(arrivals + self.bound_ns - now_ns, LEAST_LEFT_NS)
        tokens = float((self.work.computed(prompts).cumsum() / left_ns).max())
        share = float((self.work.of(prompts, costs).cumsum() / left_ns).max())
        self.owed = Owed(tokens, self._largest(share, costs, now_ns), until_ns)

    def _largest(self, share: float, costs: tuple[float, float], now_ns: int) -> float:
        """The most work that a request may be to come before the late, if they need `share` of the device's time and
        what comes is as it was."""
        recent = self._recent
        span_ns = FLOW_NS if len(recent) < MOST_IN_FLOW else min(max(now_ns - recent[0][0], SECOND_NS), FLOW_NS)
        while recent and recent[0][0] < now_ns - span_ns:
            recent.popleft()
        if not recent:
            return float("inf")
        sizes = np.sort(self.work.of(np.array([prompt for _, prompt in recent], np.float64), costs))
        fits = int(np.searchsorted(sizes.cumsum() / span_ns, 1.0 - share, side="right"))
        return float(sizes[fits]) if fits < len(sizes) else float("inf")

    def share(self, oldest: Request, now_ns: int, room: int, step_ns: float) -> float:
        """The part of a step's prefill, 0 to 1, that is theirs; the step computes `room` prompt tokens in `step_ns`."""
        if now_ns - oldest.arrival_ns >= self.bound_ns:
            return 1.0
        return min(self._most, self.owed.tokens * step_ns / max(room, 1))

    def too_much(self, prompts: Sequence[int], computed: Sequence[int], pace: StepPace) -> list[bool]:
        """Which requests with these prompts [N] give way to the late; `computed` tokens of each aren't cached."""
        if self.owed.largest_ns == float("inf"):
            return [False] * len(prompts)
        sizes = self.work.of(np.array(prompts, np.float64), pace.work_ns, np.array(computed, np.float64))
        return [size > self.owed.largest_ns for size in sizes.tolist()]


def _before(requests: Iterable[Request], arrival_ns: int) -> Iterator[Request]:
    """Those that arrived before a time, of `requests` in order of arrival."""
    for request in requests:
        if request.arrival_ns > arrival_ns:
            return
        yield request
