"""What a step must read and compute at least, and how near to a device's ceilings it came. Pure arithmetic.

Decode reads every weight and every key and value once: memory is its ceiling. Prefill multiplies every token with every
weight: the matrix rate is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.costs import ModelShape, attention_flops, kv_bytes_per_token, layer_parameters

DECODE_GOAL, DECODE_GOAL_FROM = 0.85, 64
"""Fraction of the bandwidth roofline that a decode step should reach, and the batch from which on."""
PREFILL_GOAL = 0.60
"""Fraction of the measured matrix rate."""
IDLE_GOAL = 0.03
"""Part of a steady decode step for which the device may wait for the host."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """As measured on the device."""

    bytes_per_s: float
    flops_per_s: float


def decode_bytes(shape: ModelShape, batch: int, context: int, dtype_bytes: int = 2) -> int:
    """Bytes that a decode step of `batch` rows behind `context` tokens each must move.

    Read: the layers' matrices and the head once, a row of the embedding and `context` + 1 keys and values for each
    row of the batch. Written: a key and a value each. Activations and norms, below a thousandth, are left out.
    """
    weights = (layer_parameters(shape) + shape.hidden * shape.vocab + batch * shape.hidden) * dtype_bytes
    return weights + kv_bytes_per_token(shape) * batch * (context + 2)


def prefill_work(shape: ModelShape, tokens: int, cached: int = 0) -> int:
    """FLOPs of a prefill step of one row: the layers' matrices for each token, causal attention, the head once.

    Only what is computed counts: no embedding, and no head for tokens that don't sample.
    """
    return 2 * (layer_parameters(shape) * tokens + shape.hidden * shape.vocab) + attention_flops(shape, tokens, cached)


def decode_fraction(shape: ModelShape, batch: int, context: int, seconds: float, ceilings: Ceilings) -> float:
    """How much of the memory bandwidth a step of so many seconds used."""
    return decode_bytes(shape, batch, context, shape.dtype_bytes) / ceilings.bytes_per_s / seconds


def prefill_fraction(shape: ModelShape, tokens: int, seconds: float, ceilings: Ceilings) -> float:
    """How much of the matrix rate a step of so many seconds used."""
    return prefill_work(shape, tokens) / ceilings.flops_per_s / seconds


def blocks_needed(batch: int, tokens: int, block_size: int) -> int:
    """Pages for `batch` rows of `tokens` tokens, the null page included."""
    return batch * -(-tokens // block_size) + 1


def that_fit(points: Sequence[tuple[int, int]], spare: int, block_size: int, blocks: int) -> list[tuple[int, int]]:
    """The points (batch, context) whose rows, with `spare` tokens more each, fit so many blocks."""
    return [(rows, context) for rows, context in points if blocks_needed(rows, context + spare, block_size) <= blocks]
