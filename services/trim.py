"""Gives memory back to the system after very many connections at once. It hides no leak: nothing is kept for a request.

Otherwise the C library would keep what it had free then, for as long as anything above it is in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

MANY = 500
"""Connections at once after which it is worth looking."""
FEW = 8
"""Part of them (one in so many) that may still be open when the rest is given back."""


def malloc_trim() -> None:
    """Ask the C library to return free memory; one that can't is left alone. Takes a few ms for tens of MiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Trimmer:
    """Watches the number of connections; `look` is to be called about twice a second."""

    def __init__(self, trim: Callable[[], None] = malloc_trim) -> None:
        self._trim = trim
        self._most = 0

    def look(self, connections: int) -> None:
        """Trim once most of very many connections are gone."""
        self._most = max(self._most, connections)
        if self._most >= MANY and connections * FEW <= self._most:
            self._most = connections
            self._trim()
