"""May it enter, by what the batch is likely to hold at its fullest: learned from outputs that have ended.

`lengths` knows how long outputs get, `peak` what a batch holds then. Here both meet the pool.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scheduler.policies.admission import (
    AdmissionOptions,
    AdmissionPolicy,
    AdmissionTest,
    Candidate,
    Leaving,
    Running,
)
from scheduler.policies.calibration import Calibration
from scheduler.policies.lengths import LearnedLengths, bin_of
from scheduler.policies.peak import GROWTH, Curve, Outlook, curve_of, curve_of_one, last_point

LOOKS = 64
"""Passes that test somebody after which all curves are computed anew, whether or not anything has ended meanwhile."""
ROUNDING = 1e-6
"""Blocks by which sums of chances may miss a whole number."""


class Forecast(AdmissionPolicy):
    """Admit while the batch, at the fullest that it is likely to get, fits the pool.

    How likely is the `confidence`, to which `calibration` holds it. How long outputs get is learned from those that
    have ended, starting from all that limits allow. Blocks that several rows share are in the pool once: at its end
    each row is taken to free what it holds less an even part of what is counted twice. What others hold stays. With
    nothing else in the batch, what fits may enter.
    """

    name = "forecast"

    def __init__(self, options: AdmissionOptions) -> None:
        super().__init__(options)
        self._calibration = Calibration(options.confidence)
        self._said = 0.0
        self._lengths = LearnedLengths(options.memory, options.clip_max_new_tokens, GROWTH * options.block_size)
        self._running: tuple[Running, int] | None = None
        self._entered: list[Candidate] = []
        self._gone: list[Leaving] = []
        self._batch: Curve | None = None
        self._shared = 0.0
        """Blocks of each row that are another's too."""
        self._to_free = 0.0
        """Blocks, of those held when the pass began, that come free when the rows of the batch end."""
        self._taken = 0
        self._looks = 0

    def begin(self, running: Running, free: int, tokens: int, decoding: int) -> None:
        self._running, self._batch, self._taken = (running, free), None, 0
        self._entered, self._gone = [], []
        self._calibration.look(running.held, running.entered)

    def _opened(self, total: int) -> Curve:
        """What the rows that run will hold; made when somebody is first offered, since most passes admit nobody."""
        if self._batch is not None:
            return self._batch
        assert self._running is not None, "begin comes first"
        running, free = self._running
        self._looks += 1
        self._lengths.refresh(running.tenant, running.known - running.prompt, all_rows=self._looks % LOOKS == 0)
        twice = max(0, int(running.held.sum()) - (total - 1 - free))
        self._shared = twice / max(len(running.held) - 1, 1)
        self._batch, self._to_free = self._curve(running)
        for candidate in self._entered:
            self._batch += self._newcomer(candidate)
        for leaving in self._gone:
            self._without(leaving)
        return self._batch

    def _curve(self, rows: Running) -> tuple[Curve, float]:
        """What these rows hold over time, and what comes free of that which they hold now."""
        size, table = self.options.block_size, self._lengths.table
        own: npt.NDArray[np.float64] = np.maximum(rows.held - self._shared, 0.0)
        now = own + (-(-rows.known // size) - rows.held)
        final = own + np.maximum(-(-(rows.total - 1) // size) - rows.held, 0)
        group = self._lengths.rows(rows.tenant) * table.shape[1] + bin_of(rows.known - rows.prompt)
        alive = table.reshape(-1, table.shape[2])
        return curve_of(alive, group, now, last_point(rows.total - rows.known, size), final), float(own.sum())

    def _without(self, leaving: Leaving) -> None:
        assert self._batch is not None
        curve, freed = self._curve(leaving.rows)
        self._batch, self._to_free = self._batch - curve, self._to_free - freed

    def _newcomer(self, candidate: Candidate) -> Curve:
        """What the candidate would hold over time, beside what it shares with those that run."""
        size, outputs = self.options.block_size, candidate.known_tokens - candidate.prompt_tokens
        row = int(self._lengths.rows(np.array([candidate.tenant]))[0])
        alive = self._lengths.table[row, int(bin_of(np.array([outputs]))[0])]
        last = int(last_point(np.array([candidate.total_tokens - candidate.known_tokens]), size)[0])
        growth = max(-(-(candidate.total_tokens - 1) // size) + -candidate.known_tokens // size, 0)
        return curve_of_one(alive, float(candidate.whole), last, float(candidate.whole + growth))

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        return AdmissionTest.BLOCKS if self.lacking(candidate, free, total, others_scheduled) > 0 else None

    def lacking(
        self, candidate: Candidate, free: int, total: int, others_scheduled: bool, leaving: Leaving | None = None
    ) -> int:
        missing = max(candidate.whole, candidate.now) - free
        self.outlook, self._said = None, 0.0
        if not others_scheduled:
            return missing
        batch, to_free = self._opened(total), self._to_free
        if leaving is not None:
            curve, freed = self._curve(leaving.rows)
            batch, to_free = batch - curve, to_free - freed
        peak, at = (batch + self._newcomer(candidate)).peak(self._calibration.z)
        self._said = peak
        peak += total - 1 - free - self._taken - to_free  # what stays whoever ends: sessions, transfers, shared blocks
        steps = int(GROWTH[at]) * self.options.block_size
        self.outlook = Outlook(peak, steps, total - 1, self.options.confidence, self._lengths.observed)
        return max(missing, math.ceil(peak - ROUNDING) - (total - 1))

    def admitted(self, candidate: Candidate) -> None:
        if self._said:
            self._calibration.said(self._said, self._shared)
        self._entered.append(candidate)
        if self._batch is not None:
            self._batch += self._newcomer(candidate)
        self._taken += candidate.now

    def left(self, leaving: Leaving) -> None:
        self._gone.append(leaving)
        if self._batch is not None:
            self._without(leaving)

    def preempted(self, survivors: Running) -> None:
        self._calibration.preempted()

    def finished(self, tenant: int, outputs: int, *, at_limit: bool) -> None:
        self._lengths.observe(tenant, outputs, at_limit=at_limit)

    def inherit(self, replaced: AdmissionPolicy) -> None:
        if isinstance(replaced, Forecast) and replaced._learns_by == self._learns_by:
            self._lengths = replaced._lengths
            if replaced.options.confidence == self.options.confidence:
                self._calibration = replaced._calibration

    @property
    def _learns_by(self) -> tuple[int, int, int]:
        """The options on which what is learned depends."""
        return self.options.block_size, self.options.memory, self.options.clip_max_new_tokens
