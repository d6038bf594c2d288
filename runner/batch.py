"""The persistent batch: one slot per resident request, columns over slots, updated by what a Step says changed.

It holds tokens, page tables and counters, never tensors; it neither computes nor decides. A steady decode row costs
its share of a few vector operations and no Python of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.columns import i32
from protocol.messages import Limits, NewRequest
from runner.params import ParamColumns

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

UNKNOWN_REQUEST = "unknown_request"
BAD_STEP = "bad_step"
OVER_LIMIT = "over_limit"


class StepError(Exception):
    """A step that can't be run as sent; becomes the StepResult's failure. `code` says which rule it breaks."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step that compute, in batch order, as parallel columns.

    Row r computes tokens [starts[r], starts[r] + counts[r]) of the request in slots[r]; it samples where samples[r].
    """

    ids: npt.NDArray[np.uint64]
    slots: Int64s
    starts: Int32s
    counts: Int32s
    samples: Bools

    def __len__(self) -> int:
        return len(self.slots)


class Batch:
    """Columns over slots. `capacity` is Limits.max_num_seqs: more residents than that are a StepError."""

    def __init__(self, limits: Limits) -> None:
        capacity = limits.max_num_seqs
        self.limits = limits
        self.max_pages = -(-limits.max_model_len // limits.block_size)
        self.ids = np.zeros(capacity, np.uint64)
        self.incarnations = np.zeros(capacity, np.int32)
        self.num_prompt = np.zeros(capacity, np.int32)
        self.num_tokens = np.zeros(capacity, np.int32)  # known tokens, sampled ones included
        self.prompt_from = np.zeros(capacity, np.int32)  # the first prompt token whose log-probability isn't told yet
        self.num_computed = np.zeros(capacity, np.int32)  # of these, how many are in the KV pages
        self.num_pages = np.zeros(capacity, np.int32)
        self.dead = np.zeros(capacity, np.bool_)  # failed alone: never samples again
        self.residency = np.zeros(capacity, np.int64)  # of a slot: changes whenever somebody comes or goes
        self.page_table = np.zeros((capacity, self.max_pages), np.int32)
        # One wider than a sequence may be: the token sampled at the very end is known but never computed.
        self.tokens = np.zeros((capacity, limits.max_model_len + 1), np.int32)
        self.params = ParamColumns(capacity, limits.vocab_size)
        self._slot_of: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._looked_up: tuple[bytes, Int64s] | None = None

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot(self, request: int) -> int | None:
        """The slot of a resident request."""
        return self._slot_of.get(request)

    def pages(self, slot: int) -> Int32s:
        """The pages of a slot's request, in order: a view."""
        return self.page_table[slot, : self.num_pages[slot]]

    def clear(self) -> None:
        """Forget every resident."""
        for request in list(self._slot_of):
            self.remove(request)

    def remove(self, request: int) -> None:
        """Forget a request. Unknown ids are ignored: it may have been forgotten with a failed step."""
        slot = self._slot_of.pop(request, None)
        if slot is None:
            return
        self.params.clear(slot)
        self.residency[slot] += 1
        self.num_pages[slot] = 0
        self.dead[slot] = False
        self._free.append(slot)
        self._looked_up = None

    def add(self, new: NewRequest) -> int:
        """Take in a request; its slot. StepError if it contradicts the limits or itself. An older residency goes."""
        tokens, pages = i32(new.tokens), i32(new.block_ids)
        where = f"request {new.id}"
        if not 0 < len(tokens) <= self.limits.max_model_len:
            raise StepError(OVER_LIMIT, f"{where}: {len(tokens)} tokens, limit {self.limits.max_model_len}")
        if not 0 <= new.num_computed < len(tokens) or not 0 < new.num_prompt <= len(tokens):
            raise StepError(
                BAD_STEP, f"{where}: {new.num_computed} computed and {new.num_prompt} prompt of {len(tokens)} tokens"
            )
        if tokens.min() < 0 or tokens.max() >= self.limits.vocab_size:
            raise StepError(BAD_STEP, f"{where}: a token id is outside 0..{self.limits.vocab_size - 1}")
        if len(pages) > self.max_pages or len(pages) * self.limits.block_size < new.num_computed:
            raise StepError(BAD_STEP, f"{where}: {len(pages)} pages for {len(tokens)} tokens, limit {self.max_pages}")
        self.check_pages(pages, where)
        self.remove(new.id)
        if not self._free:
            raise StepError(OVER_LIMIT, f"{where}: all {self.limits.max_num_seqs} slots are taken")
        slot = self._free.pop()
        self._slot_of[new.id] = slot
        self._looked_up = None
        self.ids[slot] = new.id
        self.incarnations[slot] = new.incarnation
        self.residency[slot] += 1
        self.num_prompt[slot] = new.num_prompt
        self.prompt_from[slot] = max(new.prompt_logprobs_from, 1)  # the very first one has none
        self.num_tokens[slot] = len(tokens)
        self.num_computed[slot] = new.num_computed
        self.dead[slot] = False
        self.tokens[slot, : len(tokens)] = tokens
        self.page_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        return slot

    def check_pages(self, pages: Int32s, where: str) -> None:
        """StepError unless every page exists and none is the null page."""
        if len(pages) and (pages.min() < 1 or pages.max() >= self.limits.num_blocks):
            raise StepError(BAD_STEP, f"{where}: a page is outside 1..{self.limits.num_blocks - 1}")

    def grow(self, slots: Int64s, counts: Int32s, pages: Int32s) -> None:
        """Append pages to page tables: the first counts[0] of `pages` to slots[0], and so on."""
        if len(slots) != len(counts) or counts.sum() != len(pages) or (len(counts) and counts.min() < 1):
            raise StepError(BAD_STEP, f"{len(pages)} new pages for {len(slots)} rows with counts {counts.tolist()[:8]}")
        self.check_pages(pages, "growth")
        if len(np.unique(slots)) != len(slots):
            raise StepError(BAD_STEP, "one row grows twice")
        held = self.num_pages[slots]
        if len(slots) and (held + counts).max() > self.max_pages:
            raise StepError(OVER_LIMIT, f"a request grows past {self.max_pages} pages")
        rows, offsets = spread(counts)
        self.page_table[slots[rows], held[rows] + offsets] = pages
        self.num_pages[slots] = held + counts

    def lookup(self, ids: bytes) -> Int64s:
        """Slots of an id column. StepError if an id is unknown or named twice."""
        if self._looked_up is not None and self._looked_up[0] == ids:
            return self._looked_up[1]
        requests = np.frombuffer(ids, "<u8").tolist()
        try:
            slots = np.fromiter(map(self._slot_of.__getitem__, requests), np.int64, len(requests))
        except KeyError as error:
            raise StepError(UNKNOWN_REQUEST, f"request {error.args[0]} is not resident") from None
        if len(np.unique(slots)) != len(slots):
            raise StepError(BAD_STEP, "one request has two rows")
        self._looked_up = (ids, slots)
        return slots

    def rows(self, slots: Int64s, counts: Int32s) -> Rows:
        """The rows to compute. StepError if one reaches past its tokens or its pages.

        A dead row goes on with the tokens that are known, since others may count on its pages, but samples no more.
        """
        if len(counts) != len(slots):
            raise StepError(BAD_STEP, f"{len(slots)} ids with {len(counts)} token counts")
        if len(slots) and counts.min() < 1:
            raise StepError(BAD_STEP, "a row of no tokens")
        dead = self.dead[slots]
        if np.count_nonzero(dead):
            known = self.num_tokens[slots] - self.num_computed[slots]
            counts = np.where(dead, np.minimum(counts, known), counts)
            slots, counts, dead = slots[counts > 0], counts[counts > 0], dead[counts > 0]
        total = int(counts.sum(dtype=np.int64))
        if total > self.limits.max_num_batched_tokens:
            raise StepError(OVER_LIMIT, f"{total} tokens in a step, limit {self.limits.max_num_batched_tokens}")
        starts = self.num_computed[slots]
        ends = starts + counts
        known = self.num_tokens[slots]
        self._refuse(ends > known, slots, "computes past its known tokens", ends, known)
        covered = self.num_pages[slots] * self.limits.block_size
        self._refuse(ends > covered, slots, "computes past its pages", ends, covered)
        return Rows(self.ids[slots], slots, starts, counts, (ends == known) & ~dead)

    def _refuse(self, wrong: Bools, slots: Int64s, what: str, got: Int32s, limit: Int32s) -> None:
        if np.count_nonzero(wrong):
            row = int(np.flatnonzero(wrong)[0])
            request = int(self.ids[slots[row]])
            raise StepError(BAD_STEP, f"request {request} {what}: up to {int(got[row])} of {int(limit[row])}")

    def advance(self, rows: Rows) -> None:
        """The rows count as computed; each that samples has one token more, which `write` makes known."""
        self.num_computed[rows.slots] += rows.counts
        self.num_tokens[rows.slots[rows.samples]] += 1

    def write(self, slots: Int64s, positions: Int32s, tokens: Int32s) -> None:
        """What was sampled, one token for each of `slots`."""
        self.tokens[slots, positions] = tokens

    def kill(self, slot: int, num_tokens: int) -> None:
        """The request never samples again, and has no more than `num_tokens` tokens."""
        self.dead[slot] = True
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = min(int(self.num_computed[slot]), num_tokens)

    def coast(self, slots: Int64s, tokens: Int32s) -> None:
        """These decode rows have been computed in k steps, and sampled `tokens` [k, R], which become known."""
        count = len(tokens)
        known = self.num_tokens[slots]
        self.tokens[slots, known + np.arange(count, dtype=np.int32)[:, None]] = tokens
        self.num_tokens[slots] = known + count
        self.num_computed[slots] += count


def spread(counts: npt.NDArray[np.integer] | Sequence[int]) -> tuple[Int64s, Int64s]:
    """For ragged rows of these lengths: (row of each element, its index within the row), both [sum(counts)]."""
    lengths = np.asarray(counts, np.int64)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) - begins[rows]


def written_pages(batch: Batch, rows: Rows) -> tuple[Int32s, Int64s]:
    """(page, offset in it) of every token that the rows write, in order; both [sum(counts)]."""
    index, offset = spread(rows.counts)
    positions = rows.starts[index] + offset
    size = batch.limits.block_size
    return batch.page_table[rows.slots[index], positions // size], positions % size
