"""Finds stop strings in text that arrives in pieces, and holds back exactly what could still become one.

It knows nothing of tokens; `detokenizer` feeds it decoded text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Fed(NamedTuple):
    """`text` may be sent now; `stop` is the stop string that ended the output, if one did."""

    text: str
    stop: str | None


class StopMatcher:
    """Watches for several stop strings at once.

    The match that *ends* first wins; of those that end at the same character, the longest, so that the text is cut
    earliest. Thus the outcome depends on the text alone, never on how it was split. What follows a match is dropped.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_stop
        self._held = ""

    @property
    def held(self) -> str:
        """Text withheld because it could still begin a stop string."""
        return self._held

    def feed(self, text: str, armed: bool = True) -> Fed:
        """Takes the next text. A match must end within it, and counts only while `armed` (`min_tokens` disarms)."""
        seen, old = self._held + text, len(self._held)
        if armed and (match := self._earliest(seen, old)) is not None:
            start, stop = match
            self._held = ""
            return Fed(seen[: start + len(stop)] if self._include else seen[:start], stop)
        cut = self._tail(seen)
        self._held = seen[cut:]
        return Fed(seen[:cut], None)

    def release(self) -> str:
        """Everything withheld, for the end of the output."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, seen: str, old: int) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # (end, start, stop): the smallest is the winner
        for stop in self._stops:
            start = seen.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start, stop) < best):
                best = (start + len(stop), start, stop)
        return (best[1], best[2]) if best else None

    def _tail(self, seen: str) -> int:
        """Where the longest tail begins that is a proper beginning of some stop string; the length if none is."""
        cut = len(seen)
        for stop in self._stops:
            at = seen.find(stop[0], max(0, len(seen) - len(stop) + 1))
            while 0 <= at < cut:
                if stop.startswith(seen[at:]):
                    cut = at
                    break
                at = seen.find(stop[0], at + 1)
        return cut
