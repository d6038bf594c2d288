"""The responses that this process keeps: in memory, the newest ones, as many and as long as the settings allow.

A response belongs to the API key that asked for it: to all others it doesn't exist. `tenant` None sees all.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import msgspec

from services.config import ApiConfig
from services.responses.answer import Response


@dataclass(slots=True)
class _Kept:
    response: Response
    size: int
    since: float


class ResponseStore:
    """Use from one event loop only. A response under way is kept whatever the limits: it is bounded elsewhere."""

    def __init__(self, most: int, most_bytes: int, most_s: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._most_s = most_s
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.size = 0
        """Bytes of all that is kept, as JSON."""

    @classmethod
    def of(cls, config: ApiConfig, clock: Callable[[], float] = time.monotonic) -> Self:
        """With the limits of the settings."""
        return cls(config.responses_max_count, config.responses_max_bytes, config.responses_max_age_s, clock)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._most > 0

    @property
    def rules(self) -> str:
        """What is kept, for who looks for something that isn't."""
        return f"the last {self._most} are kept for {self._most_s:g} s, {self._most_bytes} bytes in all"

    def put(self, response: Response) -> None:
        """Keep a response, or take note of how it has grown; the oldest make room."""
        self._drop(response.id)
        size = len(msgspec.json.encode(response.items)) + len(msgspec.json.encode(response.payload()))
        size += response.log.size if response.log is not None else 0
        self._kept[response.id] = _Kept(response, size, self._clock())
        self.size += size
        self.sweep()

    def get(self, id: str, tenant: str | None) -> Response | None:
        """A response of this tenant, None if there is none (any more)."""
        self.sweep()
        kept = self._kept.get(id)
        if kept is None or tenant not in (None, kept.response.tenant):
            return None
        return kept.response

    def delete(self, id: str, tenant: str | None) -> bool:
        """Forget a response; one under way is cancelled. Whether it was there."""
        response = self.get(id, tenant)
        if response is None:
            return False
        self._drop(id)
        response.kept = False
        response.cancel()
        return True

    def sweep(self) -> None:
        """Forget what is too old, and the oldest of what is too much."""
        now = self._clock()
        for id, kept in list(self._kept.items()):
            full = len(self._kept) > self._most or self.size > self._most_bytes
            if not full and now - kept.since <= self._most_s:
                return
            if kept.response.over:
                self._drop(id)

    def _drop(self, id: str) -> None:
        kept = self._kept.pop(id, None)
        if kept is not None:
            self.size -= kept.size
