"""What fills a step: which running rows are served, in which order, and how many requests may enter beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.table import RowTable, SlotArray

Counts = npt.NDArray[np.int32]

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What batch policies can be told. `adaptive` raises the long-prefill cap to an even share of the budget.

    `rotating`: decodes first, then prompts, each from a start that moves: who was served first is last the next time.
    """

    long_prefill_token_threshold: int = 0
    adaptive: bool = False
    decodes_first: bool = True
    rotating: bool = False
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0


class BatchPolicy(ABC):
    """Deals the token budget. `prefill_first` steps are prefill only while there is any prefill to do."""

    name: str
    prefill_first = False

    def __init__(self, options: BatchOptions | None = None) -> None:
        self.options = options or BatchOptions()
        self._fronts: list[int] = []

    def order(self, table: RowTable) -> SlotArray:
        """The running slots in the order in which they are served."""
        slots = table.order
        if self.options.rotating:
            return self._by_turn(table)
        if not self.options.decodes_first:
            return slots
        prefill = self.prefilling(table, slots)
        if not np.count_nonzero(prefill):
            return slots
        return np.concatenate((slots[~prefill], slots[prefill]))

    def _by_turn(self, table: RowTable) -> SlotArray:
        slots = table.order[np.argsort(table.turn[table.order])]
        prompt = self.prefilling(table, slots) | (table.computed[slots] < table.prompt[slots])
        groups = slots[~prompt], slots[prompt]
        self._fronts = [int(group[0]) for group in groups if len(group)]
        return np.concatenate(groups)

    def served(self, table: RowTable, slots: SlotArray) -> None:
        """A step serves these rows: of those that take turns, the first of each kind goes to the back."""
        for slot in self._fronts:
            if (slots == slot).any():
                table.to_the_back(slot)
        self._fronts = []

    @property
    def plans(self) -> bool:
        """Whether steps are planned by objectives."""
        return False

    @staticmethod
    def prefilling(table: RowTable, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Which of these rows have more than one known token left to compute."""
        behind: npt.NDArray[np.bool_] = table.target[slots] - table.computed[slots] > 1
        return behind

    def cap(self, num_eligible: int, budget: int) -> int:
        """Most tokens one request may compute in a step that `num_eligible` requests share."""
        threshold = self.options.long_prefill_token_threshold
        if not threshold or num_eligible <= 1:
            return UNLIMITED
        return max(threshold, budget // num_eligible) if self.options.adaptive else threshold

    @abstractmethod
    def admissions(self, num_running: int, num_waiting: int, num_slots: int) -> int:
        """How many requests may enter in this pass, slots and blocks permitting."""


class Mixed(BatchPolicy):
    """Prefill chunks share a step with decodes; requests come and go at every step."""

    name = "mixed"

    def admissions(self, num_running: int, num_waiting: int, num_slots: int) -> int:
        return num_waiting


class PrefillFirst(Mixed):
    """A step is prefill only while some can enter or are being prefilled; else it is decodes."""

    name = "prefill-first"
    prefill_first = True


class Serial(BatchPolicy):
    """One request at a time, to its end."""

    name = "serial"

    def admissions(self, num_running: int, num_waiting: int, num_slots: int) -> int:
        return 0 if num_running else 1


class Dynamic(BatchPolicy):
    """A batch is formed from whoever waits and runs to the end of its longest; nobody joins meanwhile."""

    name = "dynamic"

    def admissions(self, num_running: int, num_waiting: int, num_slots: int) -> int:
        return 0 if num_running else num_waiting


class Static(BatchPolicy):
    """As `dynamic`, but a batch starts only when it is full. A started batch isn't topped up.

    `patience` passes without enough waiters start a smaller one: the last requests of a run must end too.
    """

    name = "static"

    def __init__(self, options: BatchOptions | None = None, patience: int = 8) -> None:
        super().__init__(options)
        self._patience = patience
        self._waited = 0

    def admissions(self, num_running: int, num_waiting: int, num_slots: int) -> int:
        if num_running or not num_waiting:
            self._waited = 0
            return 0
        self._waited += 1
        if num_waiting >= num_slots or self._waited > self._patience:
            self._waited = 0
            return num_waiting
        return 0


def deal(wanted: Counts, budget: int) -> Counts:
    """Give each row what it wants, in order, until `budget` is used up; the row at the border gets the rest.

    `wanted` int32 [R], non-negative. Returns int32 [R] whose sum is min(budget, sum(wanted)).
    """
    if int(wanted.sum()) <= budget:
        return wanted
    before = np.cumsum(wanted) - wanted
    dealt: Counts = np.minimum(wanted, np.maximum(budget - before, 0)).astype(np.int32)
    return dealt
