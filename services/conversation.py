"""Chat messages from a request body to the template: checks their parts, renders, and tokenizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from services.errors import ApiError, invalid
from services.schema import Message
from services.text.chat_template import RESERVED_KWARGS, ChatTemplate
from services.textpool import TextPool
from services.tools.functions import with_tool_calls
from services.tools.history import check_calls, spelled_out, template_messages
from services.tools.request import ToolUse
from services.translate import refused_part

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_DEVELOPER = re.compile(r"""(["'])developer\1""")
NEED_CONTENT = ("system", "developer", "user", "tool", "function")
"""Roles that have nothing to say but their content."""


async def tokenize_chat(
    pool: TextPool,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: dict[str, Any] | None,
    add_special_tokens: bool | None,
    tools: ToolUse | None = None,
) -> list[int]:
    """The token ids of a conversation. Raises ApiError 400 naming the message and the reason."""
    if not messages:
        raise invalid("messages: must not be empty", "messages")
    if continue_final_message and add_generation_prompt:
        raise invalid(
            "continue_final_message: excludes add_generation_prompt, set one of them", "continue_final_message"
        )
    if reserved := RESERVED_KWARGS & (kwargs or {}).keys():
        raise invalid(f"chat_template_kwargs: can't set {', '.join(sorted(reserved))}", "chat_template_kwargs")
    size = sum(_check(index, message) for index, message in enumerate(messages))
    plain = with_tool_calls([_plain(message) for message in messages])
    check_calls(plain)
    plain = with_system(plain, pool.template)
    shown = [dict(tool) for tool in tools.tools] if tools is not None else None
    if pool.template is None or pool.template.takes_tools:
        plain = template_messages(plain, pool.template.source if pool.template is not None else "")
    else:
        plain, shown = spelled_out(plain, shown), None
    if shown or any(message.get("tool_calls") for message in plain):
        size += len(msgspec.json.encode([shown, plain]))
    text = await pool.render(
        plain,
        size,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        kwargs=kwargs or {},
        tools=shown,
    )
    return (await pool.encode([text], bool(add_special_tokens), "messages"))[0]


def template_kwargs(
    effort: str | None, kwargs: dict[str, Any] | None, param: str = "reasoning_effort"
) -> dict[str, Any] | None:
    """The variables of the template, `reasoning_effort` among them. What the client says itself counts.

    ApiError 400 for an effort that isn't one of OpenAI's.
    """
    if effort is None:
        return kwargs
    if effort not in EFFORTS:
        raise invalid(f"{param}: {effort[:40]!r}, allowed are {', '.join(EFFORTS)}", param)
    thinks = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **thinks, **(kwargs or {})}


def with_system(messages: list[dict[str, Any]], template: ChatTemplate | None) -> list[dict[str, Any]]:
    """The messages with `system` for the role `developer`, unless the template knows that one."""
    if template is not None and _DEVELOPER.search(template.source):
        return messages
    return [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]


def _plain(message: Message) -> dict[str, Any]:
    """A message as JSON. A refusal is what the assistant has said."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    refusal = plain.pop("refusal", None)
    if plain.get("content") is None and not plain.get("tool_calls") and "function_call" not in plain:
        plain["content"] = refusal or ""
    return plain


def _check(index: int, message: Message) -> int:
    """The number of characters in a message. Raises ApiError 400 for what isn't text, or isn't there."""
    name = f"messages[{index}]"
    if message.audio is not None:
        raise ApiError(400, f"{name}.audio: only text is supported", code="unsupported", param="messages")
    if isinstance(message.content, str):
        return len(message.content)
    if message.content is None and message.role in NEED_CONTENT:
        raise invalid(f"{name}.content: required for the role {message.role!r}", "messages", "missing")
    size = 0
    for number, part in enumerate(message.content or ()):
        where = f"{name}.content[{number}]"
        if part.type not in ("text", "refusal"):
            raise refused_part(where, part.type, "text", "messages")
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise invalid(f"{where}: a part of type {part.type!r} needs a {part.type}", "messages")
        size += len(text)
    return size
