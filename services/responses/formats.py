"""The events of a streamed response, and the whole one. Keeps the response's record up to date as it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.choice import Piece, TokenLogprob
from services.errors import ApiError
from services.formats import Usage, Whole, chat_logprob
from services.responses.answer import IN_PROGRESS, Response
from services.responses.items import JsonItem, new_id
from services.sse import PING
from services.text.tokenizer import Tokenizer
from services.tools.calls import CallDelta
from services.translate import in_order

_encode = msgspec.json.Encoder().encode
MESSAGE, REASONING, CALL, CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
CALLS = (CALL, CUSTOM)
_PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc", CUSTOM: "ctc"}
_TEXTS = {
    MESSAGE: "output_text",
    REASONING: "reasoning_text",
    CALL: "function_call_arguments",
    CUSTOM: "custom_tool_call_input",
}
_DELTA = (
    b'event: response.%b.delta\ndata: {"type":"response.%b.delta","sequence_number":%d,"item_id":"%b",'
    b'"output_index":%d,%b"delta":%b%b}\n\n'
)


class ResponsesFormat:
    """One response's. Output items come one after the other; each begins with its first text.

    Log-probabilities are those of all tokens up to the end of the message that they are listed at, be they of it or of
    thoughts before it: -1 for none, else how many alternatives each of them has.
    """

    ping = PING
    done = b""

    def __init__(self, response: Response, tokenizer: Tokenizer, logprobs: int) -> None:
        self.response = response
        self._tokenizer = tokenizer
        self._num_logprobs = logprobs
        self._pending: list[TokenLogprob] = []
        self._logprobs: list[JsonItem] = []
        self._sequence = 0
        self._kind = ""
        self._item_id = ""
        self._call = CallDelta(0)
        self._texts: list[str] = []
        self._reason = ""

    def opening(self) -> bytes:
        """The response exists, and is under way."""
        return self._about("response.created") + self._about("response.in_progress")

    def first(self, index: int, prompt_ids: Sequence[int], usage: Usage | None = None) -> bytes:
        """Nothing: which item comes first isn't known yet."""
        return b""

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """New text of items that begin, go on and end."""
        events: list[bytes] = []
        self._pending += piece.logprobs
        for kind, text, call in in_order(piece, REASONING, MESSAGE, CALL):
            if call is not None and call.id:
                events += self._begin(_kind(call), call)
            if call is not None and call.custom:
                kind = CUSTOM
            if text:
                events += self._say(kind, text)
        if piece.finish_reason is not None:
            self._reason = piece.finish_reason
            if not self._kind and not self.response.output:
                events += self._begin(MESSAGE)
            if self._kind == MESSAGE:
                self._logprobs += self._take_logprobs()
            events += self._end(_status(self._reason))
        return b"".join(events)

    def usage_chunk(self, usage: Usage) -> bytes:
        """The response is over."""
        self.response.finish(self._reason, usage)
        return self._about(f"response.{self.response.status}")

    def answer(self, choices: list[Whole], usage: Usage) -> bytes:
        """The whole response."""
        (whole,) = choices
        items: list[tuple[str, str, CallDelta]] = []
        if whole.reasoning:
            items.append((REASONING, whole.reasoning, self._call))
        if whole.text or not (whole.reasoning or whole.calls):
            items.append((MESSAGE, whole.text, self._call))
        items += [(_kind(call), call.arguments, call) for call in whole.calls]
        self._pending = whole.logprobs[: whole.said] if whole.calls else whole.logprobs
        for number, (kind, text, call) in enumerate(items, 1):
            status = _status(whole.finish_reason) if number == len(items) else "completed"
            logprobs = self._take_logprobs() if kind == MESSAGE else []
            self.response.output.append(_item(kind, new_id(_PREFIXES[kind]), status, text, call, logprobs))
        self.response.finish(whole.finish_reason, usage)
        return _encode(self.response.payload())

    def failure(self, error: ApiError) -> bytes:
        """The response is over and broken."""
        self.response.fail(error)
        return self._about("response.failed")

    def cancelled(self) -> None:
        """For those who follow it: the response is over, and nobody wanted it. There is no event of that name."""
        self._about("response.failed")

    def _say(self, kind: str, text: str) -> list[bytes]:
        events = self._begin(kind) if self._kind != kind else []
        self._texts.append(text)
        name, id, index = _TEXTS[kind].encode(), self._item_id.encode(), len(self.response.output)
        part = b"" if kind in CALLS else b'"content_index":0,'
        tail = b',"logprobs":[]' if kind == MESSAGE else b""
        if kind == MESSAGE and self._pending:
            logprobs = self._take_logprobs()
            self._logprobs += logprobs
            tail = b',"logprobs":' + _encode(logprobs)
        events.append(self._numbered(_DELTA % (name, name, self._sequence, id, index, part, _encode(text), tail)))
        return events

    def _begin(self, kind: str, call: CallDelta | None = None) -> list[bytes]:
        """An item begins, and with it the only part of its content."""
        events = self._end("completed")
        self._kind, self._item_id, self._texts, self._logprobs = kind, new_id(_PREFIXES[kind]), [], []
        self._call = call or self._call
        item = _item(kind, self._item_id, IN_PROGRESS, "", self._call)
        place = self._place()
        if kind not in CALLS:
            item["content"] = []
        events.append(self._event("response.output_item.added", output_index=place["output_index"], item=item))
        if kind not in CALLS:
            events.append(self._event("response.content_part.added", **place, part=_part(kind, "")))
        return events

    def _end(self, status: str) -> list[bytes]:
        """The item under way ends, if there is one."""
        if not self._kind:
            return []
        kind, text, place = self._kind, "".join(self._texts), self._place()
        item = _item(kind, self._item_id, status, text, self._call, self._logprobs)
        name = f"response.{_TEXTS[kind]}.done"
        if kind == CALL:
            events = [self._event(name, **place, name=self._call.name, arguments=text)]
        elif kind == CUSTOM:
            events = [self._event(name, **place, input=text)]
        else:
            extra: dict[str, Any] = {"logprobs": self._logprobs} if kind == MESSAGE else {}
            events = [
                self._event(name, **place, text=text, **extra),
                self._event("response.content_part.done", **place, part=_part(kind, text, self._logprobs)),
            ]
        events.append(self._event("response.output_item.done", output_index=place["output_index"], item=item))
        self.response.output.append(item)
        self._kind = ""
        return events

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item_id, "output_index": len(self.response.output)}
        return place if self._kind in CALLS else {**place, "content_index": 0}

    def _about(self, kind: str) -> bytes:
        return self._event(kind, response=self.response.payload())

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        return self._numbered(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(body)))

    def _numbered(self, event: bytes) -> bytes:
        """The event that has the next number."""
        self._sequence += 1
        if self.response.log is not None:
            self.response.log.append(event)
        return event

    def _take_logprobs(self) -> list[JsonItem]:
        """Those that no message has yet."""
        entries, self._pending = self._pending, []
        return [chat_logprob(self._tokenizer, entry, self._num_logprobs) for entry in entries]


def _status(reason: str) -> str:
    return "completed" if reason in ("stop", "tool_calls") else "incomplete"


def _kind(call: CallDelta) -> str:
    return CUSTOM if call.custom else CALL


def _item(kind: str, id: str, status: str, text: str, call: CallDelta, logprobs: Sequence[JsonItem] = ()) -> JsonItem:
    item: JsonItem = {"id": id, "type": kind, "status": status}
    if kind == CALL:
        return {**item, "call_id": call.id, "name": call.name, "arguments": text}
    if kind == CUSTOM:
        return {**item, "call_id": call.id, "name": call.name, "input": text}
    if kind == REASONING:
        return {**item, "summary": [], "content": [_part(kind, text)]}
    return {**item, "role": "assistant", "content": [_part(kind, text, logprobs)]}


def _part(kind: str, text: str, logprobs: Sequence[JsonItem] = ()) -> JsonItem:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
