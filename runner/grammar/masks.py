"""Which ids may come next in rows that a grammar binds: a function of the grammar and of the outputs that are known.

A matcher is kept for as long as its row is resident, and reads each output once. A row that is resident anew has a new
one, which reads them all: nothing has to be restored after preemption or another process's death.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.batch import Batch, Int32s, Int64s
from runner.grammar.engine import GrammarError, Grammars, problem
from runner.params import Constraint

GRAMMAR_ERROR = "grammar_error"

Uint32s = npt.NDArray[np.uint32]


@dataclass(slots=True)
class Place:
    """Where in its grammar a row is, after `num_read` outputs. Once `ended` by an end id, nothing else may follow."""

    matcher: Any
    num_read: int = 0
    ended: bool = False


class _Stuck(Exception):
    """A matcher is in its error state, from which it never returns."""


class Masks:
    """Reads the outputs of rows with grammars, and says what may follow."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._end = vocab_size  # the id that stands for all end ids in a matcher's mask
        self._width = -(-(vocab_size + 1) // 32)

    def of(self, batch: Batch, slots: Int64s) -> tuple[Uint32s, dict[int, str]]:
        """Bits [S, words], the lowest first, of the ids that may come next in each of these slots. And, for rows of
        which that can't be told, why: their bits are all set."""
        masks = np.zeros((len(slots), self._width), np.uint32)
        failed: dict[int, str] = {}
        for row, slot in enumerate(slots.tolist()):
            mask, constraint = masks[row], batch.params.constraints.get(slot)
            if constraint is None:  # it has left: an earlier step has failed, and this one will
                mask[:] = 0xFFFFFFFF
                continue
            outputs = batch.tokens[slot, batch.num_prompt[slot] : batch.num_tokens[slot]]
            try:
                self._after(constraint, outputs, mask)
            except GrammarError as error:
                failed[row] = str(error)
                mask[:] = 0xFFFFFFFF
            if len(outputs) < batch.params.min_tokens[slot]:
                _forbid(mask, batch.params.end_ids[slot].tolist())
        return masks, failed

    def _after(self, constraint: Constraint, outputs: Int32s, mask: Uint32s) -> None:
        """Set what may follow these outputs; GrammarError if nothing may, or they aren't of the grammar."""
        if constraint.place is not None:
            try:
                return self._read(constraint, constraint.place, outputs, mask)
            except _Stuck:
                # What many texts have led a shared automaton to may have filled it: begin anew, with nobody else.
                self._grammars.drop(constraint.grammar)
        constraint.place = Place(self._grammars.matcher(constraint.grammar))
        try:
            return self._read(constraint, constraint.place, outputs, mask)
        except _Stuck as error:
            raise GrammarError(str(error)) from error

    def _read(self, constraint: Constraint, place: Place, outputs: Int32s, mask: Uint32s) -> None:
        ends, matcher = constraint.ends, place.matcher
        for token in outputs[place.num_read :].tolist():
            place.num_read += 1
            place.ended |= token in ends
            if not place.ended and not matcher.consume_token(token):
                raise _Stuck(f"output {place.num_read} (id {token}) breaks the grammar: {problem(matcher)}")
        complete = place.ended or (matcher.is_stopped() and not matcher.is_error())
        mask[:] = 0
        if not complete:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                raise _Stuck(f"the grammar can't be followed any further: {problem(matcher)}")
            complete = bool(mask[self._end >> 5] >> (self._end & 31) & 1)
            _clear(mask, (self._end, *ends))
        if complete:
            for token in ends:
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        if not mask.any():
            raise GrammarError("the grammar is complete, and the request has no end id that could say so")


def _clear(mask: Uint32s, ids: Collection[int]) -> None:
    for token in ids:
        mask[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))


def _forbid(mask: Uint32s, ids: Collection[int]) -> None:
    """Clear these bits, unless no other is set."""
    others = mask.copy()
    _clear(others, ids)
    if others.any():
        mask[:] = others


_BOUNDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, np.inf, -np.inf
).astype(np.float32)
"""For each byte of a mask, the highest that the logits of its eight ids may be."""


def bounds(masks: Uint32s, like: Tensor) -> Tensor:
    """Masks [S, words] as float32 [S, 32 * words] on the device of `like`: infinity for each id that may come, else
    its opposite. The smaller of that and a logit costs a tenth of what filling a tensor under a mask does."""
    table = torch.from_numpy(_BOUNDS).to(like.device)
    octets = torch.from_numpy(masks.view(np.uint8)).to(like.device)
    return torch.nn.functional.embedding(octets.int(), table).view(len(masks), -1)
