"""Server-sent events out of a byte stream: `data` payloads only, whatever way the bytes were cut.

Not a general EventSource: event names, ids and retry hints are dropped, lines end with LF or CRLF.
"""

from __future__ import annotations


class SseParser:
    """Feeds on body bytes and gives back the payload of each complete event."""

    __slots__ = ("_data", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that `chunk` completes, in order. Comments and unknown fields yield nothing."""
        lines = (self._tail + chunk if self._tail else chunk).split(b"\n")
        self._tail = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
