"""One step as a transaction, for every kind of executor: take the changes in, compute, then commit or void.

What is computed, and how, is the caller's (`compute`). Whatever goes wrong ends as a StepResult with a failure; nothing
escapes to the loop.

After a failure every request that the step names is forgotten and the pages it would have written are voided. Steps
sent before the scheduler knew fail in turn if they name such a request or page, so no garbage is ever read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from protocol.columns import i32
from protocol.messages import Limits, NewRequest, RowError, Step, StepFailure, StepResult, TokenLogprobs
from runner.batch import BAD_STEP, OVER_LIMIT, Batch, Int32s, Int64s, Rows, StepError
from runner.inventory import HASH_BYTES, Inventory
from runner.pages import PageChecker
from runner.params import ParamError

log = logging.getLogger("triptych.runner")

VOIDED_PAGE = "voided_page"
INTERNAL_ERROR = "internal_error"
_NO_PAGES = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What `compute` returns: a token for each row with `samples` set, in order; `bad` maps an index among those
    to (code, message): that row fails alone and its token is meaningless."""

    tokens: Int32s
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)


Compute = Callable[[Step, Rows], Sampled]


class StepMachine:
    """Owns the batch and the inventory. `checker`, where given, watches that the step keeps the paging rules."""

    def __init__(self, limits: Limits, checker: PageChecker | None = None) -> None:
        self.batch = Batch(limits)
        self.inventory = Inventory(limits.num_blocks)
        self._checker = checker
        self._page_size = limits.block_size

    def clear(self) -> None:
        """A new scheduler: forget all residents, keep the pages and what they hold."""
        self.batch.clear()
        if self._checker:
            self._checker.clear()

    def run(self, step: Step, compute: Compute) -> StepResult:
        """Execute `step`. Never raises; timings are left to the caller."""
        errors: list[RowError] = []
        try:
            rows = self._take_in(step, errors)
            sampled = compute(step, rows)
            return self._commit(step, rows, sampled, errors)
        except StepError as error:
            failure = StepFailure(error.code, str(error))
        except Exception as error:
            log.exception("step %d failed", step.step_id)
            failure = StepFailure(INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        self._void(step)
        return StepResult(step.epoch, step.step_id, failure=failure)

    def _take_in(self, step: Step, errors: list[RowError]) -> Rows:
        batch = self.batch
        for request in np.frombuffer(step.left, "<u8").tolist():
            self._forget(request)
        self._check_filled(step)
        self._take_swaps(step)
        for new in step.new:
            self._admit(new, errors)
        slots = batch.lookup(step.ids)
        if step.grow_rows:
            self._grow(slots[_indices(step.grow_rows, len(slots))], i32(step.grow_counts), i32(step.grow_blocks))
        rows = batch.rows(slots, i32(step.num_tokens))
        if self._checker:
            self._checker.check_step(batch, rows)
        return rows

    def _check_filled(self, step: Step) -> None:
        pages = i32(step.filled_blocks)
        if len(step.filled_hashes) != len(pages) * HASH_BYTES:
            raise StepError(BAD_STEP, f"{len(pages)} filled blocks with {len(step.filled_hashes)} bytes of hashes")
        self.batch.check_pages(pages, "filled blocks")

    def _take_swaps(self, step: Step) -> None:
        out, back = swap_pairs(step.swap_out), swap_pairs(step.swap_in)
        for pairs in (out, back):
            self.batch.check_pages(pairs[:, 0], "swap")
            host = pairs[:, 1]
            if len(host) and (host.min() < 0 or host.max() >= self.batch.limits.host_blocks):
                raise StepError(OVER_LIMIT, f"a swap names a host block outside 0..{self.batch.limits.host_blocks - 1}")
        if self._checker:
            self._checker.swapped(out, back)
        self._hand_over(back[:, 0])

    def _forget(self, request: int) -> None:
        slot = self.batch.slot(request)
        if slot is not None:
            if self._checker:
                self._checker.released(self.batch.pages(slot))
            self.batch.remove(request)

    def _admit(self, new: NewRequest, errors: list[RowError]) -> None:
        self._forget(new.id)
        slot = self.batch.add(new)
        pages = self.batch.pages(slot)
        cached = pages[: new.num_computed // self._page_size]
        if self._checker:
            self._checker.admitted(new.id, new.num_computed, pages)
        if len(self.inventory.voided(cached)):
            lost = self.inventory.voided(cached).tolist()
            raise StepError(VOIDED_PAGE, f"request {new.id} counts on pages {lost[:8]}, whose step failed")
        self.inventory.handed_over(pages[len(cached) :])
        try:
            self.batch.params.set(slot, new.params)
        except ParamError as error:
            self.batch.dead[slot] = True
            errors.append(RowError(new.id, new.incarnation, error.code, str(error)))

    def _grow(self, slots: Int64s, counts: Int32s, pages: Int32s) -> None:
        self.batch.grow(slots, counts, pages)
        if self._checker:
            self._checker.grown(pages)
        self._hand_over(pages)

    def _hand_over(self, pages: Int32s) -> None:
        self.batch.check_pages(pages, "step")
        self.inventory.handed_over(pages)

    def _commit(self, step: Step, rows: Rows, sampled: Sampled, errors: list[RowError]) -> StepResult:
        batch = self.batch
        slots = rows.slots[rows.samples]
        tokens = np.asarray(sampled.tokens, np.int32)
        if sampled.bad:
            bad = np.zeros(len(slots), np.bool_)
            bad[list(sampled.bad)] = True
            for index, (code, message) in sampled.bad.items():
                slot = int(slots[index])
                errors.append(RowError(int(batch.ids[slot]), int(batch.incarnations[slot]), code, message))
            batch.dead[slots[bad]] = True
            slots, tokens = slots[~bad], tokens[~bad]
        positions = batch.num_tokens[slots]
        batch.advance(rows, slots, tokens)
        if sampled.bad:
            self._undo_progress(rows)
        self._record_filled(step)
        return StepResult(
            step.epoch,
            step.step_id,
            ids=batch.ids[slots].tobytes(),
            incarnations=batch.incarnations[slots].tobytes(),
            positions=positions.tobytes(),
            tokens=tokens.tobytes(),
            logprobs=sampled.logprobs,
            errors=errors,
        )

    def _record_filled(self, step: Step) -> None:
        if step.filled_blocks:
            hashes = np.frombuffer(step.filled_hashes, np.uint8).reshape(-1, HASH_BYTES)
            self.inventory.filled(i32(step.filled_blocks), hashes)
        if self.batch.dead.any():
            # A dead row's pages were computed from bad values, or are not computed any more: nobody may reuse them.
            for slot in np.flatnonzero(self.batch.dead).tolist():
                self._void_pages(self._unfinished(slot))

    def _undo_progress(self, rows: Rows) -> None:
        """A row that died in this step stands where it stood before it."""
        dead = self.batch.dead[rows.slots]
        self.batch.num_computed[rows.slots[dead]] = rows.starts[dead]

    def _unfinished(self, slot: int) -> Int32s:
        """The pages of a dead row from where it died on; earlier ones hold what any other request would put there."""
        return self.batch.pages(slot)[int(self.batch.num_computed[slot]) // self._page_size :]

    def _void_pages(self, pages: Int32s) -> None:
        self.inventory.void(pages)
        if self._checker:
            self._checker.voided(pages)

    def _void(self, step: Step) -> None:
        """Forget what a failed step names. It may be malformed in any way: read of it only what can be read."""
        requests = [new.id for new in step.new]
        if len(step.ids) % 8 == 0:
            requests += np.frombuffer(step.ids, "<u8").tolist()
        counts = i32(step.num_tokens) if len(step.num_tokens) % 4 == 0 else _NO_PAGES
        widest = int(counts.max()) if len(counts) else 0
        for request in requests:
            slot = self.batch.slot(request)
            if slot is None:
                continue
            start = int(self.batch.num_computed[slot])
            first, last = start // self._page_size, -(-(start + widest) // self._page_size)
            self._void_pages(self.batch.pages(slot)[first:last])
            self._forget(request)
        if len(step.filled_blocks) % 4 == 0:
            pages = i32(step.filled_blocks)
            self.inventory.take_back(pages[(pages > 0) & (pages < self.batch.limits.num_blocks)])


def _indices(column: bytes, limit: int) -> Int32s:
    rows = i32(column)
    if len(rows) and (rows.min() < 0 or rows.max() >= limit):
        raise StepError(BAD_STEP, f"a row index is outside 0..{limit - 1}")
    return rows


def swap_pairs(column: bytes) -> Int32s:
    """A swap column as [n, 2]: device page, host page."""
    flat = i32(column)
    if len(flat) % 2:
        raise StepError(BAD_STEP, "a swap list of odd length")
    return flat.reshape(-1, 2)
