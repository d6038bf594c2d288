"""What a simulated step takes: pure functions from a step's size to nanoseconds. No clock, no tensors.

A step's size is three numbers: T tokens computed, C the sum over its rows of the tokens each has in the KV after the
step, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec


class StepCost(Protocol):
    """A cost model. Implementations are frozen values: equal ones give equal times."""

    def step_ns(self, tokens: int, context: int, rows: int) -> int:
        """Nanoseconds of a step of `tokens` (T) computed by `rows` (R) rows of `context` (C) tokens together."""
        ...


@dataclass(frozen=True, slots=True)
class TickCost:
    """Every step takes one tick, whatever is in it."""

    tick_ns: int = 1_000_000_000

    def step_ns(self, tokens: int, context: int, rows: int) -> int:
        return self.tick_ns


@dataclass(frozen=True, slots=True)
class LinearCost:
    """fixed + token·T + context·C + row·R; with `overlap`, max(fixed, token·T) + context·C + row·R.

    Overlap is how a GPU behaves: the weights stream from memory while the matrix products run, so a small step costs
    the one and a large step the other. The defaults are an 8B model in 16 bits on one 80 GB GPU.
    """

    fixed_ns: float = 5_500_000
    token_ns: float = 40_000
    context_ns: float = 44
    row_ns: float = 2_000
    overlap: bool = True

    def step_ns(self, tokens: int, context: int, rows: int) -> int:
        compute = self.token_ns * tokens
        base = max(self.fixed_ns, compute) if self.overlap else self.fixed_ns + compute
        return int(base + self.context_ns * context + self.row_ns * rows)


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The slower of memory and arithmetic, from the model's shape and the device's peaks.

    Memory: `weight_bytes` once, `kv_bytes_per_token` per attended token, over `bytes_per_s`. Arithmetic:
    `flops_per_token` per token, over `flops_per_s`. `overhead_ns` is what a step costs that does nothing.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    bytes_per_s: float
    flops_per_s: float
    overhead_ns: float = 0.0

    def step_ns(self, tokens: int, context: int, rows: int) -> int:
        memory = (self.weight_bytes + self.kv_bytes_per_token * context) / self.bytes_per_s
        arithmetic = self.flops_per_token * tokens / self.flops_per_s
        return int(max(memory, arithmetic) * 1e9 + self.overhead_ns)


class MeasuredCost(msgspec.Struct, frozen=True, kw_only=True):
    """A linear model fitted to a server's own steps (`triptych calibrate`), where it comes from and how well it fits.

    On steps that the fit hasn't seen, `error` is the mean absolute error over the mean step and `error_p90` what nine
    in ten relative errors stay below. The limits are those of the server.
    """

    fixed_ns: float
    token_ns: float
    context_ns: float
    row_ns: float
    overlap: bool
    steps: int
    error: float
    error_p90: float = 0.0
    model: str = ""
    dtype: str = ""
    block_size: int = 16
    num_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    pause_ns: float = 0.0
    """What the runner takes from the end of a step to the start of one that waits already: part of a step's time."""
    delivery_ns: float = 0.0
    """What a first token takes beside its steps on an idle server, from the client to the runner and back. No part of a
    step: it shifts all times that a client sees."""

    def step_ns(self, tokens: int, context: int, rows: int) -> int:
        linear = LinearCost(self.fixed_ns, self.token_ns, self.context_ns, self.row_ns, self.overlap)
        return linear.step_ns(tokens, context, rows) + int(self.pause_ns)


def read_measured(path: Path) -> MeasuredCost:
    """The file that `triptych calibrate` wrote. Raises ValueError naming the file for anything else, OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasuredCost)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a cost model: {error}") from error
