"""How a configuration field describes itself: default, help, unit, allowed values; and how text becomes its value.

Config classes are frozen dataclasses whose fields are all made by `setting(...)`. Where values come from (flags,
environment, files) is not decided here, see `ops.config`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ENV_PREFIX = "TRIPTYCH_"
_KEY = "triptych.setting"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class SettingError(ValueError):
    """A setting's value isn't allowed, or its name doesn't exist. The text says where, what, and what is allowed."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One field of a config class. `kind` is int, float, str, bool or tuple (of str)."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    unit: str
    choices: tuple[Any, ...] | None
    minimum: float | None
    maximum: float | None
    secret: bool

    @property
    def flag(self) -> str:
        """The command line's name: `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment's name: `TRIPTYCH_MAX_NUM_SEQS`."""
        return ENV_PREFIX + self.name.upper()

    def allowed(self) -> str:
        """What a person may write here, in words."""
        if self.choices is not None:
            words = "one of " + ", ".join(str(choice) for choice in self.choices)
        else:
            words = {int: "a whole number", float: "a number", bool: "true or false", tuple: "a list of strings"}.get(
                self.kind, "text"
            )
            if self.unit:
                words += f" ({self.unit})"
            if self.minimum is not None and self.maximum is not None:
                words += f" from {self.minimum:g} to {self.maximum:g}"
            elif self.minimum is not None:
                words += f", at least {self.minimum:g}"
            elif self.maximum is not None:
                words += f", at most {self.maximum:g}"
        return words + (", or none" if self.optional else "")


def setting(
    default: Any,
    *,
    help: str,
    unit: str = "",
    choices: Sequence[Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field with what people and parsers need to know about it. A `secret` is never printed."""
    extra = {
        "help": help,
        "unit": unit,
        "choices": None if choices is None else tuple(choices),
        "minimum": minimum,
        "maximum": maximum,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata={_KEY: extra})


def specs(config: type) -> dict[str, Spec]:
    """The settings of a config class, in order.

    TypeError for a field that is not made by `setting`, or whose type text can't fill.
    """
    hints = typing.get_type_hints(config)
    found: dict[str, Spec] = {}
    for item in dataclasses.fields(config):
        if _KEY not in item.metadata:
            raise TypeError(f"{config.__name__}.{item.name} is not made by setting(...)")
        kind, optional = _kind_of(f"{config.__name__}.{item.name}", hints[item.name])
        found[item.name] = Spec(
            name=item.name, kind=kind, optional=optional, default=item.default, **dict(item.metadata[_KEY])
        )
    return found


def check(config: Any) -> None:
    """Raise SettingError if a field of this config instance is outside what is allowed. For `__post_init__`."""
    for spec in specs(type(config)).values():
        value = getattr(config, spec.name)
        if value != spec.default:
            convert(spec, value, spec.name)


def convert(spec: Spec, raw: Any, where: str) -> Any:
    """`raw` (text, or a typed value from TOML) as the field's value.

    SettingError names `where`, the value and what is allowed.
    """
    try:
        value = _typed(spec, raw)
        _check_bounds(spec, value)
    except (ValueError, TypeError):
        shown = "(hidden)" if spec.secret else repr(raw)
        raise SettingError(f"{where}: got {shown}, allowed is {spec.allowed()}") from None
    return value


def to_text(spec: Spec, value: Any) -> str:
    """The text that `convert` turns back into `value`; for handing settings to a child process."""
    if value is None:
        return "none"
    if spec.kind is tuple:
        return json.dumps(list(value))
    if spec.kind is bool:
        return "true" if value else "false"
    return str(value)


def _kind_of(where: str, hint: Any) -> tuple[type, bool]:
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        if len(members) != 1:
            raise TypeError(f"{where}: {hint} is not a type that text can fill")
        hint = members[0]
    if hint in (int, float, str, bool):
        return hint, optional
    if typing.get_origin(hint) is tuple and typing.get_args(hint) == (str, ...):
        return tuple, optional
    raise TypeError(f"{where}: {hint} is not a type that text can fill")


def _typed(spec: Spec, raw: Any) -> Any:
    if spec.optional and (raw is None or (isinstance(raw, str) and raw.lower() == "none")):
        return None
    if spec.kind is tuple:
        return _strings(raw)
    if spec.kind is bool:
        return _boolean(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise TypeError
    if spec.kind is str:
        if not isinstance(raw, str):
            raise TypeError
        return raw
    if spec.kind is int:
        return _integer(raw, spec.unit == "bytes")
    number = float(raw)
    if not math.isfinite(number):
        raise ValueError
    return number


def _strings(raw: Any) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = json.loads(raw) if raw.startswith("[") else [part.strip() for part in raw.split(",") if part.strip()]
    if not isinstance(raw, list | tuple) or not all(isinstance(part, str) for part in raw):
        raise TypeError
    return tuple(raw)


def _boolean(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE + _FALSE:
        return raw.lower() in _TRUE
    raise ValueError


def _integer(raw: float | str, is_bytes: bool) -> int:
    if isinstance(raw, float):
        raise TypeError
    if isinstance(raw, str) and is_bytes and raw[-3:] in _SIZES:
        return int(float(raw[:-3]) * _SIZES[raw[-3:]])
    return int(raw)


def _check_bounds(spec: Spec, value: Any) -> None:
    if value is None:
        return
    if spec.choices is not None and any(one not in spec.choices for one in (value if spec.kind is tuple else (value,))):
        raise ValueError
    if spec.kind in (int, float):
        if spec.minimum is not None and value < spec.minimum:
            raise ValueError
        if spec.maximum is not None and value > spec.maximum:
            raise ValueError
