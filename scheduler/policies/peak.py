"""How many blocks a batch will hold at its fullest, if its rows end as observed outputs do. Pure; decides nothing.

After arXiv 2507.10150: not the sum of what each row may take, but the highest point of what they hold together while
some grow and others end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.policies.lengths import Floats, Ints, rising

GROWTH = rising(8, 1 << 16, 1.2)
"""The points in time that are looked at [K], as blocks that a row which decodes has grown by until then.

Whole blocks, so that rounding a row's tokens up to blocks now is rounding them up at each point.
"""
POINTS = len(GROWTH)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a test went by, for those who ask: blocks that the batch with the newcomer is forecast to hold at its
    fullest, when, and how many there are."""

    peak: float
    steps: int
    capacity: int
    confidence: float
    observed: int

    def __str__(self) -> str:
        return (
            f"with it the batch would hold {self.peak:.0f} blocks at its fullest, in about {self.steps} steps, of "
            f"{self.capacity} that there are (at {self.confidence:.1%} confidence, from {self.observed} requests that "
            "have ended)"
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """Blocks held at each point [K]: the mean, its variance, and the most that is possible."""

    mean: Floats
    variance: Floats
    most: Floats

    def __add__(self, other: Curve) -> Curve:
        """Both together, which end independently."""
        return Curve(self.mean + other.mean, self.variance + other.variance, self.most + other.most)

    def __sub__(self, other: Curve) -> Curve:
        """This without a part of it."""
        variance = np.maximum(self.variance - other.variance, 0.0)
        return Curve(self.mean - other.mean, variance, self.most - other.most)

    def peak(self, z: float) -> tuple[float, int]:
        """The most blocks held at any point, `z` standard deviations above the mean, and that point's index."""
        high = np.minimum(self.mean + z * np.sqrt(self.variance), self.most)
        at = int(high.argmax())
        return float(high[at]), at


NOTHING = Curve(np.zeros(POINTS), np.zeros(POINTS), np.zeros(POINTS))


def last_point(left: npt.NDArray[np.integer], block_size: int) -> Ints:
    """The point at which rows that may have so many more outputs end at the latest [R]."""
    return np.searchsorted(GROWTH, -(-left // block_size))


def curve_of(alive: Floats, group: Ints, now: Floats, last: Ints, final: Floats) -> Curve:
    """What rows [R] hold together. `alive` [G, K] is the chance that a row of a group still runs at a point.

    A row that runs holds `now + GROWTH` blocks before the point `last`, `final` blocks at it, and nothing after it.
    Rows are summed by group and end first, so that the cost is a few passes over R and over [groups present, K].
    """
    if not len(group):
        return NOTHING
    present = np.flatnonzero(np.bincount(group, minlength=len(alive)))
    index = np.zeros(len(alive), np.intp)
    index[present] = np.arange(len(present))
    points = min(int(last.max()) + 1, POINTS)
    cells, shape = index[group] * (points + 1) + np.minimum(last, points), (len(present), points + 1)

    def sums(weights: Floats) -> Floats:
        return np.bincount(cells, weights, minlength=shape[0] * shape[1]).astype(np.float64, copy=False).reshape(shape)

    def beyond(sums: Floats) -> Floats:
        """Of rows whose last point comes later."""
        return sums[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]

    growth = GROWTH[:points].astype(np.float64)
    count, held, squares = beyond(sums(np.ones(len(group)))), beyond(sums(now)), beyond(sums(now * now))
    size = held + count * growth + sums(final)[:, :-1]
    size_squares = squares + (2.0 * held + count * growth) * growth + sums(final * final)[:, :-1]
    chance = alive[present, :points]
    mean, variance, most = np.zeros(POINTS), np.zeros(POINTS), np.zeros(POINTS)
    mean[:points] = (chance * size).sum(axis=0)
    variance[:points] = (chance * (1.0 - chance) * size_squares).sum(axis=0)
    most[:points] = size.sum(axis=0)
    return Curve(mean, variance, most)


def curve_of_one(alive: Floats, now: float, last: int, final: float) -> Curve:
    """The same for one row, whose chances are `alive` [K]."""
    size = now + GROWTH.astype(np.float64)
    size[last:] = 0.0
    size[last : last + 1] = final
    mean = alive * size
    return Curve(mean, mean * (size - mean), size)
