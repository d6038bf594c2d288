"""Notices a step that never returns, and ends the process: only a new one can compute again.

It runs beside the computing thread, at each heartbeat, and says as long as all is well that this process is alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from protocol.links import HEARTBEAT_INTERVAL_S

log = logging.getLogger("triptych.runner")

SLOWEST_TIMES = 10


class StepWatch:
    """Call `turn` twice a second. `alive` is called each time that no step is overdue, `give_up` when one is.

    The deadline is `deadline_s` (0: none), or ten times the slowest step so far, whichever is longer.
    """

    def __init__(self, deadline_s: float, alive: Callable[[], None], give_up: Callable[[], None]) -> None:
        self.slowest_s = 0.0
        """Of the steps that have ended; written by the computing thread."""
        self._deadline_s = deadline_s
        self._alive = alive
        self._give_up = give_up
        self._step = 0
        self._turns = 0

    def turn(self, busy_since_ns: int) -> None:
        """`busy_since_ns` names the running step; 0: none. Turns are counted: time in which all stood still isn't."""
        self._turns = self._turns + 1 if busy_since_ns and busy_since_ns == self._step else 0
        self._step = busy_since_ns
        deadline_s = max(self._deadline_s, SLOWEST_TIMES * self.slowest_s) if self._deadline_s else float("inf")
        if self._turns * HEARTBEAT_INTERVAL_S <= deadline_s:
            self._alive()
            return
        log.error("a step has not returned for %.1f s (step_deadline_s %g): ending", deadline_s, self._deadline_s)
        self._give_up()
