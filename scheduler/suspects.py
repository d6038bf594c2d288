"""Who may have made a step fail, and how the culprit is found: halves of the suspects run again, apart from all others,
until one fails alone. It gets the error; whoever is in a step that succeeds is cleared.

How their steps are built is `scheduler.quarantine`; how many tries it takes at most, docs/guarantees.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.messages import RequestStatus, StepFailure
from scheduler.flight import Flight
from scheduler.policies.batch import UNLIMITED
from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler

log = logging.getLogger("triptych.scheduler")

KNOCK_ON = "voided_page"
"""The code of a step that fails for want of what an earlier one should have written: it accuses nobody."""
OUT_OF_MEMORY = "out_of_memory"
RUNNER_DIED = "runner_died"
SUSPECT_DEATHS = 2
"""Deaths of the runner in a row with a request in flight, and no progress of it, that make it a suspect: one alone is
more likely an operator's doing."""
CALM_STEPS = 32
"""Steps that must succeed after a failure without a culprit before the next such failure is taken to be another one;
also after which a halved step size is doubled again, at first."""
MOST_CALM_STEPS = 1024


@dataclass(slots=True, eq=False)
class Suspect:
    """A request that was in a failed step, or in flight when a runner died."""

    request: Request
    reach: int = 0
    """Tokens that it had in the KV at the end of that step: who gets as far in one that succeeds is cleared."""
    most: int = UNLIMITED
    """Tokens that it may compute in a step of its own."""
    deaths: int = 0
    alone: int = 0
    """Steps that failed with nobody else in them."""


@dataclass(slots=True)
class _Case:
    """From the first failure until the last suspect is cleared or has ended."""

    code: str
    num_tokens: int
    culprits: int = 0


class Suspects:
    """All suspects of one scheduler, in groups that run apart. `groups` are in the order in which they are tried."""

    def __init__(self, core: CoreScheduler) -> None:
        self._core = core
        self._suspects: dict[int, Suspect] = {}
        self._case: _Case | None = None
        self.groups: list[list[Suspect]] = []
        self.lockstep = False
        """Whether one step is in flight at a time: a runner that dies doesn't say in which step."""
        self.their_turn = True
        self.blocked = False
        """Whether suspects lack blocks or slots: nobody else enters before them."""
        self.most_tokens = UNLIMITED
        """What a step may compute, after failures that were nobody's fault."""
        self._wary = 0
        self._good = 0
        self._patience = CALM_STEPS

    @property
    def open(self) -> bool:
        """Whether there is somebody to be kept apart."""
        return bool(self.groups or self._core.waiting.quarantined)

    @property
    def watching(self) -> bool:
        """Whether steps that succeed mean something."""
        return bool(self._suspects) or self.most_tokens < UNLIMITED or self._wary > 0

    # --- what happens to steps ------------------------------------------------------------------------------

    def step_failed(self, flight: Flight, failure: StepFailure, live: Iterable[Request]) -> None:
        """The `live` of a failed step's requests are suspects; one that was alone too often ends with the error."""
        if failure.code == KNOCK_ON:
            return
        reached = dict(zip(flight.ids.tolist(), flight.reached.tolist(), strict=True))
        accused = [self._suspect(request, reached[request.id]) for request in live]
        self._accuse(accused, failure, num_tokens=flight.num_tokens, alone=len(flight.ids) == 1)

    def runner_died(self, flights: Iterable[Flight]) -> None:
        """The runner is gone with these steps. Requests that were in flight at the last deaths too are suspects."""
        in_flight, num_tokens, num_rows = {}, 0, 0
        for flight in flights:
            num_tokens, num_rows = max(num_tokens, flight.num_tokens), max(num_rows, len(flight.ids))
            for request, reached in flight.live(self._core.requests):
                in_flight[request.id] = self._suspect(request, reached)
        for suspect in in_flight.values():
            suspect.deaths += 1
        accused = [suspect for suspect in in_flight.values() if suspect.deaths >= SUSPECT_DEATHS]
        if accused:
            self.lockstep = True
            failure = StepFailure(RUNNER_DIED, f"the runner died {accused[0].deaths} times in a row with it in flight")
            self._accuse(accused, failure, num_tokens=num_tokens, alone=len(in_flight) == num_rows == 1)

    def step_done(self, flight: Flight) -> None:
        """A step has succeeded: those who got as far as they had come are cleared."""
        if self._suspects:
            for request, reached in flight.live(self._core.requests):
                suspect = self._suspects.get(request.id)
                if suspect is not None and suspect.request is request and reached >= suspect.reach:
                    self._clear(suspect)
            self.settle()
        if self._case is None:
            self._wary = max(self._wary - 1, 0)
        if self.most_tokens < UNLIMITED:
            self._good += 1
            if self._good >= self._patience:
                self._resize(2 * self.most_tokens)

    # --- requests that move between schedulers ---------------------------------------------------------------

    def deaths_of(self, request: Request) -> int:
        """Deaths of runners in a row with the request in flight."""
        suspect = self._suspects.get(request.id)
        return suspect.deaths if suspect is not None and suspect.request is request else 0

    def blame(self, request: Request, deaths: int) -> None:
        """A request that came from elsewhere, where so many runners died with it in flight."""
        suspect = self._suspect(request, request.num_tokens - request.open)
        suspect.deaths = deaths
        if deaths >= SUSPECT_DEATHS:
            self.lockstep = request.quarantined = True
            self._case = self._case or _Case(RUNNER_DIED, self._core.token_budget)
            self._core.waiting.isolate(request)

    # --- suspicion ------------------------------------------------------------------------------------------

    def _suspect(self, request: Request, reached: int) -> Suspect:
        suspect = self._suspects.get(request.id)
        if suspect is None or suspect.request is not request:
            suspect = self._suspects[request.id] = Suspect(request)
        suspect.reach = max(suspect.reach, reached)
        return suspect

    def _accuse(self, accused: list[Suspect], failure: StepFailure, *, num_tokens: int, alone: bool) -> None:
        """One of these, or several together, made a step of `num_tokens` fail: halve them, or end the one."""
        if not accused:
            return
        self._case = self._case or _Case(failure.code, num_tokens)
        self.groups = [[one for one in group if one not in accused] for group in self.groups]
        for suspect in accused:
            suspect.request.quarantined = True
        if len(accused) > 1:
            half = (len(accused) + 1) // 2
            self.groups[:0] = [accused[:half], accused[half:]]
            return
        suspect = accused[0]
        suspect.alone += alone
        suspect.most = max(min(suspect.most, num_tokens) // 2, 1)
        if suspect.alone < self._core.config.max_step_failures:
            self.groups.insert(0, [suspect])
        else:
            self._convict(suspect, failure)

    def _convict(self, suspect: Suspect, failure: StepFailure) -> None:
        assert self._case is not None
        self._case.culprits += 1
        request = suspect.request
        request.end_code = failure.code
        request.end_message = f"{failure.message} (nobody else was in the last {suspect.alone} steps that it made fail)"
        log.error("request %d made steps fail (%s): it ends, the others go on", request.id, failure.code)
        self._core.stats.culprits += 1
        self._core.finish(request, RequestStatus.ERROR)
        self.settle()

    def _clear(self, suspect: Suspect) -> None:
        request = suspect.request
        del self._suspects[request.id]
        if request.quarantined:
            request.timeline.add(self._core.now(), "cleared")
            self._core.waiting.release(request, self._core.now())

    def settle(self) -> None:
        """Forget those who have ended, leave alone those who wait for something else, and close the case if nobody is
        left. Whoever comes back to the quarantine is a group of its own."""
        core = self._core
        self._suspects = {i: one for i, one in self._suspects.items() if core.requests.get(i) is one.request}
        groups = ([one for one in group if self._is_here(one)] for group in self.groups)
        self.groups = [group for group in groups if group]
        grouped = {one.request.id for group in self.groups for one in group}
        back = [request for request_id, request in core.waiting.quarantined.items() if request_id not in grouped]
        self.groups += [[self._suspect(request, 0)] for request in back]
        if not self.groups:
            self._close()

    def _is_here(self, suspect: Suspect) -> bool:
        request = suspect.request
        known = self._suspects.get(request.id) is suspect
        return known and request.quarantined and request.id not in self._core.waiting.parked

    # --- failures without a culprit -------------------------------------------------------------------------

    def _close(self) -> None:
        case, self._case = self._case, None
        self.lockstep = self.blocked = False
        self.their_turn = True
        if case is None or case.culprits:
            return
        log.warning("all requests of the failed step are cleared: nobody alone makes it fail (%s)", case.code)
        if case.code == OUT_OF_MEMORY or self._wary:
            self._resize(max(min(case.num_tokens, self.most_tokens) // 2, 1))
            self._patience = min(2 * self._patience, MOST_CALM_STEPS)
        self._wary = CALM_STEPS

    def _resize(self, most_tokens: int) -> None:
        self._good = 0
        self.most_tokens = most_tokens if most_tokens < self._core.limits.max_num_batched_tokens else UNLIMITED
        self._core.size_steps()
        log.warning("steps compute %d tokens at most from here on", self._core.token_budget)
