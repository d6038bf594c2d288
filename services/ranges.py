"""The ranges and sizes of request fields that depend on no model: one table for who checks and for who describes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from protocol.validation import MAX_NAME as MAX_NAME
from protocol.validation import MAX_PRIORITY
from services.errors import invalid

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_ID_LIST = 1024
MAX_PROMPTS = 1024
MAX_PATTERN = 1024
MAX_WAIT_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Range:
    """[low, high], or (low, high] if `above`."""

    low: float
    high: float = math.inf
    above: bool = False

    def schema(self) -> dict[str, Any]:
        """The same as keywords of JSON Schema."""
        found: dict[str, Any] = {"exclusiveMinimum" if self.above else "minimum": self.low}
        return found if math.isinf(self.high) else {**found, "maximum": self.high}


RANGES = {
    "n": Range(1, 128),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(-1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(-(2**63), 2**64 - 1),
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY),
    "timeout": Range(0, MAX_WAIT_S, above=True),
    "deadline": Range(0, MAX_WAIT_S, above=True),
    "logit_bias": Range(-100, 100),
}
"""Of the fields with these names; of each value in `logit_bias`."""


def ranged(value: Any, default: Any, param: str, low: float, high: float, *, above: bool = False) -> Any:
    """`value`, or `default` when it is None; ApiError 400 outside [low, high], or (low, high] if `above`."""
    if value is None:
        return default
    if not math.isfinite(value) or value > high or (value <= low if above else value < low):
        bracket = "(" if above else "["
        upper = "infinity" if math.isinf(high) else f"{high:.12g}"
        raise invalid(f"{param}: {value} is outside {bracket}{low:.12g}, {upper}]", param, "out_of_range")
    return value


def within(value: Any, default: Any, param: str) -> Any:
    """`ranged` with the range that the field has in `RANGES`."""
    allowed = RANGES[param]
    return ranged(value, default, param, allowed.low, allowed.high, above=allowed.above)
