"""Typed reads from parsed configuration files: a value of the right kind, or an error that names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runner.model.errors import ModelError


def number(source: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """`source[key]` as a float (numbers in strings count); `default` if it is absent or null.

    Raises ModelError `bad_config` if it is no finite number, or absent without a default.
    """
    value = source.get(key)
    if value is None:
        if default is None:
            raise ModelError("bad_config", f"{key} is missing")
        return default
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if isinstance(value, bool) or not math.isfinite(result):
        raise ModelError("bad_config", f"{key} must be a number, not {value!r}")
    return result


def integer(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """`source[key]` as an int; `default` if it is absent or null.

    Raises ModelError `bad_config` if it is no integer, or absent without a default.
    """
    value = source.get(key)
    if value is None:
        if default is None:
            raise ModelError("bad_config", f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError("bad_config", f"{key} must be an integer, not {value!r}")
    return value
