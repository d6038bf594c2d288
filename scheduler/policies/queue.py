"""Who is next: the order of requests that wait for the GPU.

Static orders are heaps. Orders that depend on the cache, on time or on what runs are computed for a bounded number of
waiters and only when somebody may enter: the cost of a pass doesn't grow with the queue.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

from scheduler.request import Request

Entry = TypeVar("Entry", bound=tuple[float, int, int] | tuple[float, str])


class QueueView(Protocol):
    """What an order may look at."""

    @property
    def version(self) -> int:
        """Changes whenever a look-up in the prefix cache could give another answer."""

    def matched(self, request: Request) -> int:
        """Tokens of the request that the prefix cache holds now; at most one less than it has."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    def routing_keys(self) -> list[str]:
        """The routing key of each running request that has one."""

    def processed_tokens(self) -> int:
        """Prompt tokens computed since the start: the clock of token-based ageing."""


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What orders can be told. `weights` are the shares of tenants (1 for those not named).

    Without a prefix cache (`has_cache`) orders that can't do without give way to fcfs.
    """

    seed: int = 0
    fallback_waiting: int = 128
    group_prefix_tokens: int = 32
    weights: Mapping[str, float] = field(default_factory=dict)
    slo_ttft_s: float = 0.0
    grace_s: float = 79.0
    patience: float = 1.18
    ahead: float = 0.1
    most_late: float = 0.9
    has_cache: bool = True


class QueuePolicy(ABC):
    """A queue of WAITING and PREEMPTED requests. A request is in it at most once."""

    name: str
    flips = 0
    """How often the order has changed between its own and first-come order because of the queue's length."""

    def __init__(self, options: QueueOptions | None = None) -> None:
        self.options = options or QueueOptions()

    @property
    def in_force(self) -> str:
        """The name of the order by which it goes now: its own, or what that has given way to."""
        return self.name

    @abstractmethod
    def push(self, request: Request) -> None:
        """Add a request that has arrived."""

    @abstractmethod
    def restore(self, request: Request) -> None:
        """Put back a request that was taken out, with its place kept: ahead of everyone it was ahead of."""

    @abstractmethod
    def rejoin(self, request: Request) -> None:
        """Add a request that has waited for something else meanwhile: at the place that its arrival gives it."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises KeyError if it isn't here."""

    @abstractmethod
    def ordered(self, view: QueueView) -> Iterator[Request]:
        """The waiters, next one first. Stop iterating before changing the queue."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""

    def front(self) -> Request | None:
        """Who was next when the order was last made: good enough to say who is held back, and free of charge."""
        return next(iter(self), None)

    def chunk_limit(self, budget: int, remaining: int, view: QueueView) -> int | None:
        """Most of `budget` tokens for a prompt under way with `remaining` to go, if waiters should fit beside it."""
        return None

    def charge(self, served: Mapping[str, float]) -> None:
        """Tenants were served this much. Only `fair` listens."""

    def finished(self, request: Request) -> None:
        """A request has ended that had outputs. Only `on-time` listens."""

    def tenant_gone(self, tenant: str) -> None:
        """This tenant has no live request any more, waiting or running."""

    @property
    def wants_charges(self) -> bool:
        """Whether `charge` is to be called."""
        return False


def settle_by_arrival(queue: OrderedDict[int, Request], request: Request) -> None:
    """Move those that came later behind the last of `queue`, a request that rejoins it. Costs as much as there are.

    Who has been admitted before may stand anywhere, so nothing follows from where that one stands.
    """
    passed: list[int] = []
    behind = 0
    for other in islice(reversed(queue.values()), 1, None):
        if other.arrival > request.arrival:
            behind = len(passed) + 1
        elif not other.first_admitted_ns:
            break
        passed.append(other.id)
    for request_id in reversed(passed[:behind]):
        queue.move_to_end(request_id)


class Fcfs(QueuePolicy):
    """First come, first served; a preempted request goes to the front."""

    name = "fcfs"

    def __init__(self, options: QueueOptions | None = None) -> None:
        super().__init__(options)
        self._queue: OrderedDict[int, Request] = OrderedDict()
        self._changes = 0

    def push(self, request: Request) -> None:
        self._queue[request.id] = request
        self._changes += 1

    def restore(self, request: Request) -> None:
        self._queue[request.id] = request
        self._queue.move_to_end(request.id, last=False)
        self._changes += 1

    def rejoin(self, request: Request) -> None:
        self.push(request)
        settle_by_arrival(self._queue, request)

    def remove(self, request: Request) -> None:
        del self._queue[request.id]
        self._changes += 1

    def ordered(self, view: QueueView) -> Iterator[Request]:
        return iter(self._queue.values())

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


def in_order(heap: Sequence[Entry]) -> Iterator[Entry]:
    """The entries of a heap, smallest first, in O(k log k) for the k that are looked at: the heap stays as it is.

    An entry's children are no smaller, so the next one is always among the children of those given already.
    """
    frontier = [(heap[0], 0)] if heap else []
    while frontier:
        entry, index = heapq.heappop(frontier)
        yield entry
        for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
            heapq.heappush(frontier, (heap[child], child))


class _Heap(QueuePolicy):
    """An order by a key that never changes while a request waits."""

    def __init__(self, options: QueueOptions | None = None) -> None:
        super().__init__(options)
        self._heap: list[tuple[float, int, int]] = []
        self._members: dict[int, Request] = {}

    @abstractmethod
    def key(self, request: Request) -> float:
        """Smaller is sooner. Equal keys go by arrival, then by id."""

    def push(self, request: Request) -> None:
        self._members[request.id] = request
        heapq.heappush(self._heap, (self.key(request), request.arrival, request.id))

    def restore(self, request: Request) -> None:
        self.push(request)

    def rejoin(self, request: Request) -> None:
        self.push(request)

    def remove(self, request: Request) -> None:
        del self._members[request.id]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(self.key(r), r.arrival, r.id) for r in self._members.values()]
            heapq.heapify(self._heap)

    def ordered(self, view: QueueView) -> Iterator[Request]:
        first = self.front()
        if first is None:
            return
        yield first
        seen = {first.id}  # who came back has two equal entries until the older one is swept away
        for _, _, request_id in in_order(self._heap):
            if request_id in self._members and request_id not in seen:
                seen.add(request_id)
                yield self._members[request_id]

    def front(self) -> Request | None:
        while self._heap and self._heap[0][2] not in self._members:
            heapq.heappop(self._heap)
        return self._members[self._heap[0][2]] if self._heap else None

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())


class Priority(_Heap):
    """Smaller priority first, then earlier arrival, then smaller id: a total order that preemption doesn't change."""

    name = "priority"

    def key(self, request: Request) -> float:
        return request.priority


class LongestOutputFirst(_Heap):
    """The largest output limit first, so that long requests don't trail alone at the end."""

    name = "lof"

    def key(self, request: Request) -> float:
        return -request.params.max_tokens


class Deadline(_Heap):
    """Earliest deadline first; requests without one come after those that have one, in order of arrival."""

    name = "deadline"

    def key(self, request: Request) -> float:
        return request.deadline_ns or float("inf")


class Random(_Heap):
    """A shuffle that the seed and the arrival number decide."""

    name = "random"

    def key(self, request: Request) -> float:
        return random.Random(self.options.seed * 1_000_003 + request.arrival).random()
