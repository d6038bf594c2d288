"""What the routes of other APIs share on their way to a chat request: the common fields, and names in errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from services.choice import Piece
from services.errors import ApiError, unsupported
from services.schema import ChatRequest, Message, Sampling
from services.tools.calls import CallDelta

_MESSAGE = re.compile(r"^messages\[\d+\][\w.\[\]]*: ")


def chat_request(request: Sampling, messages: list[Message], **changes: Any) -> ChatRequest:
    """A chat request with the fields that `request` shares with it, and these messages and changes."""
    shared = {name: getattr(request, name) for name in Sampling.__struct_fields__}
    return ChatRequest(**{**shared, **changes}, messages=messages)


def refuse_fields(request: Sampling, route: str) -> None:
    """ApiError 400 for fields that all generation has, but for which the answers of this route have no place."""
    if request.n not in (None, 1):
        raise unsupported("n", f"n other than 1 on {route}")
    if request.return_token_ids:
        raise unsupported("return_token_ids", f"return_token_ids on {route}")
    if request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", f"prompt_logprobs on {route}")


def refused_part(where: str, kind: str, known: str, param: str) -> ApiError:
    """400: content of a type that is not served here."""
    message = f"{where}: parts of type {kind[:40]!r} are not supported, only {known}"
    return ApiError(400, message, code="unsupported", param=param)


def reworded(message: str, words: Mapping[str, str]) -> str:
    """A message with other words in its place, which ends at the first colon: what follows may be the client's own."""
    place, colon, rest = message.partition(":")
    for theirs, own in words.items():
        place = place.replace(theirs, own)
    return place + colon + rest


def rename(error: ApiError, names: Mapping[str, str], words: Mapping[str, str] = MappingProxyType({})) -> None:
    """Make an error be about the field that the client knows: `names` maps the chat request's fields to its own.

    `words` are parts of the places inside of fields. A message's place among chat's is none among the client's: only
    what is wrong with it is told.
    """
    error.message = reworded(error.message, words)
    error.message = _MESSAGE.sub("messages: ", error.message)
    name = names.get(error.param or "")
    if name is not None:
        error.message = error.message.replace(f"{error.param}:", f"{name}:", 1)
        error.param = name


def in_order(piece: Piece, thought: str, said: str, called: str) -> Iterator[tuple[str, str, CallDelta | None]]:
    """What is new in a message, with the caller's name for its kind: first the rest of the call under way, if any."""
    rest = next((number for number, call in enumerate(piece.calls) if call.id), len(piece.calls))
    yield from ((called, call.arguments, call) for call in piece.calls[:rest])
    if piece.reasoning:
        yield thought, piece.reasoning, None
    if piece.text:
        yield said, piece.text, None
    yield from ((called, call.arguments, call) for call in piece.calls[rest:])
