"""From the hidden states of prompts to a table of log-probabilities, a slice at a time, on any device.

However long a prompt is, the logits of at most `SLICE_ROWS` of its tokens exist. What a row says depends on it alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runner.prompts import SLICE_ROWS
from runner.sampler import LOGPROB_FLOOR, ranks_of


def tabulate(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    where: Tensor,
    targets: Tensor,
    most: int,
    vocab_size: int,
    *,
    leads: bool = True,
) -> Tensor:
    """hidden [T, d]; where, targets int64 [N] -> the table int32 [N, 2 + 2 * most] that `Told.messages` takes.

    Of a decoder that is split over ranks the first one has the logits; the others (not `leads`) only do their part, and
    get nothing.
    """
    tables = []
    for begin in range(0, len(where), SLICE_ROWS):
        logits = logits_of(hidden.index_select(0, where[begin : begin + SLICE_ROWS]))
        if leads:
            tables.append(_table(logits[:, :vocab_size], targets[begin : begin + SLICE_ROWS], most))
        del logits  # before there are those of the next slice
    return torch.cat(tables) if leads else torch.empty(0, dtype=torch.int32)


def _table(logits: Tensor, targets: Tensor, most: int) -> Tensor:
    values = torch.log_softmax(logits, 1)
    own = values.gather(1, targets.unsqueeze(1))
    best, ids = values.topk(most, 1)
    return torch.cat([_bits(own), ranks_of(values, own).unsqueeze(1), ids.to(torch.int32), _bits(best)], 1)


def _bits(values: Tensor) -> Tensor:
    """float32 as int32. -infinity is the floor, as is NaN: the row that has it fails when it samples."""
    return torch.nan_to_num(values, nan=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR).contiguous().view(torch.int32)
