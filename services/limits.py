"""How much the bearer of one API key may ask for: requests and tokens a minute, and requests at once.

Each API process counts for itself. Buckets fill evenly: after a pause a whole minute's worth may come at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.errors import ApiError

MINUTE_S = 60.0
CODE = "rate_limit_exceeded"
_NAMES = ("requests", "tokens")
_ABOUT = ("limit", "remaining", "reset")
RATE_LIMIT_HEADERS = (
    *(f"x-ratelimit-{what}-{name}" for name in _NAMES for what in _ABOUT),
    *(f"anthropic-ratelimit-{name}-{what}" for name in _NAMES for what in _ABOUT),
)
"""All headers that say what is left of a key's limits, OpenAI's and Anthropic's."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may do; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0


class Bucket:
    """So many of something a minute. What is taken may be more than there is: then it is owed."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.size = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What there is now; below 0 what is owed."""
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._at) * self.size / MINUTE_S)
        self._at = now
        return self._level

    def take(self, amount: int) -> None:
        """Take some out, or go into debt."""
        self._level = self.level - amount

    def wait_s(self, wanted: float) -> float:
        """How long until so much is there."""
        return max(0.0, wanted - self.level) * MINUTE_S / self.size

    def change(self, per_minute: int) -> None:
        """Another size, from now on; what was used in the last minute still counts."""
        used = self.size - self.level
        self.size = per_minute
        self._level = per_minute - used


class Account:
    """One key: whom it stands for, how urgent its requests may be, and what it has used. For one event loop.

    A request needs one of the requests and a token; what it then costs in tokens is taken when it is known, and may be
    more than there is.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        tenant: str = "",
        priority: int | None = None,
        limits: KeyLimits | None = None,
    ) -> None:
        self.tenant = tenant
        self.priority = priority
        self.live = 0
        self._clock = clock
        self._limits = KeyLimits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.change(limits or KeyLimits())

    def change(self, limits: KeyLimits) -> None:
        """Other limits, from now on."""
        self._limits = limits
        self._requests = self._resized(self._requests, limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, limits.tokens_per_minute)

    def _resized(self, bucket: Bucket | None, size: int) -> Bucket | None:
        if not size:
            return None
        if bucket is None:
            return Bucket(size, self._clock)
        if bucket.size != size:
            bucket.change(size)
        return bucket

    def urgency(self, asked: int | None) -> int | None:
        """The priority of a request: what it asks for, but not before the key's; the key's if it doesn't ask."""
        if self.priority is None or asked is None:
            return self.priority if asked is None else asked
        return max(asked, self.priority)

    def enter(self) -> None:
        """A request begins. ApiError 429 with `Retry-After` if it is one too many; then it doesn't count."""
        most = self._limits.concurrent_requests
        if most and self.live >= most:
            raise _refusal(f"{most} requests at once", 1.0)
        if self._requests is not None and (wait := self._requests.wait_s(1)) > 0:
            raise _refusal(f"{self._requests.size} requests per minute", wait)
        if self._tokens is not None and (wait := self._tokens.wait_s(1)) > 0:
            raise _refusal(f"{self._tokens.size} tokens per minute", wait)
        if self._requests is not None:
            self._requests.take(1)
        self.live += 1

    def hold(self) -> None:
        """Take a place for what may not be refused any more: a request that goes on without its client."""
        self.live += 1

    def leave(self) -> None:
        """Give a place back: a request is over."""
        self.live -= 1

    def spend(self, tokens: int) -> None:
        """A request has cost that many tokens (more)."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers: what is allowed a minute, what is left of it, and when all of it will be there again."""
        found: dict[str, str] = {}
        for name, bucket in zip(_NAMES, (self._requests, self._tokens), strict=True):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.size)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.wait_s(bucket.size))
        return found

    def anthropic_headers(self, wall: float) -> dict[str, str]:
        """The same with Anthropic's names; the time is one of the calendar."""
        found: dict[str, str] = {}
        for name, bucket in zip(_NAMES, (self._requests, self._tokens), strict=True):
            if bucket is not None:
                full = datetime.fromtimestamp(math.ceil(wall + bucket.wait_s(bucket.size)), UTC)
                found[f"anthropic-ratelimit-{name}-limit"] = str(bucket.size)
                found[f"anthropic-ratelimit-{name}-remaining"] = str(max(0, math.floor(bucket.level)))
                found[f"anthropic-ratelimit-{name}-reset"] = full.strftime("%Y-%m-%dT%H:%M:%SZ")
        return found


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: `0s`, `17ms`, `1.5s`, `6m0s`."""
    ms = math.ceil(seconds * 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


def _refusal(what: str, wait_s: float) -> ApiError:
    seconds = max(1, math.ceil(wait_s))
    text = f"Rate limit reached: this API key may have {what}; try again in {duration(wait_s)}"
    return ApiError(429, text, code=CODE, retry_after_s=seconds)
