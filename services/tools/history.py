"""Calls and results that a conversation already has, on their way into the prompt.

Templates that know tools get arguments as objects, as they were trained with. For the others, calls and tools are
spelled out in the format of Hermes, which most models have seen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from services.errors import invalid
from services.tools.hermes import CLOSE, OPEN
from services.tools.request import checked_name

MAX_CALLS = 128
_ID_LENGTH = 9
_SHORT_IDS = re.compile(rf"length\s*!=\s*{_ID_LENGTH}\b")

_DESCRIPTION = """\
You can call functions. Their signatures are between <tools> and </tools>, one JSON object on each line:
<tools>
{tools}
</tools>

To call a function, answer with its name and its arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": <function's name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


def check_calls(messages: Sequence[dict[str, Any]]) -> None:
    """ApiError 400 for a call that isn't one, and for a result of a call that the conversation doesn't have."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        calls = message.get("tool_calls") or ()
        if calls and message["role"] != "assistant":
            raise invalid(f"{where}.tool_calls: only messages of the assistant have calls", "messages")
        if len(calls) > MAX_CALLS:
            raise invalid(f"{where}.tool_calls: {len(calls)} calls, at most {MAX_CALLS} are allowed", "messages")
        for number, call in enumerate(calls):
            known.add(_check_call(call, f"{where}.tool_calls[{number}]"))
        # A conversation without any calls may have been cut: then there is nothing to compare with.
        if message["role"] == "tool" and known:
            answered = message.get("tool_call_id")
            if not answered:
                raise invalid(f"{where}.tool_call_id: required in a tool's message", "messages")
            if answered not in known:
                raise invalid(f"{where}.tool_call_id: no earlier call has the id {answered[:80]!r}", "messages")


def _check_call(call: dict[str, Any], where: str) -> str:
    """A call's id."""
    if call.get("type", "function") != "function":
        raise invalid(f"{where}.type: must be 'function'", "messages")
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function: an object with name and arguments is required", "messages")
    checked_name(function.get("name"), f"{where}.function.name", "messages")
    if not isinstance(function.get("arguments", ""), str | dict):
        raise invalid(f"{where}.function.arguments: must be a string with JSON", "messages")
    name = call.get("id")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.id: required, a string", "messages")
    return name


def template_messages(messages: Sequence[dict[str, Any]], source: str = "") -> list[dict[str, Any]]:
    """The messages as templates want them: arguments as objects, no content as an empty text.

    A template whose `source` refuses ids that don't have nine letters or digits, as Mistral's do, gets such ones, the
    same for the same: a conversation may have begun elsewhere.
    """
    shown = [_with_objects(message) if message.get("tool_calls") else message for message in messages]
    return [_with_short_ids(message) for message in shown] if _SHORT_IDS.search(source) else shown


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
    if message.get("tool_call_id"):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    return changed


def _short(name: str) -> str:
    if len(name) == _ID_LENGTH and name.isascii() and name.isalnum():
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:_ID_LENGTH]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        function = {**function, "arguments": _object(function.get("arguments"))}
        calls.append({**call, "type": "function", "function": function})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _object(arguments: Any) -> Any:
    """Arguments as an object; what a model once wrote that is none stays a text."""
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def spelled_out(messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The messages for a template without tools: these described in the system message, calls and results as text."""
    shown = list(messages)
    if tools or any(message.get("tool_calls") for message in messages):
        shown = _as_text(template_messages(messages))
    if not tools:
        return shown
    described = _DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if shown[0]["role"] in ("system", "developer"):
        first = dict(shown[0])
        first["content"] = _joined(first.get("content"), described)
        return [first, *shown[1:]]
    return [{"role": "system", "content": described}, *shown]


def _as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    results = False
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if results:
                shown[-1]["content"] += "\n" + text
            else:
                shown.append({"role": "user", "content": text})
            results = True
            continue
        results = False
        calls = message.get("tool_calls")
        if calls:
            text = "\n".join(f"{OPEN}\n{_call_text(call['function'])}\n{CLOSE}" for call in calls)
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = _joined(message.get("content"), text, "\n")
        shown.append(message)
    return shown


def _call_text(function: dict[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def _joined(content: Any, text: str, separator: str = "\n\n") -> Any:
    """A message's content, be it a text or parts, and more text after it."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}{separator}{text}" if content else text


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content)
    return content or ""
