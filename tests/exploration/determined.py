"""What replaces time, chance, metrics and the event loop in an explored world, so that only choices decide."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

WALL_MS = 1_700_000_000_000


class Clock:
    """Time in ticks of 0.2 s."""

    def __init__(self) -> None:
        self.ticks = 500

    def now(self) -> float:
        """Seconds."""
        return self.ticks / 5

    def now_ns(self) -> int:
        """Nanoseconds."""
        return self.ticks * 200_000_000

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        return WALL_MS + self.ticks * 200


class Ignored:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self


class Counter:
    """A metric that is read."""

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """Count."""
        self.value += amount


@contextmanager
def reproducible(name: str) -> Iterator[None]:
    """Session numbers, identities and instances follow from a name."""
    generator = random.Random(name)
    drawn = SimpleNamespace(
        randbits=generator.getrandbits,
        token_bytes=generator.randbytes,
        token_hex=lambda n: generator.randbytes(n).hex(),
    )
    with patch("protocol.client_channel.secrets", drawn), patch("protocol.links.secrets", drawn):
        yield


class StepLoop:
    """What an engine and its channel ask of an asyncio event loop; it turns only when it is told to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._readers: dict[int, Callable[[], None]] = {}
        self._ready: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """Seconds."""
        return self._clock.now()

    def get_debug(self) -> bool:
        """No."""
        return False

    def call_soon(self, callback: Callable[[], None]) -> None:
        """In this turn."""
        self._ready.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """In a later turn."""
        loop: Any = self
        handle = asyncio.TimerHandle(self.time() + delay, callback, (), loop)
        # Fifths of a second round: a timer for the next tick is due at the next tick.
        heapq.heappush(self._timers, (round(self.time() + delay, 6), next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when they are due."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call it when there is something to read."""
        self._readers[fd] = callback

    def remove_reader(self, fd: int) -> bool:
        """No more."""
        return self._readers.pop(fd, None) is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the loop that runs."""
        loop: Any = self
        asyncio._set_running_loop(loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def turn(self, readable: list[int]) -> None:
        """Call the readers of these descriptors, then all that is due."""
        with self.running():
            for fd in readable:
                if fd in self._readers:
                    self._readers[fd]()
            while self._ready or (self._timers and self._timers[0][0] <= self.time() + 1e-6):
                if self._ready:
                    self._ready.popleft()()
                    continue
                handle = heapq.heappop(self._timers)[2]
                if not handle.cancelled():
                    handle._run()
