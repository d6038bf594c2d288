"""Items of a response's input: made complete so that they can be kept and listed, and turned into chat messages."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from services.errors import ApiError, invalid, unsupported
from services.responses.schema import Item, Part
from services.schema import ContentPart, Message, decode_field
from services.translate import refused_part

JsonItem = dict[str, Any]
ID_BYTES = 24
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_WITHOUT_STATUS = ("reasoning", "custom_tool_call", "custom_tool_call_output")
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(ID_BYTES)}"


def read_input(raw: msgspec.Raw) -> list[JsonItem]:
    """The `input` field as items with ids. ApiError 400 if it is absent or neither a string nor items."""
    start = bytes(raw).lstrip()[:1]
    if start == b'"':
        items: list[JsonItem] = [{"role": "user", "content": decode_field(raw, str, "input")}]
    elif start == b"[":
        items = decode_field(raw, list[dict[str, Any]], "input")
    elif start in (b"", b"n"):
        raise invalid("input: required", "input", "missing")
    else:
        raise invalid("input: expected a string or a list of items", "input")
    if not items:
        raise invalid("input: at least one item is required", "input")
    return [_complete(item, index) for index, item in enumerate(items)]


def _complete(item: JsonItem, index: int) -> JsonItem:
    """The item with its type and an id, its content as parts."""
    kind = item.get("type", "message")
    prefix = _PREFIXES.get(kind) if isinstance(kind, str) else None
    if prefix is None:
        if kind == "item_reference":
            raise unsupported(
                "input", f"input[{index}]: a reference to an item; send the item, or previous_response_id"
            )
        raise refused_part(f"input[{index}]", str(kind), ", ".join(_PREFIXES), "input")
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": part, "text": content, **({"annotations": []} if part == "output_text" else {})}]
        item = {**item, "content": content}
    status = {"status": "completed"} if kind not in _WITHOUT_STATUS else {}
    return {"id": new_id(prefix), **status, **item, "type": kind}


def to_messages(instructions: str | None, items: Sequence[JsonItem]) -> list[Message]:
    """The chat messages that say what the items say. ApiError 400 naming the item that can't be said.

    System messages at the beginning become one: most templates take no more.
    """
    messages = [Message("system", instructions)] if instructions else []
    thoughts = ""
    for index, raw in enumerate(items):
        where = f"input[{index}]"
        item = _typed(raw, where)
        if item.type == "reasoning":
            thoughts += "".join(part.text or "" for part in item.content or () if isinstance(part, Part))
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            messages.append(_call_output(item, where))
        elif item.type in ("function_call", "custom_tool_call"):
            _add_call(messages, item, where, thoughts)
            thoughts = ""
        else:
            message = _message(item, where)
            if message.role == "assistant":
                message.reasoning_content, thoughts = thoughts or None, ""
            messages.append(message)
    return _one_system(messages)


def _typed(raw: JsonItem, where: str) -> Item:
    try:
        return msgspec.convert(raw, Item)
    except msgspec.ValidationError as error:
        raise invalid(f"{where}: {error}", "input") from error


def _message(item: Item, where: str) -> Message:
    if item.role not in ROLES:
        raise invalid(f"{where}.role: {(item.role or '')[:40]!r}, allowed are {', '.join(ROLES)}", "input")
    if item.content is None:
        raise invalid(f"{where}.content: required", "input", "missing")
    role = "system" if item.role == "developer" else item.role
    return Message(role, _content(item.content, f"{where}.content"))


def _add_call(messages: list[Message], item: Item, where: str, thoughts: str) -> None:
    """A call joins what the assistant has said right before it."""
    custom = item.type == "custom_tool_call"
    key, kind, said = ("input", "custom", item.input) if custom else ("arguments", "function", item.arguments)
    if not item.call_id or not item.name or said is None:
        raise invalid(f"{where}: a {item.type} needs call_id, name and {key}", "input", "missing")
    call = {"id": item.call_id, "type": kind, kind: {"name": item.name, key: said}}
    if not messages or messages[-1].role != "assistant" or thoughts:
        messages.append(Message("assistant", reasoning_content=thoughts or None))
    messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]


def _call_output(item: Item, where: str) -> Message:
    if not item.call_id or item.output is None:
        raise invalid(f"{where}: a {item.type} needs call_id and output", "input", "missing")
    return Message("tool", _content(item.output, f"{where}.output"), tool_call_id=item.call_id)


def _content(content: str | list[Part], where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = [ContentPart("text", _text(part, f"{where}[{index}]")) for index, part in enumerate(content)]
    return parts if len(parts) != 1 else parts[0].text or ""


def _text(part: Part, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in TEXT_PARTS and part.type != "refusal":
        raise _refused(part, where)
    if text is None:
        raise invalid(f"{where}: a part of type {part.type!r} needs a text", "input", "missing")
    return text


def _refused(part: Part, where: str) -> ApiError:
    return refused_part(where, part.type, "text", "input")


def _one_system(messages: list[Message]) -> list[Message]:
    count = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    if count < 2:
        return messages
    texts = []
    for message in messages[:count]:
        content = message.content or ""
        texts.append(content if isinstance(content, str) else "\n".join(part.text or "" for part in content))
    return [Message("system", "\n\n".join(texts)), *messages[count:]]
