"""Fair service over tenants: who has been served least, per unit of weight, is next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from scheduler.policies.queue import QueueOptions, QueuePolicy, QueueView, settle_by_arrival
from scheduler.request import Request


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
        self._last_out: str | None = None
        self._out_at = 0.0
        """The counter of the tenant that waited last, once it is forgotten."""
        self._gone: set[str] = set()
        self._gone_heap: list[tuple[float, str]] = []  # as above, of tenants that had no live request
        self._gone_listed: set[str] = set()

    def _floor(self) -> float:
        """What a tenant that comes back is lifted to. Never goes down."""
        tenant = self._least() if self._tenants else self._last_out
        return self._out_at if tenant is None else self.counters[tenant]

    def tenant_gone(self, tenant: str) -> None:
        """Its counter is kept for as long as it is above what a newcomer is lifted to."""
        if tenant in self.counters:
            self._gone.add(tenant)
            if tenant not in self._gone_listed:
                self._gone_listed.add(tenant)
                heapq.heappush(self._gone_heap, (self.counters[tenant], tenant))
        floor = self._floor()
        while self._gone_heap and self._gone_heap[0][0] <= floor:
            self._forget_first()

    def _forget_first(self) -> None:
        listed, tenant = self._gone_heap[0]
        if tenant in self._gone and self.counters[tenant] > listed:  # it has been back in between
            heapq.heapreplace(self._gone_heap, (self.counters[tenant], tenant))
            return
        heapq.heappop(self._gone_heap)
        self._gone_listed.remove(tenant)
        if tenant in self._gone:
            self._gone.remove(tenant)
            counter = self.counters.pop(tenant)
            if tenant == self._last_out:
                self._last_out, self._out_at = None, counter

    def _queue_of(self, request: Request) -> OrderedDict[int, Request]:
        tenant = request.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            self._gone.discard(tenant)
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), self._floor())
            queue = self._tenants[tenant] = OrderedDict()
            if tenant not in self._listed:
                self._listed.add(tenant)
                heapq.heappush(self._heap, (self.counters[tenant], tenant))
        return queue

    def _least(self) -> str | None:
        """The waiting tenant with the smallest counter; None if nobody waits."""
        while self._heap:
            counter, tenant = self._heap[0]
            if tenant not in self._tenants:
                heapq.heappop(self._heap)
                self._listed.remove(tenant)
            elif counter < self.counters[tenant]:
                heapq.heapreplace(self._heap, (self.counters[tenant], tenant))
            else:
                return tenant
        return None

    def push(self, request: Request) -> None:
        self._queue_of(request)[request.id] = request
        self._size += 1

    def restore(self, request: Request) -> None:
        queue = self._queue_of(request)
        queue[request.id] = request
        queue.move_to_end(request.id, last=False)
        self._size += 1

    def rejoin(self, request: Request) -> None:
        self.push(request)
        settle_by_arrival(self._tenants[request.tenant], request)

    def remove(self, request: Request) -> None:
        queue = self._tenants[request.tenant]
        del queue[request.id]
        if not queue:
            del self._tenants[request.tenant]
            self._last_out = request.tenant
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
        return None if tenant is None else next(iter(self._tenants[tenant].values()))

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


SHORTEST = "shortest-prefill"
