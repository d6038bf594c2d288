"""What a step reads that is not weights or KV: packed on the host, copied once, and the last tokens that never left.

A sampled token is needed by the next step before the host has seen it, so it stays on the device (`TokenFeed`).
All else goes in one copy from a ring of staging buffers (`Inputs`), so that no step waits for an earlier one's copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.messages import Limits
from runner.batch import Batch, Bools, Int64s, Rows
from runner.cuda.device import Device, Event
from runner.metadata import BatchMetadata

SAMPLING_COLUMNS = 7
Column = Any
"""A numpy array on the host, a tensor on the device."""


class Ring:
    """Staging buffers in turn. One is written again only after the work that read it is done."""

    def __init__(self, device: Device, depth: int, count: int) -> None:
        self._device = device
        self._free = deque(device.staging(count, torch.int64) for _ in range(depth))
        self._read: deque[tuple[Event, Tensor]] = deque()

    def take(self) -> Tensor:
        """A buffer to write."""
        if not self._free:
            event, buffer = self._read.popleft()
            event.synchronize()
            return buffer
        return self._free.popleft()

    def give_back(self, buffer: Tensor, event: Event | None = None) -> None:
        """Whatever was issued so far may still read it, or what `event` stands for."""
        self._read.append((event or self._device.event(), buffer))
        if self._read[0][0].query():
            self._free.append(self._read.popleft()[1])


class Inputs:
    """Packs columns of 8-byte numbers, and copies them to the device together. `capacity`: numbers in one step."""

    def __init__(self, device: Device, depth: int, capacity: int) -> None:
        self._ring = Ring(device, depth, capacity)
        self._target = torch.zeros(capacity, dtype=torch.int64, device=device.torch)

    def send(self, columns: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.float64]]) -> list[Tensor]:
        """The columns on the device, in order. They hold until the next `send`."""
        buffer = self._ring.take()
        host = buffer.numpy()
        ends = np.cumsum([len(column) for column in columns]).tolist()
        begins = [0, *ends[:-1]]
        for column, begin, end in zip(columns, begins, ends, strict=True):
            host[begin:end] = column.view(np.int64)
        # On the stream of the kernels that read it: the copy comes after those of the step before.
        self._target[: ends[-1]].copy_(buffer[: ends[-1]], non_blocking=True)
        self._ring.give_back(buffer)
        sent = [self._target[begin:end] for begin, end in zip(begins, ends, strict=True)]
        kinds = [torch.float64 if column.dtype == np.float64 else torch.int64 for column in columns]
        return [part.view(kind) for part, kind in zip(sent, kinds, strict=True)]


class TokenFeed:
    """The token that each slot's request sampled last, on the device."""

    def __init__(self, device: Device, capacity: int) -> None:
        self._last = torch.zeros(capacity, dtype=torch.int64, device=device.torch)
        self._owner: Int64s = np.full(capacity, -1, np.int64)

    def holds(self, batch: Batch, slots: Int64s) -> Bools:
        """For which of these slots the newest token is here."""
        return np.asarray(self._owner[slots] == batch.residency[slots])

    def remember(self, batch: Batch, slots: Int64s, index: Tensor, tokens: Tensor) -> None:
        """`tokens` int64 [S] were sampled for `slots`, which are `index` on the device."""
        self._last.index_copy_(0, index, tokens)
        self._owner[slots] = batch.residency[slots]

    def fill(self, token_ids: Tensor, where: Tensor, slots: Tensor) -> None:
        """token_ids[where] = the newest tokens of `slots`, on the device."""
        token_ids.index_copy_(0, where, self._last.index_select(0, slots))


class StepColumns(NamedTuple):
    """A step's inputs, on the host or the device: T tokens, S rows that sample, F of those with a fed last token."""

    token_ids: Column
    positions: Column
    fed_where: Column
    """int64 [F]: which of the T tokens are on the device only."""
    fed_slots: Column
    last: Column
    """int64 [S]: where each row's last token is among the T."""
    slots: Column

    @classmethod
    def of(cls, batch: Batch, feed: TokenFeed, rows: Rows, meta: BatchMetadata) -> StepColumns:
        """The columns of `rows`, whose metadata is `meta`, on the host."""
        token_rows = np.repeat(rows.slots, rows.counts)
        slots = rows.slots[rows.samples]
        last = meta.qo_indptr[1:][rows.samples].astype(np.int64) - 1
        fed = feed.holds(batch, slots)
        return cls(
            token_ids=batch.tokens[token_rows, meta.positions].astype(np.int64),
            positions=meta.positions,
            fed_where=last[fed],
            fed_slots=slots[fed],
            last=last,
            slots=slots,
        )


def most_numbers(limits: Limits) -> int:
    """How many numbers a step's columns hold at most: those of its tokens, which of them tell of a prompt and of what,
    those of its rows, and what they sample with."""
    return 4 * limits.max_num_batched_tokens + (4 + SAMPLING_COLUMNS) * limits.max_num_seqs
