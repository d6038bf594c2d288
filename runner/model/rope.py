"""Rotary position embedding: which variant a checkpoint asks for, and the cos/sin table it means.

Not the rotation itself (that is `Ops.rope`). Formulas follow transformers' `modeling_rope_utils`, in the same
float32 order of operations, so that the tables are equal. A variant not known here is refused: running without
the scaling looks fine on short prompts and is wrong on long ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runner.model.errors import ModelError
from runner.model.fields import number

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary variant with every number resolved; only the fields of its `kind` matter."""

    kind: str
    theta: float
    rotary_dim: int
    """Leading dimensions of each head that rotate; even, at most the head's size."""
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length of pre-training, against which dynamic, llama3 and yarn measure."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin; 1 for all kinds but yarn."""
    divisors: tuple[float, ...] = ()
    """GGUF's `rope_freqs.weight`: one divisor per frequency, already worked out by the converter (llama3)."""

    def max_context(self, max_positions: int) -> int:
        """Tokens this variant reaches in a model whose configuration says `max_positions` (as vLLM reads it).

        YaRN stretches the pre-training length, linear and dynamic the configured one; llama3's configs say the result.
        """
        if self.kind == "yarn":
            return int(self.original_max_positions * self.factor)
        return int(max_positions * self.factor) if self.kind in ("linear", "dynamic") else max_positions


def parse_rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
    """The rotary variant that a Hugging Face config describes.

    Reads `rope_scaling` (old) or `rope_parameters` (new), `rope_type` or the older `type`, and falls back to the
    config's own `rope_theta` and `partial_rotary_factor`. Raises ModelError `unsupported_rope` or `bad_config`.
    """
    source = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(source, Mapping):
        raise ModelError("bad_config", f"rope_scaling must be an object, not {source!r}")
    if source and all(isinstance(value, Mapping) for value in source.values()):
        raise ModelError("unsupported_rope", f"RoPE parameters per layer type ({', '.join(source)}) are not supported")
    kind = source.get("rope_type") or source.get("type") or "default"
    if kind not in KINDS:
        raise ModelError("unsupported_rope", f"RoPE type {kind!r} is not supported (known: {', '.join(KINDS)})")

    theta = number(source, "rope_theta", number(config, "rope_theta", 10_000.0))
    if theta <= 0:
        raise ModelError("bad_config", f"rope_theta must be positive, not {theta}")
    partial = number(source, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError("bad_config", f"RoPE must rotate an even part of the head: {rotary_dim} of {head_dim}")
    if kind == "default":
        return RopeSpec(kind, theta, rotary_dim)

    # Some models keep the pre-training length beside the RoPE parameters; transformers lets that one win.
    original = int(
        number(
            config,
            "original_max_position_embeddings",
            number(source, "original_max_position_embeddings", max_positions),
        )
    )
    if kind == "linear":
        spec = RopeSpec(kind, theta, rotary_dim, factor=number(source, "factor"))
    elif kind == "dynamic":
        spec = RopeSpec(kind, theta, rotary_dim, factor=number(source, "factor"), original_max_positions=max_positions)
    elif kind == "llama3":
        spec = RopeSpec(
            kind,
            theta,
            rotary_dim,
            factor=number(source, "factor"),
            original_max_positions=original,
            low_freq_factor=number(source, "low_freq_factor"),
            high_freq_factor=number(source, "high_freq_factor"),
        )
        if spec.high_freq_factor <= spec.low_freq_factor or spec.low_freq_factor <= 0:
            raise ModelError("bad_config", "llama3 RoPE needs 0 < low_freq_factor < high_freq_factor")
    else:
        spec = _parse_yarn(source, theta, rotary_dim, max_positions, original)
    if spec.factor < 1.0:
        raise ModelError("bad_config", f"the RoPE factor must be at least 1, not {spec.factor}")
    return spec


def _parse_yarn(
    source: Mapping[str, Any], theta: float, rotary_dim: int, max_positions: int, original: int
) -> RopeSpec:
    factor = number(source, "factor", max_positions / original)
    mscale, mscale_all_dim = number(source, "mscale", 0.0), number(source, "mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        inferred = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    else:
        inferred = yarn_mscale(factor)
    return RopeSpec(
        "yarn",
        theta,
        rotary_dim,
        factor=factor,
        original_max_positions=original,
        beta_fast=number(source, "beta_fast", 0.0) or 32.0,
        beta_slow=number(source, "beta_slow", 0.0) or 1.0,
        truncate=bool(source.get("truncate", True)),
        attention_factor=number(source, "attention_factor", inferred),
    )


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature for a context stretched `scale` times (equation 22 of the paper)."""
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1.0 else 1.0


def inverse_frequencies(spec: RopeSpec, max_positions: int) -> torch.Tensor:
    """[rotary_dim / 2] float32: radians per position of each rotating pair.

    `max_positions` matters to dynamic NTK only. Its base depends on the sequence's length, but keys already in the
    cache can't be rotated again, so one length is fixed for all requests: the longest that this server admits. Within
    the pre-training length this is the unscaled table.
    """
    dim = spec.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    theta: float | torch.Tensor = spec.theta
    # A head of two dimensions has one frequency, theta**0, whatever the base; the exponent would divide by zero.
    if spec.kind == "dynamic" and dim > 2:
        length = torch.tensor(max(max_positions, spec.original_max_positions))
        stretch = (spec.factor * length / spec.original_max_positions) - (spec.factor - 1)
        theta = spec.theta * stretch ** (dim / (dim - 2))
    frequencies = 1.0 / (theta**exponents)
    if spec.kind == "linear":
        frequencies = frequencies / spec.factor
    elif spec.kind == "llama3":
        frequencies = _llama3(frequencies, spec)
    elif spec.kind == "yarn":
        frequencies = _yarn(theta**exponents, spec)
    if spec.divisors:
        frequencies = frequencies / torch.tensor(spec.divisors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones kept, a smooth passage between."""
    original, low, high = spec.original_max_positions, spec.low_freq_factor, spec.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > original / low, frequencies / spec.factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / spec.factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, smoothed, scaled)


def _yarn(periods: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Interpolated below `beta_slow` turns in the pre-training length, kept above `beta_fast`, a ramp between."""
    dim = spec.rotary_dim

    def dimension_of(turns: float) -> float:
        return (dim * math.log(spec.original_max_positions / (turns * 2 * math.pi))) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (spec.factor * periods) * (1 - kept) + 1.0 / periods * kept


def cos_sin_table(spec: RopeSpec, max_positions: int) -> torch.Tensor:
    """[max_positions, rotary_dim] float32: cosines of the rotary_dim/2 angles, then their sines."""
    angles = torch.arange(max_positions).float()[:, None] * inverse_frequencies(spec, max_positions)[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * spec.attention_factor
