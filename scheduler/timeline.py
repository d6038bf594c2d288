"""What happened to one request, in order: short enough to keep, exact enough to explain a slow answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

MAX_EVENTS = 64


class Timeline:
    """The events of one request: (ns, what, details). After `MAX_EVENTS` the middle is cut, never the ends."""

    __slots__ = ("_events", "cut")

    def __init__(self) -> None:
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self.cut = 0

    def add(self, now_ns: int, what: str, **details: Any) -> None:
        """Note an event."""
        if len(self._events) >= MAX_EVENTS:
            del self._events[MAX_EVENTS // 2]
            self.cut += 1
        self._events.append((now_ns, what, details))

    def __iter__(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        return iter(self._events)

    def as_json(self, start_ns: int) -> list[dict[str, Any]]:
        """The events with milliseconds since `start_ns`."""
        return [{"ms": round((at - start_ns) / 1e6, 3), "event": what, **details} for at, what, details in self._events]


class History:
    """The records of the requests that ended last, by id."""

    def __init__(self, size: int = 1000) -> None:
        self._records: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._size = size

    def add(self, request_id: int, record: dict[str, Any]) -> None:
        """Keep a record, and forget the oldest beyond the size."""
        self._records[request_id] = record
        if len(self._records) > self._size:
            self._records.popitem(last=False)

    def get(self, request_id: int) -> dict[str, Any] | None:
        """The record of a request that has ended, if it is still kept."""
        return self._records.get(request_id)

    def labelled(self, label: str) -> list[dict[str, Any]]:
        """The records of all requests with this label, in the order in which they ended. Looks at each one kept."""
        return [record for record in self._records.values() if record["label"] == label]
