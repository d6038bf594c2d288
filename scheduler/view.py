"""What queue orders may look at: the prefix cache and what runs, and nothing that they could change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler


class CacheView:
    """The `QueueView` of a running scheduler."""

    def __init__(self, core: CoreScheduler) -> None:
        self._core = core

    @property
    def version(self) -> int:
        """Changes whenever `matched` could give another answer."""
        return self._core.pool.version

    def matched(self, request: Request) -> int:
        """Tokens of the request that the prefix cache holds now."""
        return len(self._core.find_hit(request)) * self._core.block_size

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._core.block_size

    def routing_keys(self) -> list[str]:
        """The routing key of each running request that has one."""
        return [request.routing_key for request in self._core.table.requests() if request.routing_key]

    def processed_tokens(self) -> int:
        """Prompt tokens computed since the start."""
        return self._core.processed_tokens()
