"""Sampling that never leaves the device: the same tokens as `runner.sampler`, without a wait for the host.

For rows without penalties, edited logits, a grammar or log-probabilities; the others need the Sampler on the host.
Nothing here synchronises: no `.item()`, no shapes that depend on values. What a row does depends on its numbers only.

FlashInfer's samplers aren't used: they read one seed for a whole batch and mix in the row, so that a request's tokens
would depend on its neighbours. Its thresholds for top-k and top-p are (`kernels`); without them rows are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.batch import Bools, Int32s, Int64s
from runner.params import GREEDY_BELOW, ParamColumns
from runner.sampler import pick

Float64s = npt.NDArray[np.float64]

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of S rows on the host, and which of them any row uses. 8-byte numbers, for one packed copy.

    `position` is the index that the sampled token will have, counted from 0: what its random number is drawn for.
    """

    temperature: Float64s
    top_k: Int64s
    top_p: Float64s
    min_p: Float64s
    seed: Int64s
    choice: Int64s
    position: Int64s
    random: bool
    """Whether any row draws; if none does, the columns aren't read."""
    limited: tuple[bool, bool, bool]
    """Whether any row that draws sets top-k, top-p, min-p."""

    @classmethod
    def of(cls, params: ParamColumns, slots: Int64s, positions: Int32s | Int64s) -> SamplingColumns:
        """The columns of `slots` [S], whose next tokens are at `positions` [S]."""
        top_k, top_p, min_p = params.top_k[slots], params.top_p[slots], params.min_p[slots]
        random = params.temperature[slots] >= GREEDY_BELOW
        limited = (random & (top_k > 0) & (top_k < params.vocab_size), random & (top_p < 1), random & (min_p > 0))
        return cls(
            temperature=params.temperature[slots].astype(np.float64),
            top_k=top_k.astype(np.int64),
            top_p=top_p.astype(np.float64),
            min_p=min_p.astype(np.float64),
            seed=params.seed[slots].view(np.int64),
            choice=params.choice[slots].view(np.int64),
            position=positions.astype(np.int64),
            random=bool(random.any()),
            limited=(bool(limited[0].any()), bool(limited[1].any()), bool(limited[2].any())),
        )

    @property
    def arrays(self) -> tuple[Float64s | Int64s, ...]:
        """What goes to the device, in the order in which `sample_on_device` takes it; nothing if nobody draws."""
        if not self.random:
            return ()
        return (self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.choice, self.position)


class DeviceSample(NamedTuple):
    """Tokens int64 [S], and whether each row's logits were finite, bool [S]; where not, the token means nothing."""

    tokens: Tensor
    finite: Tensor


def stays_on_device(params: ParamColumns, slots: Int64s) -> Bools:
    """Which rows `sample_on_device` serves."""
    away = params.penalised[slots] | params.edited[slots] | params.constrained[slots]
    return np.asarray(~away & (params.logprobs[slots] < 0))


def sample_on_device(
    logits: Tensor, columns: SamplingColumns, arrays: Sequence[Tensor], vocab_size: int, kernels: Any = None
) -> DeviceSample:
    """logits float32 [S, ≥ vocab_size] -> a token for each row. `arrays` are `columns.arrays` on the device.

    `kernels` is `flashinfer.sampling`, or None for plain torch.
    """
    logits = logits[:, :vocab_size]
    finite = torch.isfinite(logits.sum(1))
    logits = torch.where(finite.unsqueeze(1), logits, 0.0)
    greedy = logits.argmax(1)
    if not columns.random:
        return DeviceSample(greedy, finite)
    temperature, top_k, top_p, min_p = (array.unsqueeze(1) for array in arrays[:4])
    draws = device_uniforms(*arrays[4:])
    random = temperature.float() >= GREEDY_BELOW
    part = logits / torch.where(random, temperature.float(), 1.0)
    by_k, by_p, by_min = columns.limited
    if by_k:
        part = _keep_top_k(part, torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size), kernels)
    if by_p:
        part = _keep_top_p(part, top_p.float(), kernels)
    if by_min:
        threshold = part.amax(1, keepdim=True) + min_p.float().clamp(max=1).log()  # log 0: keeps all
        part = part.masked_fill(part < threshold, _NEVER)
    return DeviceSample(torch.where(random.squeeze(1), pick(part, draws), greedy), finite)


def _keep_top_k(part: Tensor, top_k: Tensor, kernels: Any) -> Tensor:
    """[N, V] masked below each row's top_k-th value, top_k int64 [N, 1] in 1..V. Ties at the border stay."""
    if kernels is not None:
        masked: Tensor = kernels.top_k_mask_logits(part, top_k.squeeze(1).int())
        return masked
    border = part.sort(1, descending=True).values.gather(1, top_k - 1)
    return part.masked_fill(part < border, _NEVER)


def _keep_top_p(part: Tensor, top_p: Tensor, kernels: Any) -> Tensor:
    """[N, V] masked to the likeliest ids whose probabilities first reach top_p float32 [N, 1]; at least one, and ties.

    FlashInfer's threshold, asked for deterministically: by default it adds in any order, and a border case could fall
    either way from run to run. It returns probabilities; ids are kept where they are above zero.
    """
    likeliest = part.amax(1, keepdim=True)
    if kernels is not None:
        # softmax: it sums a row in the same order whatever rows are beside it, which a plain sum doesn't.
        probabilities = part.softmax(1)
        kept = kernels.top_p_renorm_probs(probabilities, top_p.squeeze(1).clamp(0, 1), is_deterministic=True) > 0
        kept |= (top_p >= 1) | (part == likeliest)  # nothing to cut; and the likeliest, whatever the rounding
        return part.masked_fill(~kept, _NEVER)
    weights = (part - likeliest).exp_()
    ordered = weights.sort(1, descending=True).values
    running = ordered.double().cumsum(1)
    inside = (running - ordered) < top_p.double() * running[:, -1:]
    border = ordered.gather(1, (inside.sum(1, keepdim=True) - 1).clamp(min=0))
    return part.masked_fill((weights < border) & (top_p < 1), _NEVER)


def device_uniforms(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """`runner.uniform.uniforms` bit for bit, int64 [n] each (the bits of a u64) -> float64 [n], on their device."""
    keys = _mix(_mix(seeds) ^ choices)
    return _shifted(_mix(keys ^ _mix(positions)), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64. torch has no arithmetic on u64; that of int64 wraps to the same bits."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """A logical shift to the right: the sign bits that the arithmetic one brings in are cleared."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
