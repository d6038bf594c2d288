"""What fills a step: how the token budget is dealt to the rows that run, and in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from scheduler.table import RowTable, SlotArray

Counts = npt.NDArray[np.int32]


class BatchPolicy(ABC):
    """Deals tokens to running rows. Whatever budget it leaves goes to admissions."""

    name: str

    @abstractmethod
    def order(self, table: RowTable) -> SlotArray:
        """The running slots in the order in which they are served."""

    @abstractmethod
    def cap(self, num_eligible: int) -> int:
        """Most tokens one request may compute in a step that `num_eligible` requests share."""


class Mixed(BatchPolicy):
    """Prefill chunks share a step with decodes. `decodes_first` serves rows with one token before longer ones."""

    name = "mixed"

    def __init__(self, long_prefill_token_threshold: int = 0, decodes_first: bool = True) -> None:
        self._threshold = long_prefill_token_threshold
        self._decodes_first = decodes_first

    def order(self, table: RowTable) -> SlotArray:
        slots = table.order
        if not self._decodes_first:
            return slots
        prefill = table.target[slots] - table.computed[slots] > 1
        if not prefill.any():
            return slots
        return np.concatenate((slots[~prefill], slots[prefill]))

    def cap(self, num_eligible: int) -> int:
        if self._threshold and num_eligible > 1:
            return self._threshold
        return 1 << 30


def deal(wanted: Counts, budget: int) -> Counts:
    """Give each row what it wants, in order, until `budget` is used up; the row at the border gets the rest.

    `wanted` int32 [R], non-negative. Returns int32 [R] whose sum is min(budget, sum(wanted)).
    """
    before = np.cumsum(wanted) - wanted
    dealt: Counts = np.minimum(wanted, np.maximum(budget - before, 0)).astype(np.int32)
    return dealt


BATCH_POLICIES: dict[str, type[Mixed]] = {Mixed.name: Mixed}
