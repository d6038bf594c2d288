"""Many steps at once, for a caller that knows what they will sample: a replay on a simulated runner, not a server.

While nobody comes, waits, enters or leaves and every row decodes, k steps are one arithmetic progression: each row has
one token more in each. Coasting writes down where k passes, executions and results would have ended, and leaves
exactly that: the same blocks under the same hashes in the same order, the same counters, the same learned pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from protocol.columns import pack_i32, pack_u64
from protocol.messages import Step
from scheduler.core import CoreScheduler
from scheduler.interface import Scheduler
from scheduler.policies.pace import StepSize
from scheduler.results import end_rows, output_charges
from scheduler.table import SlotArray

Int32s = npt.NDArray[np.int32]

MOST_STEPS = 4096


@dataclass(frozen=True, slots=True)
class Steady:
    """A batch that only decodes: its rows in the order of its steps, [R] each."""

    ids: bytes
    slots: SlotArray
    computed: Int32s
    """Tokens that each row has in the KV before the first step."""
    most: int
    """Steps that it can make: one of its rows ends with the last of them, or there are no blocks for more."""

    @property
    def first(self) -> StepSize:
        """The size of the first step; each one attends a token more in every row than the one before."""
        rows = len(self.slots)
        return StepSize(rows, int(self.computed.sum()) + rows, rows)


class Coasting:
    """Asks a scheduler for a steady batch, and moves it on."""

    def __init__(self, core: CoreScheduler) -> None:
        self._core = core

    @classmethod
    def of(cls, scheduler: Scheduler) -> Self | None:
        """None for any class but the one whose steps are known here, and where steps overlap."""
        if type(scheduler) is not CoreScheduler or scheduler.config.pipeline_depth != 1:
            return None
        return cls(scheduler)

    def steady(self) -> Steady | None:
        """The batch, if the next passes would do nothing but decode all of it; else None."""
        core, table = self._core, self._core.table
        batch = core.strategies.batch
        slots = table.order
        if (
            not 0 < len(slots) <= core.token_budget
            or len(core.waiting)
            or core.waiting.parked
            or core.flights
            or core.paused != "no"
            or batch.options.rotating
            or core.draining_pages.next_ns is not None
            or core.suspension.copies
            or core.external.orders
            or not core.sealing.settled
            or core.heads.any_held
        ):
            return None
        computed, known = table.computed[slots], table.known[slots]
        decodes = (computed + 1 == known) & (known == table.target[slots]) & (known > table.prompt[slots])
        if np.count_nonzero(decodes & table.sent[slots] & ~table.watched[slots]) < len(slots):
            return None
        left = table.total[slots] - known
        most = min(int(left.min()), MOST_STEPS)
        while most > 0 and int(self._growth(slots, computed, most).sum()) > core.pool.num_free:
            most //= 2
        return Steady(table.id[slots].tobytes(), slots, computed, most) if most > 0 else None

    def _growth(self, slots: SlotArray, computed: Int32s, steps: int) -> Int32s:
        """Blocks that each row takes in so many steps."""
        size = self._core.block_size
        growth: Int32s = np.maximum((computed + (steps + size - 1)) // size - self._core.table.blocks[slots], 0)
        return growth

    def coast(self, steady: Steady, tokens: Int32s, times_ns: Sequence[int]) -> Step:
        """Make as many steps as there are rows in `tokens` [k, R], at most `steady.most`, the last of them now.

        `times_ns` [k] is what each took. Rows may end with the last step and no earlier. Returns what a runner has to
        know of them all as if it were one step; the outbox isn't told of the tokens.
        """
        core, slots, steps = self._core, steady.slots, len(tokens)
        left, core.left = core.left, []
        grown = self._grow(steady, steps)
        self._write(steady, tokens)
        filled = core.sealing.filled()
        core.step_id += steps
        core.sealing.step_sent()
        core.sealing.step_done(core.step_id)
        core.suspension.step_sent()
        core.planner.coasted(steady.first, times_ns)
        core.external.park_idle_sessions()
        self._count(steady, steps)
        end_rows(core, slots, tokens[-1])
        return Step(
            epoch=core.epoch,
            step_id=core.step_id,
            ids=steady.ids,
            num_tokens=np.full(len(slots), steps, np.int32).tobytes(),
            left=pack_u64(left),
            grow_rows=pack_i32(list(grown)),
            grow_counts=pack_i32([len(blocks) for blocks in grown.values()]),
            grow_blocks=pack_i32([block for blocks in grown.values() for block in blocks]),
            filled_blocks=pack_i32([block for block, _ in filled]),
            filled_hashes=b"".join(block_hash for _, block_hash in filled),
        )

    def _grow(self, steady: Steady, steps: int) -> dict[int, list[int]]:
        """Hand out blocks in the order in which the rows would have come for them. Returns them by row."""
        core, table = self._core, self._core.table
        growth = self._growth(steady.slots, steady.computed, steps)
        growing = np.flatnonzero(growth)
        if not len(growing):
            return {}
        slots = steady.slots[growing]
        held = table.blocks[slots]
        turns = _in_order(growing, held * core.block_size - steady.computed[growing], growth[growing], core.block_size)
        grown: dict[int, list[int]] = {row: [] for row in growing.tolist()}
        for (_, row), block in zip(turns, core.pool.take(len(turns)), strict=True):
            grown[row].append(block)
        for slot, blocks in zip(slots.tolist(), grown.values(), strict=True):
            request = table.request[slot]
            assert request is not None
            request.blocks += blocks
        table.blocks[slots] = held + growth[growing]
        return grown

    def _write(self, steady: Steady, tokens: Int32s) -> None:
        """The tokens become known and are computed, but for the last one; blocks that are full of them are sealed."""
        core, table, slots = self._core, self._core.table, steady.slots
        steps, size = len(tokens), core.block_size
        computed, known = steady.computed + np.int32(steps), steady.computed + np.int32(1)
        full, sealed = computed // size, table.sealed[slots]
        filling = np.flatnonzero(full > sealed)
        for row, border in zip(filling.tolist(), (full[filling] * size - known[filling]).tolist(), strict=True):
            slot = int(slots[row])
            table.flush(slot)
            request = table.request[slot]
            assert request is not None
            request.data += tokens[:border, row].tobytes()
        table.computed[slots] = computed
        table.known[slots] = table.target[slots] = computed + np.int32(1)
        table.sealed[slots] = full
        newest = np.arange(max(0, steps - size), steps, dtype=np.int32)[:, None]
        table.tail[slots, (known + newest) % size] = tokens[newest[:, 0]]
        if not len(filling) or not core.config.enable_prefix_caching:
            return
        turns = _in_order(filling, (sealed[filling] + 1) * size - known[filling], full[filling] - sealed[filling], size)
        done = dict(zip(filling.tolist(), sealed[filling].tolist(), strict=True))
        for _, row in turns:
            request = table.request[int(slots[row])]
            assert request is not None
            core.sealing.seal(request, done[row], done[row] + 1)
            done[row] += 1

    def _count(self, steady: Steady, steps: int) -> None:
        """Tell those who count steps one by one, and those who only add."""
        core, rows = self._core, len(steady.slots)
        admission, queue, stats = core.strategies.admission, core.strategies.queue, core.stats
        charges = output_charges(core, steady.slots) if queue.wants_charges else None
        for _ in range(steps):
            admission.stepped(decoded=admission.counts_decodes)
            if charges is not None:
                queue.charge(charges)
        stats.steps += steps
        stats.step_rows = stats.step_tokens = rows
        stats.scheduled_tokens += rows * steps
        stats.generated_tokens += rows * steps


def _in_order(rows: npt.NDArray[np.integer], first: Int32s, counts: Int32s, apart: int) -> list[tuple[int, int]]:
    """(step, row) of events in order of steps, then rows: row r has `counts` of them, `apart` steps from each other,
    the first in step `first`."""
    return sorted(
        (start + apart * turn, row)
        for row, start, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True)
        for turn in range(count)
    )
