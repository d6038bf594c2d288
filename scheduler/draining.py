"""Pages of requests that have ended, until they may be written again: neither free nor held by a request.

Whatever may still read or write them when their request ends (a copy under way, a neighbour) has that long to finish.
With no delay nothing is kept here, and a page is free when its last holder lets go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.blocks import BlockPool


class DrainingPages:
    """Holds pages in a request's place, each until its time. A page that a prefix hit takes up meanwhile is the
    request's again, and drains anew when that one ends."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._due: dict[int, int] = {}
        self.returned = 0
        """Pages of ended requests that have become free so far."""

    def retire(self, pages: Sequence[int], now_ns: int, delay_ns: int) -> None:
        """Take over an ended request's pages, in table order. Those with another holder stay with that one."""
        if not delay_ns:
            self.returned += self._pool.release(pages)
            return
        refs, due, elsewhere = self._pool.refs, self._due, []
        for page in pages:
            drains = page in due
            if refs[page] > 1 + drains:
                elsewhere.append(page)
                continue
            if drains:
                elsewhere.append(page)  # of two references one is enough
                del due[page]
            due[page] = now_ns + delay_ns
        self._pool.release(elsewhere)

    def release_due(self, now_ns: int) -> None:
        """Give back the pages whose time has come, in the order in which they were taken over."""
        ready = []
        for page, due in self._due.items():
            if due > now_ns:
                break
            ready.append(page)
        for page in ready:
            del self._due[page]
        self.returned += self._pool.release(ready)

    @property
    def next_ns(self) -> int | None:
        """When the next page comes back; None if none is to."""
        return next(iter(self._due.values()), None)

    def count(self) -> int:
        """Pages that nobody else holds."""
        refs = self._pool.refs
        return sum(1 for page in self._due if refs[page] == 1) if self._due else 0

    def pages(self) -> Iterable[int]:
        """All that are kept here, those that a request holds too included."""
        return self._due
