"""What each computed row was good for, told from the steps alone: whoever schedules, the sums come out the same way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.messages import NewRequest


class TokenAccounts:
    """Per request, how far it has been computed. A residency is the time between two admissions of one request.

    Only an admission and an end are looked at one by one; a step adds its counts to a column.
    """

    def __init__(self, count: int) -> None:
        self.prefill = self.decode = self.replayed = self.wasted = 0
        self.prompt = self.cached = 0
        self.lost = self.kept = 0
        self._scheduled: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._residency: dict[int, tuple[int, int, int, int]] = {}
        """Live requests: (prompt, furthest computed in earlier residencies, start of this one, scheduled before it)."""

    def admitted(self, new: NewRequest) -> None:
        """A step brings a request, for the first time or again; before `scheduled` of the same step."""
        known = self._residency.get(new.id)
        before = int(self._scheduled[new.id])
        if known is None:
            self.prompt += new.num_prompt
            self.cached += min(new.num_computed, new.num_prompt)
            furthest = new.num_computed
        else:
            furthest = self._settle(new.id, known)
            self.lost += known[2] + before - known[3]
            self.kept += new.num_computed
        self._residency[new.id] = (new.num_prompt, furthest, new.num_computed, before)

    def scheduled(self, ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int32] | int) -> None:
        """Steps compute `counts` [rows] tokens of these requests, or so many of each."""
        self._scheduled[ids] += counts

    def ended(self, request: int, outputs: int) -> None:
        """No more of this request. What was computed past the row of its last output but one was for nothing."""
        known = self._residency.pop(request, None)
        if known is None:
            return
        furthest = self._settle(request, known)
        wasted = max(0, furthest - known[0] - max(outputs - 1, 0))
        self.wasted += wasted
        self.decode -= wasted

    def finish(self) -> None:
        """The run is over: count what is still live."""
        for request, known in self._residency.items():
            self._settle(request, known)
        self._residency.clear()

    def _settle(self, request: int, known: tuple[int, int, int, int]) -> int:
        """Count a residency. Returns the position up to which the request has ever been computed."""
        prompt, furthest, start, before = known
        reached = start + int(self._scheduled[request]) - before
        self.replayed += max(0, min(furthest, reached) - start)
        fresh = max(start, furthest)
        self.prefill += max(0, min(reached, prompt) - fresh)
        self.decode += max(0, reached - max(fresh, prompt))
        return max(furthest, reached)
