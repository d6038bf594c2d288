"""Chat messages from a request body to the template: checks their parts, renders, and tokenizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.errors import invalid
from services.schema import Message
from services.text.chat_template import RESERVED_KWARGS
from services.textpool import TextPool
from services.tools.history import check_calls, spelled_out, template_messages
from services.tools.request import ToolUse


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
    plain = [msgspec.to_builtins(message) for message in messages]
    check_calls(plain)
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


def _check(index: int, message: Message) -> int:
    """The number of characters in a message. Raises ApiError 400 for a part that isn't text."""
    name = f"messages[{index}]"
    if isinstance(message.content, str):
        return len(message.content)
    size = 0
    for number, part in enumerate(message.content or ()):
        where = f"{name}.content[{number}]"
        if part.type != "text":
            raise invalid(f"{where}: parts of type {part.type[:40]!r} are not supported, only text", "messages")
        if part.text is None:
            raise invalid(f"{where}: a text part needs a text", "messages")
        size += len(part.text)
    return size
