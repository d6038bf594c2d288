"""What a request says about tools: checks it, and turns it into one value. Every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.errors import invalid, unsupported
from services.tools.parser import NAME

MAX_TOOLS = 128
MAX_SCHEMA = 65_536
MAX_SCHEMAS = 1 << 20
"""Bytes of one tool's parameters as JSON, and of all together."""

_OPEN_SCHEMA: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request. `tools` are as the client wrote them, `schemas` the parameters of those it may call.

    `forced`: the answer must be calls. `strict` names the functions whose schema has to be kept even so.
    """

    tools: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    forced: bool = False
    parallel: bool = True
    strict: frozenset[str] = field(default_factory=frozenset)


def tool_use(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`; None if the model shall call nothing."""
    schemas: dict[str, Mapping[str, Any]] = {}
    strict: set[str] = set()
    size = 0
    if tools is not None and len(tools) > MAX_TOOLS:
        raise invalid(f"tools: {len(tools)} tools, at most {MAX_TOOLS} are allowed", "tools", "out_of_range")
    for index, tool in enumerate(tools or ()):
        name, schema = _function(tool, f"tools[{index}]")
        size += len(msgspec.json.encode(schema))
        if name in schemas:
            raise invalid(f"tools[{index}].function.name: {name!r} is there twice", "tools")
        schemas[name] = schema
        if tool["function"].get("strict"):
            strict.add(name)
    if size > MAX_SCHEMAS:
        raise invalid(f"tools: {size} bytes of parameters, at most {MAX_SCHEMAS} are allowed", "tools", "out_of_range")
    allowed, forced = _choice(choice, schemas)
    if not schemas or choice == "none":
        return None
    return ToolUse(
        tools or (),
        {name: schemas[name] for name in allowed},
        forced,
        parallel is not False and not isinstance(choice, dict),
        frozenset(strict & allowed),
    )


def _function(tool: dict[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """A function's name and its parameters' schema."""
    kind = tool.get("type", "function")
    if kind != "function":
        raise unsupported("tools", f"{where}.type: {str(kind)[:40]!r}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function: an object with name and parameters is required", "tools")
    name = checked_name(function.get("name"), f"{where}.function.name", "tools")
    for key, wanted, what in (("description", str, "a string"), ("strict", bool, "true or false")):
        if function.get(key) is not None and not isinstance(function[key], wanted):
            raise invalid(f"{where}.function.{key}: must be {what}", "tools")
    schema = function.get("parameters")
    if schema is None:
        return name, _OPEN_SCHEMA
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise invalid(f"{where}.function.parameters: must be a JSON schema of an object", "tools")
    if (size := len(msgspec.json.encode(schema))) > MAX_SCHEMA:
        message = f"{where}.function.parameters: {size} bytes, at most {MAX_SCHEMA} are allowed"
        raise invalid(message, "tools", "out_of_range")
    return name, schema if "type" in schema else {**schema, **_OPEN_SCHEMA}


def checked_name(name: Any, where: str, param: str) -> str:
    """A function's name. ApiError 400 unless it is 1 to 64 letters, digits, `_` and `-`."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"{where}: must be 1 to 64 letters, digits, underscores and hyphens", param)
    return name


def _choice(choice: Any, schemas: Mapping[str, Any]) -> tuple[frozenset[str], bool]:
    """The functions that may be called, and whether one must be."""
    everything = frozenset(schemas)
    if choice is None or choice in ("auto", "none"):
        return everything, False
    if not schemas:
        raise invalid("tool_choice: needs tools", "tool_choice")
    if choice == "required":
        return everything, True
    if not isinstance(choice, dict):
        raise invalid(
            "tool_choice: must be 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}", "tool_choice",
        )  # fmt: skip
    if choice.get("type") != "function":
        raise unsupported("tool_choice", f"the type {str(choice.get('type'))[:40]!r}")
    function = choice.get("function")
    if not isinstance(function, dict):
        raise invalid("tool_choice.function: an object with a name is required", "tool_choice")
    name = checked_name(function.get("name"), "tool_choice.function.name", "tool_choice")
    if name not in schemas:
        raise invalid(f"tool_choice: {name!r} is not among the tools", "tool_choice")
    return frozenset({name}), True
