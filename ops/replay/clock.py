"""Time that only moves when somebody moves it."""

from __future__ import annotations


class VirtualClock:
    """Nanoseconds since the replay began."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        """Be there at once. A deadline in the past changes nothing."""
        self.now_ns = max(self.now_ns, deadline_ns)
