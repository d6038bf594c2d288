"""How long outputs get, learned from requests that end: survival curves, one for everybody and one per tenant.

An estimate of hazards in the manner of Kaplan and Meier: a request that its limit ended, and one that still runs, says
only that its output would have been longer. Nobody's true length is ever known here before it is over.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

PRIOR = 4.0
"""Requests' worth of belief in what is assumed before there is data."""
MAX_TENANTS = 16
"""Tenants with a curve of their own. Beyond it the one that has been quiet for longest is forgotten."""
REFRESH = 32
"""Ends after which a curve is computed anew, once there are many; one in eight before that."""
_SURE = 1.0 - 1e-9
"""The most certain an end can be: beyond it survival would be 0 and nothing could be conditional on it."""


def rising(first: int, most: int, factor: float) -> Ints:
    """0, 1, … `first`, then each at least `factor` times the one before, up to one that is at least `most`."""
    values = list(range(first + 1))
    while values[-1] < most:
        values.append(max(values[-1] + 1, round(values[-1] * factor)))
    return np.array(values, np.intp)


EDGES = rising(16, 1 << 20, 1.15)
"""Borders of the bins [J + 1]. Bin j holds requests that run on after EDGES[j] outputs and not after EDGES[j + 1]."""
BINS = len(EDGES) - 1
_WIDTHS = np.diff(EDGES)
_MIDDLES = (EDGES[:-1] + EDGES[1:] - 1) / 2.0


def bin_of(outputs: npt.NDArray[np.integer]) -> Ints:
    """The bin of requests that have so many outputs and go on."""
    return np.minimum(np.searchsorted(EDGES, outputs, side="right") - 1, BINS - 1)


class OutputLengths:
    """What has been observed of one population, and its hazards. Older observations fade: the last `memory` count."""

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._ended = np.zeros(BINS)
        self._outlived = np.zeros(BINS)
        """Those that were cut off in a bin, and so outlived the bins before it."""
        self._partly = np.zeros(BINS)
        """The share of that bin that they lived through, summed."""
        self.observed = 0
        self.weight = 0.0

    def observe(self, outputs: int, *, at_limit: bool) -> None:
        """A request has ended after `outputs` (1 or more); `at_limit`: not of itself, it would have gone on."""
        for column in (self._ended, self._outlived, self._partly):
            column *= self._keep
        self.weight = self.weight * self._keep + 1.0
        self.observed += 1
        if at_limit:
            self._cut_off(np.array([outputs]), self._outlived, self._partly)
        else:
            self._ended[min(int(np.searchsorted(EDGES, outputs)) - 1, BINS - 1)] += 1.0

    @staticmethod
    def _cut_off(outputs: npt.NDArray[np.integer], outlived: Floats, partly: Floats) -> None:
        bins = bin_of(outputs)
        share = np.minimum((outputs - EDGES[bins]) / _WIDTHS[bins], 1.0)
        outlived += np.bincount(bins, minlength=BINS)
        partly += np.bincount(bins, weights=share, minlength=BINS)

    def hazards(self, running: npt.NDArray[np.integer], prior_ends: Floats, prior_risk: Floats) -> Floats:
        """The chance of ending in each bin for those that reach it [J]; 0 where nothing is known.

        `running` are the outputs so far of those that still run. Without them, those that end first would speak for
        all. The prior is as if `prior_ends` [J] of `prior_risk` [J] had ended in each bin.
        """
        outlived, partly = self._outlived.copy(), self._partly.copy()
        self._cut_off(running, outlived, partly)
        ended_later = self._ended[::-1].cumsum()[::-1]
        cut_later = outlived[::-1].cumsum()[::-1] - outlived
        at_risk = ended_later + cut_later + partly + prior_risk
        ends = self._ended + prior_ends
        return np.divide(ends, at_risk, out=np.zeros(BINS), where=at_risk > 0)


def survival(hazards: Floats, ahead: npt.NDArray[np.integer]) -> Floats:
    """The chance that a request in bin g goes on for `ahead[k]` more outputs [J, K]. 1 for `ahead` 0.

    Within a bin the hazard is even; a request is taken to be in the middle of its bin.
    """
    total = np.concatenate(([0.0], -np.log1p(-np.minimum(hazards, _SURE)).cumsum()))
    now = np.interp(_MIDDLES, EDGES, total)
    later = np.interp((_MIDDLES[:, None] + ahead[None, :]).ravel(), EDGES, total).reshape(BINS, len(ahead))
    return np.exp(now[:, None] - later)


class _Curve:
    """A population with a row in the table, and how far behind that row is."""

    def __init__(self, memory: float) -> None:
        self.lengths = OutputLengths(memory)
        self.unseen = 0
        self.last_seen = 0

    @property
    def stale(self) -> bool:
        return self.unseen > 0 and self.unseen >= min(REFRESH, self.lengths.observed // 8)


class LearnedLengths:
    """The populations: everybody (row 0), and tenants, whose hazards start at everybody's and leave them with data.

    `table` [populations, J, K] holds `survival` for the points `ahead` [K]. Before there is data, outputs are taken to
    end soon after `clip` tokens and nowhere before.
    """

    def __init__(self, memory: float, clip: int, ahead: npt.NDArray[np.integer]) -> None:
        self.memory, self.clip = memory, clip
        self._ahead = ahead
        self._everybody = _Curve(memory)
        self._tenants: dict[int, _Curve] = {}
        self._rows: dict[int, int] = {}
        self._row_of = np.zeros(1, np.intp)
        self._ends = 0
        last = min(int(np.searchsorted(EDGES, clip)), BINS - 1)  # the first bin in which nobody is below the clip
        self._prior_ends = np.where(np.arange(BINS) == last, PRIOR, 0.0)
        self._prior_risk = np.where(np.arange(BINS) <= last, PRIOR, 0.0)
        self._hazards = np.divide(self._prior_ends, self._prior_risk, out=np.zeros(BINS), where=self._prior_risk > 0)
        self.table = np.repeat(survival(self._hazards, ahead)[None], MAX_TENANTS + 1, axis=0)

    @property
    def observed(self) -> int:
        """Requests observed since the start."""
        return self._everybody.lengths.observed

    def observe(self, tenant: int, outputs: int, *, at_limit: bool) -> None:
        """A request of this tenant (a small number) has ended after `outputs`."""
        self._ends += 1
        curve = self._tenants.get(tenant)
        if curve is None:
            curve = self._tenants[tenant] = _Curve(self.memory)
            self._give_row(tenant)
        for population in (self._everybody, curve):
            population.lengths.observe(outputs, at_limit=at_limit)
            population.unseen += 1
        curve.last_seen = self._ends

    def _give_row(self, tenant: int) -> None:
        """A row of the table for a new tenant, if need be that of the one that has been quiet for longest."""
        row = len(self._tenants)
        if row > MAX_TENANTS:
            quiet = min((t for t in self._tenants if t != tenant), key=lambda t: self._tenants[t].last_seen)
            del self._tenants[quiet]
            row = self._rows.pop(quiet)
            self._row_of[quiet] = 0
        if tenant >= len(self._row_of):
            self._row_of = np.concatenate((self._row_of, np.zeros(tenant + 1, np.intp)))
        self._rows[tenant] = self._row_of[tenant] = row
        self.table[row] = self.table[0]

    def rows(self, tenants: npt.NDArray[np.integer]) -> Ints:
        """The row of the table for each of these tenants; everybody's for those without one."""
        known = (tenants >= 0) & (tenants < len(self._row_of))
        return np.where(known, self._row_of[np.where(known, tenants, 0)], 0)

    def refresh(self, tenants: npt.NDArray[np.integer], outputs: npt.NDArray[np.integer], *, all_rows: bool) -> None:
        """Bring the table up to date with what has ended, and with what these running rows [R] have lived to see.

        Only curves that have fallen behind are computed, unless `all_rows` says otherwise.
        """
        everybody = self._everybody
        if everybody.stale or all_rows:
            self._hazards = everybody.lengths.hazards(outputs, self._prior_ends, self._prior_risk)
            self.table[0], everybody.unseen = survival(self._hazards, self._ahead), 0
        for tenant, curve in self._tenants.items():
            if curve.stale or all_rows:
                prior = np.full(BINS, PRIOR)
                hazards = curve.lengths.hazards(outputs[tenants == tenant], PRIOR * self._hazards, prior)
                self.table[self._rows[tenant]], curve.unseen = survival(hazards, self._ahead), 0
