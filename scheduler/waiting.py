"""Everybody who waits: the queue in its policy's order, those swapped out, and those that wait for something external.

Three places, and a request is in at most one of them. Only the queue's order is a policy's business; the age bound that
no policy may break, deadlines of waiting, and the second queue are here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator

from protocol.messages import RequestStatus
from scheduler.policies.queue import QueuePolicy, QueueView
from scheduler.request import Request


class WaitingRoom:
    """`queue`: may enter when tests allow. `swapped`: return first. `parked`: wait for a grammar, KV, or input.
    `quarantined`: may have made a step fail, and enter apart from all others."""

    def __init__(self, queue: QueuePolicy, max_age_ns: int) -> None:
        self.queue = queue
        self.swapped: deque[Request] = deque()
        self.parked: dict[int, Request] = {}
        self.quarantined: dict[int, Request] = {}
        self._max_age_ns = max_age_ns
        self._by_age: OrderedDict[int, Request] = OrderedDict()
        self._expiries: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Requests that wait for the GPU: queued, swapped or quarantined."""
        return len(self.queue) + len(self.swapped) + len(self.quarantined)

    def push(self, request: Request, now_ns: int, *, keep_place: bool = False) -> None:
        """Queue a request: behind the others, or where it stood before it was taken out."""
        self._note(request, now_ns)
        if request.quarantined:
            self.quarantined[request.id] = request
        elif keep_place:
            self.queue.restore(request)
        else:
            self.queue.push(request)

    def rejoin(self, request: Request, now_ns: int) -> None:
        """Queue a request that was parked: where its arrival puts it, as if it had waited here."""
        self._note(request, now_ns)
        if request.quarantined:
            self.quarantined[request.id] = request
        else:
            self.queue.rejoin(request)

    def _note(self, request: Request, now_ns: int) -> None:
        request.queued_ns = now_ns
        if not request.quarantined:
            self._by_age[request.id] = request

    def isolate(self, request: Request) -> None:
        """Take a request that is to be kept apart out of the queue, if it waits there."""
        if request.quarantined and request.id in self._by_age:
            self.remove(request)
            self.quarantined[request.id] = request

    def release(self, request: Request, now_ns: int) -> None:
        """A request need not be kept apart any longer: if it waits, it does so among the others."""
        request.quarantined = False
        if self.quarantined.pop(request.id, None) is not None:
            self.push(request, now_ns, keep_place=True)

    def remove(self, request: Request) -> None:
        """Take a request out of wherever it waits. Raises KeyError or ValueError if it doesn't."""
        if request.id in self.parked:
            del self.parked[request.id]
        elif request.id in self.quarantined:
            del self.quarantined[request.id]
        elif request.host_blocks:
            self.swapped.remove(request)
        else:
            self.queue.remove(request)
            del self._by_age[request.id]

    def discard(self, request: Request) -> None:
        """Take out a request that may have been put somewhere, or not."""
        try:
            self.remove(request)
        except (KeyError, ValueError):
            self._by_age.pop(request.id, None)

    def candidates(self, view: QueueView, now_ns: int) -> Iterator[Request]:
        """The queue, next one first. Who has waited longer than the age bound comes before any policy's choice."""
        oldest = next(iter(self._by_age.values()), None)
        if oldest is None:
            return
        if self._max_age_ns and now_ns - oldest.queued_ns > self._max_age_ns:
            yield oldest
        else:
            oldest = None
        for request in self.queue.ordered(view):
            if request is not oldest:
                yield request

    def front(self, now_ns: int) -> Request | None:
        """Who stands first by the age bound or the order as it was last made."""
        oldest = next(iter(self._by_age.values()), None)
        if oldest is not None and self._max_age_ns and now_ns - oldest.queued_ns > self._max_age_ns:
            return oldest
        return self.queue.front()

    def next_swapped(self, now_ns: int) -> Request | None:
        """The swapped request to return next: before the whole queue, except that urgency goes before all in one by
        priority, among the swapped and against the queue, up to the age bound."""
        if not self.swapped:
            return None
        oldest = self.swapped[0]
        aged = self._max_age_ns and now_ns - oldest.queued_ns > self._max_age_ns
        if aged or self.queue.name != "priority":
            return oldest
        first = min(self.swapped, key=lambda request: (request.priority, request.arrival))
        front = self.queue.front()
        return None if front is not None and front.priority < first.priority else first

    def newest_holder(self, head: Request) -> Request | None:
        """The latest of those that hold blocks without running, `head` apart; sessions between two parts come first."""
        parked = [r for r in self.parked.values() if r.blocks and r.status == RequestStatus.WAITING_FOR_INPUT]
        queued = [r for r in (*self.queue, *self.quarantined.values()) if r.blocks and r is not head]
        return max(parked or queued, key=lambda request: request.arrival, default=None)

    def reorder(self, queue: QueuePolicy, max_age_ns: int) -> None:
        """Go on with another policy; nobody is lost, and equal keys keep their order of arrival."""
        self._max_age_ns = max_age_ns
        if queue is self.queue:
            return
        for request in sorted(self.queue, key=lambda request: request.arrival):
            queue.push(request)
        self.queue = queue

    def expire_at(self, request: Request) -> None:
        """Remember that a request's wait ends at `request.expires_ns`."""
        heapq.heappush(self._expiries, (request.expires_ns, request.id))

    def expired(self, now_ns: int) -> list[int]:
        """Ids whose wait has ended since the last call, whether or not they still wait."""
        ids = []
        while self._expiries and self._expiries[0][0] <= now_ns:
            ids.append(heapq.heappop(self._expiries)[1])
        return ids

    def __iter__(self) -> Iterator[Request]:
        yield from self.swapped
        yield from self.queue
        yield from self.quarantined.values()
        yield from self.parked.values()
