"""Is a forecast of the batch's fullest hour right? What it said at admissions, against what the same rows came to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ops.replay.engine import Coast
from ops.replay.workload import Workload
from protocol.messages import Outputs, Step
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler
from scheduler.interface import Scheduler
from scheduler.policies.admission import Candidate
from scheduler.policies.forecast import Forecast
from scheduler.policies.peak import Outlook
from scheduler.presets import Strategies

MOST_PAIRS = 100
APART_NS = 500_000_000
"""Virtual time between two forecasts that are looked at: neighbours say the same."""


class NotingForecast(Forecast):
    """Forecast admission that keeps what it went by when it last let somebody in."""

    noted: Outlook | None = None

    def admitted(self, candidate: Candidate) -> None:
        super().admitted(candidate)
        self.noted = self.outlook


class NotingScheduler(CoreScheduler):
    """The serving scheduler with such an admission policy, whatever its configuration says."""

    def choose_strategies(self, config: SchedulerConfig, block_size: int) -> Strategies:
        chosen = super().choose_strategies(replace(config, admission_policy="forecast"), block_size)
        return replace(chosen, admission=NotingForecast(chosen.admission.options))


class PeakWatcher:
    """Watches a run of a NotingScheduler. Knows from the trace how long each answer will be."""

    def __init__(self, workload: Workload) -> None:
        self._ends = np.array([row.input_tokens + row.output_tokens for row in workload.rows], np.int64)
        self._next_ns = 0
        self._pairs: list[tuple[float, float]] = []

    def arrived(self, request: int, now_ns: int) -> None: ...

    def cancelled(self, request: int, now_ns: int, *, live: bool) -> None: ...

    def stepped(self, step: Step, sent_ns: int, begin_ns: int, end_ns: int) -> None: ...

    def told(self, outputs: Outputs, now_ns: int) -> None: ...

    def coasted(self, run: Coast) -> None: ...

    def looks_ns(self) -> int:
        return 1 << 62

    def passed(self, scheduler: Scheduler, now_ns: int) -> None:
        assert isinstance(scheduler, NotingScheduler)
        policy, table = scheduler.strategies.admission, scheduler.table
        assert isinstance(policy, NotingForecast)
        outlook, policy.noted = policy.noted, None
        if outlook is None or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + APART_NS
        rows = table.order
        ends = self._ends[table.id[rows].astype(np.int64)]
        self._pairs.append((outlook.peak, float(real_peak(table.known[rows], ends, scheduler.block_size))))

    def figures(self) -> dict[str, float]:
        if not self._pairs:
            return {}
        forecast, real = np.array(self._pairs).T
        return {
            "forecasts": float(len(self._pairs)),
            "above": float((real > forecast).mean()),
            "bias": float((real / forecast).mean()),
        }

    def pairs(self) -> list[tuple[float, float]]:
        """(forecast, real), thinned."""
        return [
            (round(forecast, 1), real) for forecast, real in self._pairs[:: -(-len(self._pairs) // MOST_PAIRS) or 1]
        ]


def real_peak(known: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], block_size: int) -> int:
    """The most blocks that rows [R] hold together if each goes on a token a step to its end; nobody joins them."""
    left = ends - known
    steps: npt.NDArray[np.int64] = np.arange(0, max(int(left.max()), 1), max(block_size // 4, 1))
    held = -(-(known + steps[:, None]) // block_size)
    return int((held * (steps[:, None] < left)).sum(axis=1).max())
