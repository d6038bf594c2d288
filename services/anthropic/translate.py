"""From Anthropic's messages to the chat request that says the same. Checks what Anthropic checks and chat doesn't."""

from __future__ import annotations

from typing import Any

import msgspec

from services.anthropic.errors import NO_THREADS
from services.anthropic.schema import Block, CountRequest, MessagesRequest, OutputFormat, Tool, ToolChoice, Turn
from services.conversation import template_kwargs
from services.errors import ApiError, invalid, unsupported
from services.schema import ChatRequest, ContentPart, JsonSchemaFormat, Message, ResponseFormat
from services.translate import chat_request, refuse_fields, refused_part

ROUTE = "/v1/messages"
CHAT_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "user": "metadata.user_id"}
CHAT_WORDS = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "response_format.json_schema.": "output_config.format.",
}
_OWNERS = {"tool_result": "user", "tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
KNOWN_BLOCKS = "text, tool_use, tool_result and thinking"


def to_chat(request: MessagesRequest) -> ChatRequest:
    """The chat request without a token limit: Anthropic's is one that may be larger than what fits."""
    if request.max_tokens is None:
        raise invalid("max_tokens: required", "max_tokens", "missing")
    if request.max_tokens < 1:
        raise invalid(f"max_tokens: {request.max_tokens}, at least 1 is required", "max_tokens", "out_of_range")
    refuse_fields(request, ROUTE)
    if request.thread is not None:
        # Ignored, it would lose the conversation: its client sends only what is new from then on.
        raise ApiError(400, "thread: no conversation is kept here, send all of it", code=NO_THREADS, param="thread")
    if request.stop_sequences is not None and request.stop is not None:
        raise invalid("stop_sequences: excludes stop, send one of them", "stop_sequences")
    chat = conversation(request)
    chat.stop = request.stop_sequences if request.stop is None else request.stop
    chat.user = request.metadata.user_id if request.metadata is not None else request.user
    chat.max_tokens = None
    chat.stream_options = None
    return chat


def conversation(request: CountRequest) -> ChatRequest:
    """What the model is to see: all that decides the number of prompt tokens."""
    if not request.messages:
        raise invalid("messages: at least one message is required", "messages")
    messages = _system(request.system)
    for index, turn in enumerate(request.messages):
        _add_turn(messages, turn, f"messages[{index}]")
    prefilled = messages[-1].role == "assistant" and not messages[-1].tool_calls
    chat = chat_request(
        request,
        messages,
        continue_final_message=prefilled or None,
        chat_template_kwargs=_template_kwargs(request),
        response_format=_response_format(request),
    )
    chat.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())] or None
    chat.tool_choice = _tool_choice(request.tool_choice)
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    # Who hasn't asked for thoughts may not know how to read them; the model may have them all the same.
    chat.include_reasoning = request.thinking is not None and request.thinking.type != "disabled"
    return chat


def _system(system: str | list[Block] | None) -> list[Message]:
    if not system:
        return []
    if isinstance(system, str):
        return [Message("system", system)]
    return [
        Message("system", _parts([_text(block, f"system[{i}]", "system", "text") for i, block in enumerate(system)]))
    ]


def _add_turn(messages: list[Message], turn: Turn, where: str) -> None:
    """Append a turn as one or more messages; what follows a message of the same role becomes part of it."""
    if turn.role not in ("user", "assistant"):
        raise invalid(f"{where}.role: {turn.role[:40]!r}, allowed are 'user' and 'assistant'", "messages")
    blocks = [Block("text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    texts: list[ContentPart] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        name = f"{where}.content[{index}]"
        if _OWNERS.get(block.type, turn.role) != turn.role:
            raise invalid(f"{name}: a {block.type} block belongs into a turn of the {_OWNERS[block.type]}", "messages")
        if block.type == "tool_result":
            messages.append(_tool_result(block, name))
        elif block.type == "tool_use":
            calls.append(_tool_use(block, name))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            continue  # nobody here can read it
        else:
            texts.append(_text(block, name, "messages", KNOWN_BLOCKS))
    if not texts and not calls and not thoughts and any(block.type == "tool_result" for block in blocks):
        return
    last = messages[-1] if messages else None
    if last is not None and last.role == turn.role and not (last.tool_calls or calls or thoughts):
        before = [ContentPart("text", last.content)] if isinstance(last.content, str) else last.content or []
        last.content = _parts([*before, *texts])
        return
    messages.append(
        Message(
            turn.role,
            _parts(texts) if texts or not calls else None,
            tool_calls=calls or None,
            reasoning_content="".join(thoughts) or None,
        )
    )


def _parts(parts: list[ContentPart]) -> str | list[ContentPart]:
    """A string where one will do: every template takes it."""
    if len(parts) > 1:
        return parts
    return (parts[0].text or "") if parts else ""


def _text(block: Block, where: str, param: str, known: str) -> ContentPart:
    if block.type != "text":
        raise refused_part(where, block.type, known, param)
    if block.text is None:
        raise invalid(f"{where}.text: required", param, "missing")
    return ContentPart("text", block.text)


def _tool_use(block: Block, where: str) -> dict[str, Any]:
    if not block.id or not block.name or block.input is None:
        raise invalid(f"{where}: a tool_use block needs id, name and input", "messages", "missing")
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool_result(block: Block, where: str) -> Message:
    if not block.tool_use_id:
        raise invalid(f"{where}.tool_use_id: required", "messages", "missing")
    content: str | list[ContentPart] = ""
    if isinstance(block.content, str):
        content = block.content
    elif block.content:
        content = _parts(
            [_text(one, f"{where}.content[{i}]", "messages", "text") for i, one in enumerate(block.content)]
        )
    return Message("tool", content, tool_call_id=block.tool_use_id)


def _template_kwargs(request: CountRequest) -> dict[str, Any] | None:
    """The template's variables for thinking, where the client says something about it and not about the variables."""
    effort = request.output_config.effort if request.output_config is not None else None
    kwargs = template_kwargs(effort, request.chat_template_kwargs, "output_config.effort")
    if request.thinking is None:
        return kwargs
    if request.thinking.type not in ("enabled", "adaptive", "disabled"):
        raise invalid(
            f"thinking.type: {request.thinking.type[:40]!r}, allowed are 'enabled', 'adaptive' and 'disabled'",
            "thinking",
        )
    return {"enable_thinking": request.thinking.type != "disabled", **(kwargs or {})}


def _response_format(request: CountRequest) -> ResponseFormat | None:
    asked: OutputFormat | None = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        asked = request.output_config.format
    if asked is None:
        return request.response_format
    if asked.type != "json_schema" or asked.schema is None:
        raise invalid("output_config.format: only {'type': 'json_schema', 'schema': …} is supported", "output_config")
    return ResponseFormat("json_schema", JsonSchemaFormat(schema=asked.schema))


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    """A tool as chat has it. What it may be is checked there."""
    if tool.type not in (None, "custom"):
        raise unsupported("tools", f"{where}: a tool of type {tool.type[:60]!r}")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise invalid(
            f"tool_choice.type: {choice.type[:40]!r}, allowed are {', '.join(_CHOICES)} and tool", "tool_choice"
        )
    return _CHOICES[choice.type]
