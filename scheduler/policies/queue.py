"""Who is next: the order of requests that wait for the GPU. Every operation is O(log n) or better."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from scheduler.request import Request


class QueuePolicy(ABC):
    """A queue of WAITING and PREEMPTED requests. A request is in it at most once."""

    name: str

    @abstractmethod
    def push(self, request: Request) -> None:
        """Add a request that has arrived."""

    @abstractmethod
    def restore(self, request: Request) -> None:
        """Put back a preempted request with its place kept: ahead of everyone it was ahead of."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request. Raises IndexError when empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises KeyError if it isn't here."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""


class Fcfs(QueuePolicy):
    """First come, first served; a preempted request goes to the front."""

    name = "fcfs"

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._queue[request.id] = request

    def restore(self, request: Request) -> None:
        self._queue[request.id] = request
        self._queue.move_to_end(request.id, last=False)

    def peek(self) -> Request:
        for request in self._queue.values():
            return request
        raise IndexError("the queue is empty")

    def remove(self, request: Request) -> None:
        del self._queue[request.id]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


class Priority(QueuePolicy):
    """Smaller priority first, then earlier arrival, then smaller id: a total order that preemption doesn't change."""

    name = "priority"

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._members: dict[int, Request] = {}

    def push(self, request: Request) -> None:
        self._members[request.id] = request
        heapq.heappush(self._heap, (request.priority, request.arrival, request.id))

    restore = push

    def peek(self) -> Request:
        while True:
            request = self._members.get(self._heap[0][2])
            if request is not None:
                return request
            heapq.heappop(self._heap)

    def remove(self, request: Request) -> None:
        del self._members[request.id]
        if self._heap and self._heap[0][2] == request.id:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(r.priority, r.arrival, r.id) for r in self._members.values()]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())


QUEUE_POLICIES: dict[str, type[QueuePolicy]] = {policy.name: policy for policy in (Fcfs, Priority)}
