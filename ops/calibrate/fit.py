"""Fits the linear cost model to measured steps: non-negative, robust, judged on steps it hasn't seen. All pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from runner.step_costs import LinearCost

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

HELD_OUT = 4
"""One in so many groups is kept from the fit and judges it."""
TRIMMED_AT = 4.0
"""A step further off than so many standard deviations (told by the median) was disturbed, and is left out."""
LEAST_STEPS = 32
_ROUNDS = 10
_MOST_KNEES = 48


class FitError(ValueError):
    """These steps determine no model; the message says why."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured steps, parallel columns [n]. `group` numbers the runs they come from: neighbours resemble each other."""

    tokens: Floats
    context: Floats
    rows: Floats
    ns: Floats
    group: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ns)

    def where(self, chosen: Bools) -> Samples:
        """The chosen ones."""
        return Samples(
            *(self.tokens[chosen], self.context[chosen], self.rows[chosen], self.ns[chosen], self.group[chosen])
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model. `error` and `error_p90` are those of the held-out steps (see `errors`); `trimmed` is the share of
    the others that was left out as disturbed."""

    cost: LinearCost
    error: float
    error_p90: float
    steps: int
    trimmed: float


def fit(samples: Samples) -> Fit:
    """The better of the models with and without overlap, by held-out error. FitError if there is too little to fit."""
    if len(samples) < LEAST_STEPS:
        raise FitError(f"{len(samples)} steps, at least {LEAST_STEPS} are needed")
    held = _held_out(samples.group)
    train, test = samples.where(~held), samples.where(held)
    found = []
    for overlap in (False, True):
        cost, trimmed = _robust(train, overlap)
        found.append(Fit(cost, *errors(cost, test), len(samples), trimmed))
    return min(found, key=lambda one: one.error)


def predict(cost: LinearCost, samples: Samples) -> Floats:
    """Nanoseconds [n] that the model gives the steps."""
    compute = cost.token_ns * samples.tokens
    base = np.maximum(cost.fixed_ns, compute) if cost.overlap else cost.fixed_ns + compute
    return np.asarray(base + cost.context_ns * samples.context + cost.row_ns * samples.rows)


def errors(cost: LinearCost, samples: Samples) -> tuple[float, float]:
    """Mean absolute error over the mean step, and the 90th percentile of the relative errors."""
    off = np.abs(predict(cost, samples) - samples.ns)
    return float(off.mean() / samples.ns.mean()), float(np.quantile(off / samples.ns, 0.9))


def nnls(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """The x >= 0 that minimises |columns·x - target|², and that minimum. For a handful of columns.

    The minimum has some support, on which it is the plain least-squares solution: all supports are tried.
    """
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    q, r = np.linalg.qr(columns / scale)
    aim = q.T @ target
    outside = float(target @ target - aim @ aim)
    width = columns.shape[1]
    best, least = np.zeros(width), float(aim @ aim)
    for count in range(1, width + 1):
        for support in combinations(range(width), count):
            part = r[:, support]
            solution = np.linalg.lstsq(part, aim, rcond=None)[0]
            loss = float(np.square(part @ solution - aim).sum())
            if loss < least and (solution >= 0).all():
                best, least = np.zeros(width), loss
                best[list(support)] = solution
    return best / scale, least + outside


def _held_out(group: npt.NDArray[np.int64]) -> Bools:
    """Every fourth run; every fourth step where there are too few runs."""
    numbers = np.unique(group)
    if len(numbers) >= 2 * HELD_OUT:
        return np.asarray(np.isin(group, numbers[HELD_OUT - 1 :: HELD_OUT]))
    return np.asarray(np.arange(len(group)) % HELD_OUT == HELD_OUT - 1)


def _robust(samples: Samples, overlap: bool) -> tuple[LinearCost, float]:
    """Fit again and again, each time without what was far off and with little weight on what was off (Huber's): what
    disturbs a step only ever makes it longer. With the share that was left out."""
    kept = np.ones(len(samples), np.bool_)
    cost = _least_squares(samples, overlap, np.full(len(samples), samples.ns.mean()))
    for _ in range(_ROUNDS):
        predicted = np.maximum(predict(cost, samples), 1.0)
        off = np.abs(samples.ns - predicted) / predicted
        deviation = max(1.4826 * float(np.median(off)), 2.5e-4)
        kept = off <= TRIMMED_AT * deviation
        cost = _least_squares(samples.where(kept), overlap, (predicted * np.maximum(1, off / deviation))[kept])
    return cost, float(1 - kept.mean())


def _least_squares(samples: Samples, overlap: bool, usual: Floats) -> LinearCost:
    """Weighted by 1/`usual` [n], the time of such steps: noise has about its root as standard deviation."""
    weight = 1 / np.sqrt(usual)
    common = [samples.context * weight, samples.rows * weight]
    aim = samples.ns * weight
    if not overlap:
        x, _ = nnls(np.stack([weight, samples.tokens * weight, *common], axis=1), aim)
        return _linear(x, overlap=False)
    best, least = LinearCost(0, 0, 0, 0), np.inf
    sizes = np.unique(samples.tokens)
    for knee in np.unique(np.quantile(sizes, np.linspace(0, 1, _MOST_KNEES), method="nearest")):
        # Up to the knee a step costs the fixed part, above it its tokens; the true model is judged, with its maximum.
        large = samples.tokens > knee
        columns = np.stack([~large * weight, large * samples.tokens * weight, *common], axis=1)
        x, _ = nnls(columns, aim)
        cost = _linear(x, overlap=True)
        loss = float((np.square(predict(cost, samples) - samples.ns) * np.square(weight)).sum())
        if loss < least:
            best, least = cost, loss
    return best


def _linear(x: Floats, *, overlap: bool) -> LinearCost:
    fixed, token, context, row = x.tolist()
    return LinearCost(fixed, token, context, row, overlap)
