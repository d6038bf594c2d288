"""Queue orders that look at the prefix cache or at what runs: made anew when they may have changed, while few wait."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.policies import orders
from scheduler.policies.queue import Fcfs, QueueOptions, QueueView
from scheduler.request import Request

SHORTEST = "shortest-prefill"
ARRANGED = ("lpm", "dfs-weight", "routing-key", "hrrn", SHORTEST)


class Arranged(Fcfs):
    """One of the orders of `scheduler.policies.orders` that look at the cache or at what runs.

    Made anew when it may have changed; beyond `fallback_waiting` requests first come, first served.
    """

    def __init__(self, name: str, options: QueueOptions | None = None) -> None:
        super().__init__(options)
        self.name = name
        self._state: object = None
        self._order: list[Request] = []
        self._uncached: list[int] = []
        self._active = self._active_policy()

    @property
    def in_force(self) -> str:
        return self._active

    def _active_policy(self) -> str:
        """Every order of this kind gives way to a long queue: the cost of a pass must not grow with it.

        Without a cache the shortest prefill is the shortest prompt, which is an order all the same.
        """
        return orders.active_policy(
            self.name,
            len(self._queue),
            has_cache=self.options.has_cache or self.name == SHORTEST,
            limit=self.options.fallback_waiting,
            short_queue_only=ARRANGED,
        )

    def ordered(self, view: QueueView) -> Iterator[Request]:
        active = self._active_policy()
        if active != self._active:
            self._active = active
            self.flips += 1
        if active == Fcfs.name:
            return super().ordered(view)
        state = (self._changes, view.version)
        if state != self._state:
            self._state = state
            self._order = self.sort(list(self._queue.values()), view)
        return iter(self._order)

    def front(self) -> Request | None:
        if self._active != Fcfs.name:
            for request in self._order:
                if self._queue.get(request.id) is request:
                    return request
        return super().front()

    def chunk_limit(self, budget: int, remaining: int, view: QueueView) -> int | None:
        if self.name != SHORTEST:
            return None
        self.ordered(view)
        if self._active != self.name:
            return None
        return orders.chunk_limit(budget, view.block_size, remaining, self._uncached)

    def sort(self, waiting: list[Request], view: QueueView) -> list[Request]:
        """`waiting` (in order of arrival) in this policy's order."""
        if self.name == "routing-key":
            seen = [orders.Waiting(routing_key=request.routing_key) for request in waiting]
            around = orders.Surroundings(running_keys=view.routing_keys())
        else:
            seen = self._with_matches(waiting, view)
            around = orders.Surroundings(processed=view.processed_tokens())
        order = orders.arrange(self.name, seen, around)
        self._uncached = [seen[index].uncached for index in order]
        return [waiting[index] for index in order]

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
