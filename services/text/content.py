"""Brings chat messages into the plain form that templates see: JSON types only, content as text or text parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.text.jinja_sandbox import TemplateError

Message = Mapping[str, Any]

# Templates for one string get the text parts joined by this, as other engines do: parts are paragraphs, not syllables.
PART_SEPARATOR = "\n"


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages, without keys whose value is None, content parts checked.

    Raises `TemplateError` naming the message and the part that isn't text: only text models are served.
    """
    plain: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TemplateError(f"messages[{at}] must be an object, not {type(message).__name__}")
        copy = {key: value for key, value in message.items() if value is not None}
        content = copy.get("content")
        if isinstance(content, (list, tuple)):
            copy["content"] = [_text_part(part, f"messages[{at}].content[{n}]") for n, part in enumerate(content)]
        elif content is not None and not isinstance(content, str):
            raise TemplateError(f"messages[{at}].content must be a string or a list of parts")
        plain.append(copy)
    return plain


def flatten(parts: Sequence[Mapping[str, str]]) -> str:
    """The text of checked parts; an empty list is the empty string."""
    return PART_SEPARATOR.join(part["text"] for part in parts)


def _text_part(part: object, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise TemplateError(f"{where} must be a content part, not {type(part).__name__}")
    kind = part.get("type", "text")
    if kind not in ("text", "refusal"):
        raise TemplateError(f"{where} has the type {kind!r}; this model takes text parts only")
    text = part.get(kind)
    if not isinstance(text, str):
        raise TemplateError(f"{where} has no {kind}")
    return {"type": "text", "text": text}
