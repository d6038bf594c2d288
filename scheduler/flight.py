"""What is remembered of a step until its result is back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.request import Request
from scheduler.table import SlotArray


@dataclass(frozen=True, slots=True)
class Flight:
    """A step whose result is awaited: which rows it computes, and which of them sample, in step order."""

    step_id: int
    ids: npt.NDArray[np.uint64]
    incarnations: npt.NDArray[np.int32]
    reached: npt.NDArray[np.int32]
    """Tokens that each row has in the KV after it."""
    sampled_slots: SlotArray
    sampled_ids: npt.NDArray[np.uint64]
    num_tokens: int
    num_copied: int
    swapped: list[tuple[int, int]]
    """(id, incarnation) of the requests whose KV this step copies to the host."""

    @property
    def num_attended(self) -> int:
        """Tokens that its rows have in the KV after it, together."""
        return int(self.reached.sum())

    def live(self, requests: Mapping[int, Request]) -> Iterator[tuple[Request, int]]:
        """The requests of its rows that still are what they were when it was sent, and what each has reached."""
        columns = (self.ids.tolist(), self.incarnations.tolist(), self.reached.tolist())
        for request_id, incarnation, reached in zip(*columns, strict=True):
            request = requests.get(request_id)
            if request is not None and request.incarnation == incarnation:
                yield request, reached
