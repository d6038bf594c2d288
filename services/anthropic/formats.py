"""Anthropic's JSON for messages and the events of a stream. Builds bytes; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.anthropic.errors import envelope
from services.choice import Piece
from services.errors import ApiError
from services.formats import Usage, Whole
from services.tools.calls import CallDelta
from services.translate import in_order

_encode = msgspec.json.Encoder().encode
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
TEXT, THINKING, CALL = "text", "thinking", "tool_use"
_DELTAS = {
    TEXT: (b"text_delta", b"text"),
    THINKING: (b"thinking_delta", b"thinking"),
    CALL: (b"input_json_delta", b"partial_json"),
}


class MessagesFormat:
    """One answer. A block of a stream begins with the first text that is in it, so an empty answer has none."""

    ping = PING
    done = b""

    def __init__(self, model: str, request_id: str, num_prompt: int, *, cut: bool) -> None:
        """`cut`: the token limit is what fits into the context, less than what was asked for."""
        self._model = model
        self._request_id = request_id
        self._num_prompt = num_prompt
        self._cut = cut
        self._blocks = 0
        self._kind = ""
        self._ended: dict[str, Any] = {}

    def opening(self) -> bytes:
        """`message_start`. What came from the cache isn't known yet; `message_delta` has the numbers that count."""
        usage = _usage(Usage(self._num_prompt, 0, 0))
        return _event({"type": "message_start", "message": self._message([], _end(None, None), usage)})

    def first(self, index: int, prompt_ids: Sequence[int], usage: Usage | None = None) -> bytes:
        """Nothing: blocks begin with their text."""
        return b""

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """New text of blocks that begin, go on and end."""
        events: list[bytes] = []
        for kind, text, call in in_order(piece, THINKING, TEXT, CALL):
            if call is not None and call.id:
                events += self._begin(CALL, _tool_use(CallDelta(0, call.id, call.name)))
            if text:
                events += self._say(kind, text)
        if piece.finish_reason is not None:
            events += self._end()
            self._ended = self._ending(piece)
        return b"".join(events)

    def _say(self, kind: str, text: str) -> list[bytes]:
        events = self._begin(kind, _text("") if kind == TEXT else _thinking("")) if self._kind != kind else []
        events.append(_DELTA % (self._blocks, *_DELTAS[kind], _encode(text)))
        return events

    def _begin(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        events = self._end()
        self._kind = kind
        events.append(_event({"type": "content_block_start", "index": self._blocks, "content_block": block}))
        return [*events, PING] if not self._blocks else events

    def _end(self) -> list[bytes]:
        """The block under way ends, if there is one."""
        if not self._kind:
            return []
        self._kind = ""
        self._blocks += 1
        return [_event({"type": "content_block_stop", "index": self._blocks - 1})]

    def usage_chunk(self, usage: Usage) -> bytes:
        """Why it ended and what it cost, and the end."""
        delta = {"type": "message_delta", "delta": self._ended, "usage": _usage(usage)}
        return _event(delta) + _event({"type": "message_stop"})

    def answer(self, choices: list[Whole], usage: Usage) -> bytes:
        """The whole message."""
        (whole,) = choices
        content = [_thinking(whole.reasoning)] if whole.reasoning else []
        content += [_text(whole.text)] if whole.text else []
        content += [_tool_use(call) for call in whole.calls]
        return _encode(self._message(content, self._ending(whole), _usage(usage)))

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream with an error."""
        return b"event: error\ndata: " + envelope(error, self._request_id) + b"\n\n"

    def _message(self, content: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        top = {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }
        return {**top, **end, "usage": usage}

    def _ending(self, piece: Piece | Whole) -> dict[str, Any]:
        if piece.finish_reason == "stop":
            if isinstance(piece.stop_reason, str):
                return _end("stop_sequence", piece.stop_reason)
            return _end("end_turn", None)
        if piece.finish_reason == "tool_calls":
            return _end("tool_use", None)
        if piece.finish_reason == "length" and self._cut:
            return _end("model_context_window_exceeded", None)
        return _end("max_tokens", None)


def _end(reason: str | None, sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str) -> dict[str, Any]:
    """Nobody here signs thoughts."""
    return {"type": THINKING, "thinking": text, "signature": ""}


def _tool_use(call: CallDelta) -> dict[str, Any]:
    """A call with its input as an object, an empty one if the call was cut: half an input is no input."""
    try:
        asked = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        asked = {}
    return {"type": CALL, "id": call.id, "name": call.name, "input": asked}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's numbers: what came from the cache is not among the input tokens."""
    thinking = {"thinking_tokens": usage.reasoning_tokens}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **({"output_tokens_details": thinking} if usage.reasoning_tokens else {}),
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), _encode(body))
