"""Keeps a forecast's confidence true: measures how often what came was more than what was said, and corrects by that.

Adaptive conformal inference (Gibbs & Candès, 2021). Knows of one forecast at a time; nothing about how it is made.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

RATE = 0.01
"""How far one outcome moves the level: past it, errors of long ago weigh as much as those of today."""
LEAST = 0.02
"""The level goes no lower than this part of what is allowed to be missed."""
PASSED = 0.5
"""A batch of which this part has gone has been at its fullest."""


class Calibration:
    """How many standard deviations above the mean a peak has to be forecast to hold as often as it is to.

    A quantile at each point in time is too low for the highest of all points. How much too low depends on how the
    points hang together, so it is measured: of a batch that has been let in, what its rows hold together is followed
    until most have gone. After each such batch the level, the share that the quantile lets pass, moves by
    rate · (allowed - missed).
    """

    def __init__(self, confidence: float) -> None:
        self.confidence = confidence
        self.outcomes = self.misses = 0
        self._allowed = self._level = 1.0 - confidence
        self._said: tuple[float, float] | None = None
        self._watched: tuple[float, float] | None = None
        self._youngest = self._rows = 0
        self.z = NormalDist().inv_cdf(confidence)

    def said(self, peak: float, shared: float) -> None:
        """The batch with a newcomer, who is let in, is forecast to hold so many blocks at its fullest, `shared` blocks
        of each row not counted."""
        self._said = peak, shared

    def look(self, held: npt.NDArray[np.integer], entered: npt.NDArray[np.integer]) -> None:
        """Rows that run [R]: the blocks they hold, and numbers that are larger the later they entered."""
        if self._watched is None:
            if self._said is not None and len(entered):
                self._watched, self._youngest, self._rows = self._said, int(entered.max()), len(entered)
            self._said = None
            return
        peak, shared = self._watched
        mine = held[entered <= self._youngest]
        if float(np.maximum(mine - shared, 0.0).sum()) > peak:
            self._learn(missed=True)
        elif len(mine) <= PASSED * self._rows:
            self._learn(missed=False)

    def preempted(self) -> None:
        """Somebody had to leave for want of blocks: what was forecast to fit didn't."""
        if self._watched is not None:
            self._learn(missed=True)

    def _learn(self, *, missed: bool) -> None:
        self.outcomes += 1
        self.misses += missed
        level = self._level + RATE * (self._allowed - missed)
        self._level = min(max(level, LEAST * self._allowed), 0.5)
        self.z = NormalDist().inv_cdf(1.0 - self._level)
        self._watched = self._said = None
