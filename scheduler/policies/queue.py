"""Who is next: the order of requests that wait for the GPU.

Static orders are heaps. Orders that depend on the cache, on time or on what runs are computed for a bounded number of
waiters and only when somebody may enter: the cost of a pass doesn't grow with the queue.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from scheduler.policies import orders
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
    """What orders can be told. `weights` are the shares of tenants (1 for those not named)."""

    seed: int = 0
    fallback_waiting: int = 128
    group_prefix_tokens: int = 32
    weights: Mapping[str, float] = field(default_factory=dict)


class QueuePolicy(ABC):
    """A queue of WAITING and PREEMPTED requests. A request is in it at most once."""

    name: str
    flips = 0
    """How often the order has changed between its own and first-come order because of the queue's length."""

    def __init__(self, options: QueueOptions | None = None) -> None:
        self.options = options or QueueOptions()

    @abstractmethod
    def push(self, request: Request) -> None:
        """Add a request that has arrived."""

    @abstractmethod
    def restore(self, request: Request) -> None:
        """Put back a request that was taken out, with its place kept: ahead of everyone it was ahead of."""

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

    def charge(self, served: Mapping[str, float]) -> None:
        """Tenants were served this much. Only `fair` listens."""

    @property
    def wants_charges(self) -> bool:
        """Whether `charge` is to be called."""
        return False


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


class _Windowed(Fcfs):
    """An order recomputed when it may have changed; beyond `fallback_waiting` requests first come, first served."""

    def __init__(self, options: QueueOptions | None = None) -> None:
        super().__init__(options)
        self._state: object = None
        self._order: list[Request] = []
        self._fallen_back = False

    @abstractmethod
    def sort(self, waiting: list[Request], view: QueueView) -> list[Request]:
        """`waiting` (in order of arrival) in this policy's order."""

    def ordered(self, view: QueueView) -> Iterator[Request]:
        fallen_back = len(self._queue) > self.options.fallback_waiting
        if fallen_back != self._fallen_back:
            self._fallen_back = fallen_back
            self.flips += 1
        if fallen_back:
            return super().ordered(view)
        state = (self._changes, view.version)
        if state != self._state:
            self._state = state
            self._order = self.sort(list(self._queue.values()), view)
        return iter(self._order)

    def front(self) -> Request | None:
        if not self._fallen_back:
            for request in self._order:
                if self._queue.get(request.id) is request:
                    return request
        return super().front()


class Arranged(_Windowed):
    """One of the orders of `scheduler.policies.orders` that look at the cache or at what runs."""

    def __init__(self, name: str, options: QueueOptions | None = None) -> None:
        super().__init__(options)
        self.name = name

    def sort(self, waiting: list[Request], view: QueueView) -> list[Request]:
        if self.name == "routing-key":
            seen = [orders.Waiting(routing_key=request.routing_key) for request in waiting]
            around = orders.Surroundings(running_keys=view.routing_keys())
        else:
            seen = self._with_matches(waiting, view)
            around = orders.Surroundings(processed=view.processed_tokens())
        return [waiting[index] for index in orders.arrange(self.name, seen, around)]

    def _with_matches(self, waiting: list[Request], view: QueueView) -> list[orders.Waiting]:
        """The waiters with what the cache holds of them; those put off whose prefix an earlier one will bring."""
        matched = [view.matched(request) for request in waiting]
        share = self.options.group_prefix_tokens
        deferred = orders.defer_sharers(
            [request.hashes for request in waiting],
            matched,
            orders.ChainIndex(view.block_size),
            check=share,
            share=share,
        )
        return [
            orders.Waiting(
                id=str(request.id),
                prompt_len=request.num_prompt,
                output_len=request.num_outputs,
                matched=cached,
                entry=request.arrival,
                seen_processed=request.arrival_processed,
                deferred=defer,
                path=tuple(request.hashes[: cached // view.block_size]),
            )
            for request, cached, defer in zip(waiting, matched, deferred, strict=True)
        ]


class Fair(QueuePolicy):
    """Weighted fair service over tenants by virtual token counters (arXiv 2401.00588).

    The tenant that has been served least, per unit of its weight, is next; within a tenant first come, first served.
    A tenant that comes back from idleness is lifted to the smallest counter among those that wait, or to that of the
    last one that did: it can't save up. While two tenants always have requests waiting, what they have been served per
    unit of weight differs by at most twice U = max(largest prompt, OUTPUT_COST * tokens that the pool holds) / the
    smallest weight (the paper's theorem 4.4).
    """

    name = "fair"

    def __init__(self, options: QueueOptions | None = None) -> None:
        super().__init__(options)
        self.counters: dict[str, float] = {}
        self._tenants: dict[str, OrderedDict[int, Request]] = {}
        self._size = 0
        self._heap: list[tuple[float, str]] = []  # once for each tenant; counters only grow, so an old one is too small
        self._listed: set[str] = set()
        self._last_left = ""

    def _queue_of(self, request: Request) -> OrderedDict[int, Request]:
        tenant = request.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            least = self._least() or self._last_left
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), self.counters.get(least, 0.0))
            queue = self._tenants[tenant] = OrderedDict()
            if tenant not in self._listed:
                self._listed.add(tenant)
                heapq.heappush(self._heap, (self.counters[tenant], tenant))
        return queue

    def _least(self) -> str:
        """The waiting tenant with the smallest counter; empty if nobody waits."""
        while self._heap:
            counter, tenant = self._heap[0]
            if tenant not in self._tenants:
                heapq.heappop(self._heap)
                self._listed.remove(tenant)
            elif counter < self.counters[tenant]:
                heapq.heapreplace(self._heap, (self.counters[tenant], tenant))
            else:
                return tenant
        return ""

    def push(self, request: Request) -> None:
        self._queue_of(request)[request.id] = request
        self._size += 1

    def restore(self, request: Request) -> None:
        queue = self._queue_of(request)
        queue[request.id] = request
        queue.move_to_end(request.id, last=False)
        self._size += 1

    def remove(self, request: Request) -> None:
        queue = self._tenants[request.tenant]
        del queue[request.id]
        if not queue:
            del self._tenants[request.tenant]
            self._last_left = request.tenant
        self._size -= 1

    def ordered(self, view: QueueView) -> Iterator[Request]:
        self._least()
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier:  # as `in_order`, but an entry that is behind its counter is put off to where it belongs
            (counter, tenant), index = heapq.heappop(frontier)
            if index >= 0:
                for child in range(2 * index + 1, min(2 * index + 3, len(self._heap))):
                    heapq.heappush(frontier, (self._heap[child], child))
            if tenant not in self._tenants:
                continue
            if counter < self.counters[tenant]:
                heapq.heappush(frontier, ((self.counters[tenant], tenant), -1))
            else:
                yield from self._tenants[tenant].values()

    def front(self) -> Request | None:
        tenant = self._least()
        return next(iter(self._tenants[tenant].values())) if self._tenants else None

    def charge(self, served: Mapping[str, float]) -> None:
        for tenant, tokens in served.items():
            self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens / self.options.weights.get(tenant, 1.0)

    @property
    def wants_charges(self) -> bool:
        return True

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for queue in self._tenants.values():
            yield from queue.values()


ARRANGED = ("lpm", "dfs-weight", "routing-key", "hrrn", "shortest-prefill")

QUEUE_POLICIES: dict[str, Callable[[QueueOptions | None], QueuePolicy]] = {
    **{policy.name: policy for policy in (Fcfs, Priority, LongestOutputFirst, Random, Fair, Deadline)},
    **{name: partial(Arranged, name) for name in ARRANGED},
}
