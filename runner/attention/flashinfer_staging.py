"""How a step's index arrays reach the device: packed into one staging buffer, copied at once, fenced before reuse.

The host plans a step while the device is still at an earlier one, so the copies of a plan may run long after it was
made. A buffer that they read is written again only after the event that was recorded behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from runner.attention.base import AttentionError
from runner.cuda.device import Device, Event
from runner.metadata import Int32s

ALIGNMENT = 4
"""Of each packed array, in int32s: vector loads of 16 bytes stay aligned."""


@dataclass(slots=True, eq=False)
class Slot:
    """The staging memory of one plan. Whoever holds it may write; the copies that read it are issued meanwhile."""

    indices: Tensor
    """int32 [capacity], host."""
    planned: Sequence[Tensor]
    """uint8 [bytes] each, host: where a wrapper's plan writes what its kernels need to know, one for each wrapper."""
    read: Event | None = field(default=None)
    """Reached when everything that was issued while the slot was held is done."""


class PlanStaging:
    """A ring of `depth` slots (steps under way, plus the one that is planned) and the device memory they copy to.

    The device memory exists once: steps run in order on one stream, so a copy never overtakes a kernel that reads.
    """

    def __init__(self, device: Device, depth: int, capacity: int, planned_bytes: Sequence[int] = ()) -> None:
        """`capacity`: int32s of the largest plan, padding to ALIGNMENT included (see `packed_size`)."""
        self._device = device
        self._slots = [
            Slot(
                device.staging(capacity, torch.int32),
                [device.staging(count, torch.uint8) for count in planned_bytes],
            )
            for _ in range(depth)
        ]
        self._next = 0
        self.target = torch.zeros(capacity, dtype=torch.int32, device=device.torch)

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """The next slot, once nothing reads it any more. On leaving, what was issued meanwhile fences it."""
        slot = self._slots[self._next]
        if slot.read is not None:
            slot.read.synchronize()
            slot.read = None
        self._next = (self._next + 1) % len(self._slots)
        try:
            yield slot
        finally:  # also after an error: some of the copies may have been issued
            slot.read = self._device.event()

    def send(self, slot: Slot, arrays: Sequence[Int32s]) -> list[tuple[Tensor, Tensor]]:
        """Pack and copy: each array as (host tensor, device tensor), in order. AttentionError if they don't fit.

        Arrays of the same lengths always land at the same place, which is what CUDA graphs ask for.
        """
        places = offsets([len(array) for array in arrays])
        if places[-1] > len(slot.indices):
            raise AttentionError(f"a plan of {places[-1]} indices doesn't fit {len(slot.indices)}: beyond its limits")
        host = slot.indices.numpy()
        for array, begin in zip(arrays, places, strict=False):
            host[begin : begin + len(array)] = array
        used = places[-1]
        self.target[:used].copy_(slot.indices[:used], non_blocking=True)
        spans = [(begin, begin + len(array)) for array, begin in zip(arrays, places, strict=False)]
        return [(slot.indices[begin:end], self.target[begin:end]) for begin, end in spans]


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where arrays of these lengths begin when packed, and where the last ends."""
    padded = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
    return [0, *np.cumsum(padded, dtype=np.int64).tolist()]


def packed_size(lengths: Sequence[int]) -> int:
    """int32s that arrays of these lengths take."""
    return offsets(lengths)[-1]
