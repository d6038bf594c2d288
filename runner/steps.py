"""One step as a transaction, for every kind of executor: take the changes in, compute, then commit or void.

What is computed, and how, is the caller's. `run` does a step from end to end; where the device computes while the host
goes on, the same in parts: `begin`, then `proceed` as soon as the work is on its way, and `settle` once the tokens are
there, in the order of the steps. Whatever goes wrong ends as a StepResult with a failure; nothing escapes to the loop.

After a failure every request that the step names is *void*: forgotten, and left out of later steps until it leaves or
arrives anew, because those steps were sent before the scheduler knew. The pages that a void request would have written
are void too; a step whose arrivals count on one fails in turn, so no garbage is ever read and no innocent row stops.
Steps that were under way when an earlier one failed fail with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from protocol.columns import i32, u64
from protocol.messages import (
    FetchKv,
    KvStatus,
    Limits,
    NewRequest,
    PromptLogprobs,
    RowError,
    Step,
    StepFailure,
    StepResult,
    TokenLogprobs,
)
from runner.batch import BAD_STEP, OVER_LIMIT, Batch, Bools, Int32s, Int64s, Rows, StepError
from runner.inventory import HASH_BYTES, Inventory
from runner.pages import PageChecker
from runner.params import ParamError

log = logging.getLogger("triptych.runner")

VOIDED_PAGE = "voided_page"
INTERNAL_ERROR = "internal_error"
OUT_OF_MEMORY = "out_of_memory"
DEVICE_ERROR = "device_error"


@dataclass(frozen=True, slots=True)
class Sampled:
    """What `compute` returns: a token for each row with `samples` set, in order; `bad` maps an index among those
    to (code, message): that row fails alone and its token is meaningless. `prompts` are of any rows."""

    tokens: Int32s
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)
    prompts: list[PromptLogprobs] = field(default_factory=list)


Compute = Callable[[Step, Rows], Sampled]


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much a step computes: tokens, the sum over its rows of what each has in the KV afterwards, rows."""

    tokens: int = 0
    context: int = 0
    rows: int = 0

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """The size of what these rows compute."""
        tokens = int(rows.counts.sum())
        return cls(tokens, int(rows.starts.sum(dtype=np.int64)) + tokens, len(rows))


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A step that was taken in, and of the requests that sample in it what a later step may change: parallel columns,
    one entry for each row with `samples` set."""

    step: Step
    rows: Rows
    errors: list[RowError]
    num_failures: int
    slots: Int64s
    residencies: Int64s
    ids: npt.NDArray[np.uint64]
    incarnations: Int32s
    positions: Int32s


class StepMachine:
    """Owns the batch and the inventory. `checker`, where given, watches that the step keeps the paging rules."""

    def __init__(self, limits: Limits, checker: PageChecker | None = None) -> None:
        self.batch = Batch(limits)
        self.inventory = Inventory(limits.num_blocks)
        self._checker = checker
        self._page_size = limits.block_size
        self._void_requests: set[int] = set()
        self._fault: StepError | None = None
        self._num_failures = 0
        self.size = StepSize()
        """Of the step that ran last."""

    def clear(self) -> None:
        """A new scheduler: forget all residents, keep the pages and what they hold."""
        self.batch.clear()
        self._void_requests.clear()
        self._fault = None
        if self._checker:
            self._checker.clear()

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        """A KV transfer has begun or ended. One that breaks the paging rules fails the next step, which names it."""
        pages = i32(order.block_ids)
        try:
            self.batch.check_pages(pages, "KV transfer")
            if status is None:
                self.inventory.handed_over(pages)
                if self._checker:
                    self._checker.transfer_began(order.id, pages)
            elif self._checker:
                first = order.num_tokens - len(pages) * self._page_size
                self._checker.transfer_ended(pages, status.num_tokens - first)
        except StepError as error:
            self._fault = error

    def run(self, step: Step, compute: Compute) -> StepResult:
        """Execute `step`. Never raises; timings are left to the caller."""
        try:
            begun = self.begin(step)
            sampled = compute(step, begun.rows)
            self.proceed(begun)
            return self.settle(begun, sampled)
        except Exception as error:
            return self.fail(step, error)

    def begin(self, step: Step) -> Begun:
        """Take the step's changes in. Raises StepError (or what a malformed step makes raise): then `fail` it."""
        errors: list[RowError] = []
        rows = self._take_in(step, errors)
        self.size = StepSize.of(rows)
        batch, slots = self.batch, rows.slots[rows.samples]
        return Begun(
            step, rows, errors, self._num_failures,
            slots, batch.residency[slots], batch.ids[slots], batch.incarnations[slots], batch.num_tokens[slots],
        )  # fmt: skip

    def proceed(self, begun: Begun) -> None:
        """The step is being computed: later ones may count on it. What it samples is known when it is settled."""
        self.batch.advance(begun.rows)
        self._record_filled(begun.step)

    def settle(self, begun: Begun, sampled: Sampled) -> StepResult:
        """The step was computed. Its result, a failure if an earlier step failed while this one was under way."""
        if begun.num_failures != self._num_failures:
            return self.fail(begun.step, StepError(VOIDED_PAGE, "a step failed while this one was under way"), begun)
        batch, tokens = self.batch, np.asarray(sampled.tokens, np.int32)
        here = batch.residency[begun.slots] == begun.residencies
        good = ~(here & batch.dead[begun.slots])
        for index, (code, message) in sampled.bad.items():
            if good[index]:
                errors = RowError(int(begun.ids[index]), int(begun.incarnations[index]), code, message)
                begun.errors.append(errors)
            good[index] = False
            if here[index]:
                batch.kill(int(begun.slots[index]), int(begun.positions[index]))
        if sampled.bad:
            self._take_back_dead()
        known = here & good
        batch.write(begun.slots[known], begun.positions[known], tokens[known])
        return StepResult(
            begun.step.epoch,
            begun.step.step_id,
            ids=begun.ids[good].tobytes(),
            incarnations=begun.incarnations[good].tobytes(),
            positions=begun.positions[good].tobytes(),
            tokens=tokens[good].tobytes(),
            logprobs=sampled.logprobs,
            errors=begun.errors,
            prompt_logprobs=sampled.prompts,
        )

    def fail(self, step: Step, error: Exception, begun: Begun | None = None) -> StepResult:
        """The step went wrong, and with it those that are under way. `begun`: it had proceeded already."""
        if isinstance(error, StepError):
            failure = StepFailure(error.code, str(error))
        elif isinstance(error, MemoryError):
            failure = StepFailure(OUT_OF_MEMORY, str(error) or "no memory for the step")
        else:
            log.error("step %d failed", step.step_id, exc_info=error)
            failure = StepFailure(INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        self._num_failures += 1
        if begun is not None:
            self._go_back(begun.rows)
        self._void(step)
        return StepResult(step.epoch, step.step_id, failure=failure)

    @property
    def sound(self) -> bool:
        """Whether the next step is to be expected to run: nothing is void, no resident is dead, nobody checks."""
        return not (self._void_requests or self._fault or self._checker or np.count_nonzero(self.batch.dead))

    def coast(self, step: Step, tokens: Int32s) -> None:
        """Many steps at once that only decode, where all is `sound`: each row of `step`, which says what they change
        together, computed one token and sampled one of `tokens` [k, R] in each of them."""
        batch = self.batch
        for request in u64(step.left).tolist():
            self._forget(request)
        slots = batch.lookup(step.ids)
        if step.grow_rows:
            self._grow(slots[i32(step.grow_rows)], i32(step.grow_counts), i32(step.grow_blocks))
        batch.coast(slots, tokens)
        self._record_filled(step)
        self.size = StepSize(len(slots), int(batch.num_computed[slots].sum(dtype=np.int64)), len(slots))

    def _take_in(self, step: Step, errors: list[RowError]) -> Rows:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        for request in u64(step.left).tolist() if step.left else ():
            self._forget(request)
        self._check_filled(step)
        self._take_swaps(step)
        for new in step.new:
            self._admit(new, errors)
        requests, counts = u64(step.ids), i32(step.num_tokens)
        if len(counts) != len(requests):
            raise StepError(BAD_STEP, f"{len(requests)} ids with {len(counts)} token counts")
        growth = (_indices(step.grow_rows, len(requests)), i32(step.grow_counts), i32(step.grow_blocks))
        ids = step.ids
        if self._void_requests:
            alive = np.array([request not in self._void_requests for request in requests.tolist()], np.bool_)
            ids, counts = requests[alive].tobytes(), counts[alive]
            growth = self._void_growth(alive, *growth)
        slots = self.batch.lookup(ids)
        if len(growth[0]):
            self._grow(slots[growth[0]], *growth[1:])
        self._check_arrivals(step)
        rows = self.batch.rows(slots, counts)
        if self._checker:
            self._checker.check_step(self.batch, rows)
        return rows

    def _void_growth(self, alive: Bools, rows: Int64s, counts: Int32s, pages: Int32s) -> tuple[Int64s, Int32s, Int32s]:
        """Pages that void requests grow by are void; what is left of the growth, as indices into the alive rows."""
        growing = alive[rows]
        kept = np.repeat(growing, counts)
        self._hand_over(pages[~kept])
        self._void_pages(pages[~kept])
        return (np.cumsum(alive) - 1)[rows[growing]], counts[growing], pages[kept]

    def _check_arrivals(self, step: Step) -> None:
        for new in step.new:
            slot = self.batch.slot(new.id)
            assert slot is not None
            lost = self.inventory.voided(self.batch.pages(slot)[: new.num_computed // self._page_size])
            if len(lost):
                raise StepError(VOIDED_PAGE, f"request {new.id} counts on pages {lost.tolist()[:8]}, whose step failed")

    def _check_filled(self, step: Step) -> None:
        if not (step.filled_blocks or step.filled_hashes):
            return
        pages = i32(step.filled_blocks)
        if len(step.filled_hashes) != len(pages) * HASH_BYTES:
            raise StepError(BAD_STEP, f"{len(pages)} filled blocks with {len(step.filled_hashes)} bytes of hashes")
        self.batch.check_pages(pages, "filled blocks")

    def _take_swaps(self, step: Step) -> None:
        if not (step.swap_out or step.swap_in or self._checker):
            return
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
        self._void_requests.discard(request)
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

    def _record_filled(self, step: Step) -> None:
        if step.filled_blocks:
            pages = i32(step.filled_blocks)
            hashes = np.frombuffer(step.filled_hashes, np.uint8).reshape(-1, HASH_BYTES)
            written = np.isin(pages, self.inventory.voided(pages), invert=True)
            self.inventory.filled(pages[written], hashes[written])
        if np.count_nonzero(self.batch.dead):
            self._take_back_dead()

    def _take_back_dead(self) -> None:
        """What a request without finite logits computed is nothing to offer to the next scheduler."""
        for slot in np.flatnonzero(self.batch.dead).tolist():
            self.inventory.take_back(self.batch.pages(slot))

    def _go_back(self, rows: Rows) -> None:
        """These rows weren't computed after all; who has left since is nobody's concern."""
        for request, slot, start in zip(rows.ids.tolist(), rows.slots.tolist(), rows.starts.tolist(), strict=True):
            if self.batch.slot(request) == slot:
                self.batch.num_computed[slot] = min(int(self.batch.num_computed[slot]), start)

    def _void_pages(self, pages: Int32s) -> None:
        self.inventory.void(pages)
        if self._checker:
            self._checker.voided(pages)

    def _void(self, step: Step) -> None:
        """Forget what a failed step names. It may be malformed in any way: read of it only what can be read."""
        requests = [new.id for new in step.new]
        if len(step.ids) % 8 == 0:
            requests += u64(step.ids).tolist()
        for request in requests:
            slot = self.batch.slot(request)
            if slot is not None:
                self._void_pages(self.batch.pages(slot)[int(self.batch.num_computed[slot]) // self._page_size :])
                self._forget(request)
        self._void_requests.update(requests)
        if len(step.filled_blocks) % 4 == 0:
            pages = i32(step.filled_blocks)
            self._void_pages(pages[(pages > 0) & (pages < self.batch.limits.num_blocks)])


def _indices(column: bytes, limit: int) -> Int64s:
    rows = i32(column).astype(np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= limit):
        raise StepError(BAD_STEP, f"a row index is outside 0..{limit - 1}")
    return rows


def swap_pairs(column: bytes) -> Int32s:
    """A swap column as [n, 2]: device page, host page."""
    flat = i32(column)
    if len(flat) % 2:
        raise StepError(BAD_STEP, "a swap list of odd length")
    return flat.reshape(-1, 2)
