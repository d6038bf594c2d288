"""The lives of a sample of requests: from when to when each waited, computed its prompt, decoded, was suspended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.messages import Control, Step

if TYPE_CHECKING:
    from scheduler.interface import Scheduler

MOST_SENTENCES = 8


class LaneRecorder:
    """Spans of (state, begin, end) in ns per sampled request. Told from steps and outputs, so that any class has them;
    what the scheduler itself has to say about a request is asked for at its end."""

    def __init__(self, sample: Iterable[int]) -> None:
        self.spans: dict[int, list[tuple[str, int, int]]] = {request: [] for request in sample}
        self.why: dict[int, list[str]] = {}
        self._state: dict[int, tuple[str, int]] = {}
        self._prefilling: set[int] = set()

    def arrived(self, request: int, now_ns: int) -> None:
        """It waits."""
        if request in self.spans:
            self._state[request] = ("waiting", now_ns)

    def stepped(self, step: Step, now_ns: int) -> None:
        """Those who enter begin or repeat their prefill; those who leave alive are preempted."""
        if step.left and self._state:
            for request in np.frombuffer(step.left, "<u8").tolist():
                if request in self._state:
                    self._enter(request, "preempted", now_ns)
        for new in step.new:
            if new.id in self._state:
                self._enter(new.id, "prefill", now_ns)

    def told(self, ids: npt.NDArray[np.int64], now_ns: int) -> None:
        """A token ends a prefill."""
        for request in [request for request in self._prefilling if (ids == request).any()]:
            self._enter(request, "decode", now_ns)

    def ended(self, request: int, now_ns: int, scheduler: Scheduler | None) -> None:
        """Its last span ends here."""
        if request in self._state:
            self._enter(request, "", now_ns)
            del self._state[request]
            if scheduler is not None:
                self.why[request] = _explained(scheduler, request)

    def _enter(self, request: int, state: str, now_ns: int) -> None:
        before, since = self._state[request]
        if now_ns > since:
            self.spans[request].append((before, since, now_ns))
        self._state[request] = (state, now_ns)
        self._prefilling.discard(request)
        if state == "prefill":
            self._prefilling.add(request)


class _Explained(msgspec.Struct):
    explanation: list[str] = []


def _explained(scheduler: Scheduler, request: int) -> list[str]:
    """The scheduler's own account of a request; nothing from a class that gives none."""
    reply = scheduler.control(Control(request, "explain", {"id": str(request)}))
    if not reply.ok:
        return []
    return msgspec.json.decode(reply.body, type=_Explained).explanation[:MOST_SENTENCES]
