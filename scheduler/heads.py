"""Who stands first and can't enter: for how many passes, and for how long, each admission test holds a request.

A test holds its request from the pass in which it bound until the next one, or until the request leaves the queue. At
most a few requests are touched in a pass, however many wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.policies.admission import AdmissionTest
from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler


class Heads:
    """Those that are held. Around each pass `begin_pass` and `end_pass` are called."""

    def __init__(self, core: CoreScheduler) -> None:
        self._core = core
        self._before: list[Request] = []
        self._held: list[Request] = []

    def hold(self, request: Request, test: AdmissionTest) -> None:
        """The head of those who wait was not admitted in this pass, because of `test`."""
        core = self._core
        request.held_back(test, core.now())
        self._held.append(request)
        if test == AdmissionTest.BLOCKS:
            request.outlook = core.strategies.admission.outlook
        core.stats.held_passes[test] = core.stats.held_passes.get(test, 0) + 1

    @property
    def any_held(self) -> bool:
        """Whether the last pass held somebody back."""
        return bool(self._held)

    def begin_pass(self) -> None:
        """From here on, who was held is held only if a test says so again."""
        self._before, self._held = self._held, []

    def end_pass(self) -> None:
        """Whoever stands first no longer, or may not be tested, is held by nothing."""
        for request in self._before:
            if request not in self._held:
                request.let_go(self._core.now())
        self._before = []

    def forget(self) -> None:
        """No passes were made lately: what held the heads since the last one isn't known."""
        for request in self._held:
            request.held_since_ns = None
        self._held = []
