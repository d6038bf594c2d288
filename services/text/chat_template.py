"""Renders a conversation into the prompt that a model was trained on, by the model's own Jinja template.

Output matches transformers' `apply_chat_template(tokenize=False)` byte for byte. Checking roles and fields of a request
against the API is the HTTP side's business; what a *template* refuses is reported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from services.text.content import Message, flatten, plain_messages
from services.text.jinja_sandbox import CompiledTemplate, TemplateError
from services.text.tokenizer import Tokenizer

__all__ = ["RESERVED_KWARGS", "ChatTemplate", "TemplateError"]

# What a request's `chat_template_kwargs` may not set, because `render` sets it.
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)

_REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that a message's reasoning goes by
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # its space tells whether the template trims the message
_PROBE = "triptych-probe-9f3a"


class ChatTemplate:
    """One model's chat template, or its named set (`default`, `tool_use`).

    A message's content may be a list of parts. A template that reads parts gets them as they are; one that wants a
    string gets the text parts joined with a newline. Which it is, is found once per role by rendering a probe both
    ways: parts are passed on when they render like the plain string, or when the string doesn't render at all.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens` are further template variables (`unk_token`, …); `now` feeds `strftime_now`.

        Raises `TemplateError` if a template is not valid Jinja or a set of them has no `default`.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise TemplateError(f"the model has several chat templates ({', '.join(sorted(sources))}) and no default")
        self._templates = {name: CompiledTemplate(text, now) for name, text in sources.items()}
        self.source = "\n".join(sources.values())
        self._variables = dict(special_tokens or {})
        self._variables |= {
            name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
        }
        self._formats: dict[tuple[str, str], str] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template that the model's files bring; None if they bring none (chat is then not available)."""
        if not tokenizer.chat_templates:
            return None
        return cls(tokenizer.chat_templates, special_tokens=tokenizer.special_tokens)

    @property
    def takes_tools(self) -> bool:
        """Whether it puts tools into the prompt."""
        return "tool_use" in self._templates or "tools" in self._templates["default"].variables

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text, with control tokens written out: tokenize it with `add_special_tokens=False`.

        `add_generation_prompt` is true unless the final message is to be continued; asking for both is an error.
        Further `kwargs` become template variables. Raises `TemplateError` with a message for the client: the
        template's own refusal, a content part that isn't text, a conversation that it can't render.
        """
        if not messages:
            raise TemplateError("messages must not be empty")
        if reserved := RESERVED_KWARGS & kwargs.keys():
            raise TemplateError(f"chat template arguments can't set {', '.join(sorted(reserved))}")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        chat = [self._content(name, message) for message in plain_messages(messages)]
        chat = [_alias_reasoning(message) for message in chat]
        variables = self._variables | kwargs
        variables |= {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
        }
        template = self._templates[name]
        if not continue_final_message:
            return template.render({**variables, "messages": chat})
        final = _tag_final(chat[-1])
        return _cut_at_tag(template.render({**variables, "messages": chat}), final)

    def _content(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, (list, str)):
            return message
        wants = self._format(name, str(message.get("role")))
        if isinstance(content, list):
            return message | {"content": content if wants != "string" else flatten(content)}
        return message | {"content": [{"type": "text", "text": content}]} if wants == "parts only" else message

    def _format(self, name: str, role: str) -> str:
        """What this role's content must be: "string", "either", or "parts only"."""
        known = self._formats.get((name, role))
        if known is None:
            as_string = self._probe(name, role, _PROBE)
            as_parts = self._probe(name, role, [{"type": "text", "text": _PROBE}])
            if as_parts is not None and as_parts == as_string:
                known = "either"
            elif as_string is None and as_parts is not None and "'type'" not in as_parts and '"type"' not in as_parts:
                known = "parts only"
            else:
                known = "string"
            # Roles come from requests: remember the usual ones only, so that the table can't grow without end.
            if role in ("system", "developer", "user", "assistant", "tool"):
                self._formats[name, role] = known
        return known

    def _probe(self, name: str, role: str, content: Any) -> str | None:
        """A small conversation whose message of this role has this content; None if the probe isn't in the result."""
        probe = {"role": role, "content": content}
        hello: dict[str, Any] = {"role": "user", "content": "hello"}
        if role != "user" and self._format(name, "user") == "parts only":
            hello["content"] = [{"type": "text", "text": "hello"}]
        call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        conversations: dict[str, list[dict[str, Any]]] = {
            "user": [probe],
            "assistant": [hello, probe, hello],
            "tool": [hello, called, probe | {"tool_call_id": "call00001", "name": "f"}],
        }
        try:
            text = self._templates[name].render(
                {
                    **self._variables,
                    "messages": conversations.get(role, [probe, hello]),
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": False,
                }
            )
        except TemplateError:
            return None
        return text if _PROBE in text else None


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tag_final(message: dict[str, Any]) -> str:
    """Marks the end of the text to continue, in place, and returns that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_TAG
        return content
    for part in reversed(content or []):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUE_TAG
            return text
    raise TemplateError("continue_final_message needs a final message with text content to continue")


def _cut_at_tag(rendered: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in rendered or tag not in rendered:
        raise TemplateError(
            "continue_final_message can't be used: the chat template drops or changes the final message"
        )
    at = rendered.rindex(tag)
    kept = rendered[:at]
    # A template that trims the message also trims the tag's space, and then the message's own trailing space.
    return kept if rendered.startswith(_CONTINUE_TAG, at) else kept.rstrip()
