"""What a request says about tools: checks it, and turns it into one value. Every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.errors import invalid, unsupported
from services.tools.custom import as_function
from services.tools.parser import NAME

FUNCTION, CUSTOM = "function", "custom"
ALLOWED = "allowed_tools"
MAX_TOOLS = 128
MAX_SCHEMA = 65_536
MAX_SCHEMAS = 1 << 20
"""Bytes of one tool's parameters as JSON, and of all together."""

_OPEN_SCHEMA: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request. `tools` are as the model shall see them, `schemas` the parameters of those it may call.

    `forced`: the answer must be calls. `limited`: there are tools that may not be called. `strict` names the functions
    whose schema has to be kept even so, `custom` those that are tools with a text for an input.
    """

    tools: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    forced: bool = False
    parallel: bool = True
    strict: frozenset[str] = field(default_factory=frozenset)
    limited: bool = False
    custom: frozenset[str] = field(default_factory=frozenset)


def tool_use(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`; None if the model shall call nothing."""
    schemas: dict[str, Mapping[str, Any]] = {}
    strict: set[str] = set()
    custom: set[str] = set()
    shown: list[Mapping[str, Any]] = []
    size = 0
    if tools is not None and len(tools) > MAX_TOOLS:
        raise invalid(f"tools: {len(tools)} tools, at most {MAX_TOOLS} are allowed", "tools", "out_of_range")
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        is_custom = tool.get("type") == CUSTOM
        written = CUSTOM if is_custom else FUNCTION
        if is_custom:
            tool = as_function(tool, where)
        name, schema = _function(tool, where, written)
        shown.append(tool)
        size += len(msgspec.json.encode(schema))
        if name in schemas:
            raise invalid(f"{where}.{written}.name: {name!r} is there twice", "tools")
        schemas[name] = schema
        if tool["function"].get("strict"):
            strict.add(name)
        if is_custom:
            custom.add(name)
    if size > MAX_SCHEMAS:
        raise invalid(f"tools: {size} bytes of parameters, at most {MAX_SCHEMAS} are allowed", "tools", "out_of_range")
    allowed, forced = _choice(choice, schemas)
    if not schemas or choice == "none":
        return None
    named = isinstance(choice, dict) and choice.get("type") != ALLOWED
    return ToolUse(
        shown,
        {name: schema for name, schema in schemas.items() if name in allowed},
        forced,
        parallel is not False and not named,
        frozenset(strict & allowed),
        len(allowed) < len(schemas),
        frozenset(custom),
    )


def _function(tool: Mapping[str, Any], where: str, written: str) -> tuple[str, Mapping[str, Any]]:
    """A function's name and its parameters' schema. `written`: the key under which the client has them."""
    kind = tool.get("type", FUNCTION)
    if kind != FUNCTION:
        raise unsupported("tools", f"{where}.type: {str(kind)[:40]!r}")
    function = tool.get(FUNCTION)
    if not isinstance(function, dict):
        raise invalid(f"{where}.function: an object with name and parameters is required", "tools")
    name = checked_name(function.get("name"), f"{where}.{written}.name", "tools")
    for key, wanted, what in (("description", str, "a string"), ("strict", bool, "true or false")):
        if function.get(key) is not None and not isinstance(function[key], wanted):
            raise invalid(f"{where}.{written}.{key}: must be {what}", "tools")
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
            "tool_choice: must be 'none', 'auto', 'required', an object that names a function, as "
            "{'type': 'function', 'function': {'name': ...}}, or one of the type 'allowed_tools'", "tool_choice",
        )  # fmt: skip
    if choice.get("type") != ALLOWED:
        return frozenset({_named(choice, "tool_choice", schemas)}), True
    inner = choice.get(ALLOWED)
    where = f"tool_choice.{ALLOWED}"
    if not isinstance(inner, dict) or not isinstance(inner.get("tools"), list) or not inner["tools"]:
        raise invalid(f"{where}: an object with mode and a list of tools is required", "tool_choice")
    if inner.get("mode") not in ("auto", "required"):
        raise invalid(f"{where}.mode: must be 'auto' or 'required'", "tool_choice")
    names = [_named(tool, f"{where}.tools[{index}]", schemas) for index, tool in enumerate(inner["tools"])]
    return frozenset(names), inner["mode"] == "required"


def _named(choice: Any, where: str, schemas: Mapping[str, Any]) -> str:
    """The one of the tools that an object names."""
    if not isinstance(choice, dict):
        raise invalid(f"{where}: an object that names a tool is required", "tool_choice")
    kind = choice.get("type")
    if kind not in (FUNCTION, CUSTOM):
        raise unsupported("tool_choice", f"{where}.type: {str(kind)[:40]!r}")
    named = choice.get(kind)
    if not isinstance(named, dict):
        raise invalid(f"{where}.{kind}: an object with a name is required", "tool_choice")
    name = checked_name(named.get("name"), f"{where}.{kind}.name", "tool_choice")
    if name not in schemas:
        raise invalid(f"{where}: {name!r} is not among the tools", "tool_choice")
    return name
