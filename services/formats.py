"""OpenAI's JSON for answers and stream chunks of both endpoints. Builds bytes; decides nothing.

A chunk is assembled from a head that is encoded once per answer: a token's chunk costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from services.choice import Piece, TokenLogprob
from services.errors import ApiError
from services.prompt_logprobs import ToldPrompts, by_text, spelled
from services.sse import DONE, PING, Framing
from services.text.tokenizer import Tokenizer
from services.tools.calls import CallDelta

_encode = msgspec.json.Encoder().encode
_COMPLETION_TEXT = b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null}'
_CHAT_TEXT = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer. `completion_tokens` counts every sampled token, the one that ended it included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def payload(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        details = {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **(details if self.reasoning_tokens else {}),
        }


@dataclass(slots=True)
class Whole:
    """One complete choice of an answer that is not streamed."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str
    stop_reason: int | str | None
    prompt_ids: Sequence[int]
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    said: int = 0
    """How many log-probabilities there were when its text ended."""

    def add_calls(self, deltas: Sequence[CallDelta]) -> None:
        """What is new in the calls, in order."""
        for delta in deltas:
            if delta.id:
                self.calls.append(replace(delta))
            else:
                self.calls[delta.index].arguments += delta.arguments


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer have in common."""

    id: str
    created: int
    model: str


class Format(Framing, Protocol):
    """How one endpoint writes its answers."""

    def opening(self) -> bytes:
        """What a stream begins with, before there are tokens; possibly nothing."""
        ...

    def first(self, index: int, prompt_ids: Sequence[int], usage: Usage | None = None) -> bytes:
        """What a choice's stream begins with, possibly nothing."""
        ...

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """One `data:` event with what is new in a choice."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event with the usage and no choices."""
        ...

    def answer(self, choices: list[Whole], usage: Usage) -> bytes:
        """The whole answer."""
        ...


class _Base:
    """Shared by both formats: the head, the tail, and the usage."""

    chunk_object = ""
    answer_object = ""
    ping = PING
    done = DONE

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        logprobs: int,
        usage_null: bool = False,
        token_ids: bool = False,
        told: ToldPrompts | None = None,
    ) -> None:
        self._told = told
        self._head = head
        self._tokenizer = tokenizer
        self._num_logprobs = logprobs
        self._token_ids = token_ids
        self._open = b"data: " + _encode(self._top(self.chunk_object))[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if usage_null else b"]}\n\n"
        self._plain = logprobs < 0 and not token_ids
        self._fronts: dict[int, bytes] = {}

    def opening(self) -> bytes:
        """Nothing: the first chunk comes with the first token."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """One event with the error."""
        return b"data: " + error.body() + b"\n\n"

    def _top(self, kind: str) -> dict[str, Any]:
        return {"id": self._head.id, "object": kind, "created": self._head.created, "model": self._head.model}

    def _short(self, index: int, text: str, front: bytes, back: bytes) -> bytes:
        """The event of most tokens, which differ in their text alone. Fronts and backs are those of one format."""
        begin = self._fronts.get(index)
        if begin is None:
            begin = self._fronts[index] = self._open + front % index
        return b"%b%b%b%b" % (begin, _encode(text), back, self._close)

    def _event(self, choice: bytes, usage: Usage | None) -> bytes:
        if usage is None:
            return self._open + choice + self._close
        return self._open + choice + b'],"usage":' + _encode(usage.payload()) + b"}\n\n"

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event with the usage and no choices."""
        return self._event(b"", usage)

    def _answer(self, choices: list[dict[str, Any]], usage: Usage, **more: Any) -> bytes:
        return _encode({**self._top(self.answer_object), "choices": choices, "usage": usage.payload(), **more})

    @property
    def _lists(self) -> ToldPrompts | None:
        """The prompts' log-probabilities, if vLLM's list of them is shown."""
        return self._told if self._told is not None and self._told.shows_list else None

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def _reasons(self, piece: Piece | Whole) -> dict[str, Any]:
        reasons: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            reasons["stop_reason"] = piece.stop_reason
        return reasons


class CompletionFormat(_Base):
    """`text_completion` objects. `echo` holds the prompt's text per choice index, empty if it isn't echoed."""

    chunk_object = answer_object = "text_completion"

    def __init__(self, *args: Any, echo: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._echo = echo

    def first(self, index: int, prompt_ids: Sequence[int], usage: Usage | None = None) -> bytes:
        """The echoed prompt, and the prompt's ids if token ids were asked for."""
        if not self._echo and not self._token_ids:
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo[index] if self._echo else "",
            "logprobs": self._with_echo(index, {}),
            "finish_reason": None,
        }
        if self._token_ids:
            choice |= {"prompt_token_ids": list(prompt_ids), "token_ids": []}
        return self._event(_encode(choice), usage)

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """One event with new text."""
        if self._plain and piece.finish_reason is None and usage is None:
            return self._short(index, piece.text, *_COMPLETION_TEXT)
        fields: dict[str, Any] = {"index": index, "text": piece.text, "logprobs": self._logprobs(index, piece.logprobs)}
        fields |= self._reasons(piece)
        if self._token_ids:
            fields["token_ids"] = piece.token_ids
        return self._event(_encode(fields), usage)

    def answer(self, choices: list[Whole], usage: Usage) -> bytes:
        """The whole answer."""
        made: list[dict[str, Any]] = []
        for index, whole in enumerate(choices):
            fields: dict[str, Any] = {
                "index": index,
                "text": (self._echo[index] if self._echo else "") + whole.text,
                "logprobs": self._with_echo(index, self._logprobs(index, whole.logprobs)),
                **self._reasons(whole),
            }
            if self._lists is not None:
                fields["prompt_logprobs"] = self._lists.list_of(index)
            if self._token_ids:
                fields |= {"prompt_token_ids": list(whole.prompt_ids), "token_ids": whole.token_ids}
            made.append(fields)
        return self._answer(made, usage)

    def _with_echo(self, index: int, following: dict[str, Any] | None) -> msgspec.Raw | dict[str, Any] | None:
        """The log-probabilities of an answer's tokens, behind those of the prompt if they are echoed."""
        if self._told is None or not self._told.shows_echo:
            return following or None
        return self._told.echo_of(index, following or {})

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._num_logprobs < 0:
            return None
        shift = len(self._echo[index]) if self._echo else 0
        return {
            "text_offset": [entry.offset + shift for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "tokens": [spelled(self._bytes(entry.token)) for entry in entries],
            "top_logprobs": [
                by_text(self._tokenizer, entry.top[: self._num_logprobs], entry.token, entry.logprob)
                for entry in entries
            ],
        }


class ChatFormat(_Base):
    """`chat.completion` objects and their chunks."""

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def __init__(self, *args: Any, may_call: bool = False, functions: bool = False, **kwargs: Any) -> None:
        """`functions`: the client knows `function_call` and no tools."""
        super().__init__(*args, **kwargs)
        self._functions = functions
        self._begin = None if may_call else ""  # as at OpenAI: whether there will be any content is not known yet

    def first(self, index: int, prompt_ids: Sequence[int], usage: Usage | None = None) -> bytes:
        """The chunk with the role."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": self._begin},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._token_ids:
            choice |= {"prompt_token_ids": list(prompt_ids), "token_ids": []}
        return self._event(_encode(choice), usage)

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """One event with new text."""
        text_only = piece.finish_reason is None and not piece.calls and not piece.reasoning
        if self._plain and text_only and usage is None:
            return self._short(index, piece.text, *_CHAT_TEXT)
        fields: dict[str, Any] = {
            "index": index,
            "delta": self._older(_delta(piece)),
            "logprobs": self._logprobs(piece.logprobs) if piece.logprobs else None,
            **self._reasons(piece),
        }
        if self._token_ids:
            fields["token_ids"] = piece.token_ids
        return self._event(_encode(fields), usage)

    def answer(self, choices: list[Whole], usage: Usage) -> bytes:
        """The whole answer."""
        made: list[dict[str, Any]] = []
        for index, whole in enumerate(choices):
            fields: dict[str, Any] = {
                "index": index,
                "message": self._older(_message(whole)),
                "logprobs": self._logprobs(whole.logprobs),
                **self._reasons(whole),
            }
            if self._token_ids:
                fields |= {"prompt_token_ids": list(whole.prompt_ids), "token_ids": whole.token_ids}
            made.append(fields)
        lists = {} if self._lists is None else {"prompt_logprobs": self._lists.list_of(0)}
        return self._answer(made, usage, **lists)

    def _older(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message or delta in the words that the client knows."""
        if self._functions and "tool_calls" in message:
            (call,) = message.pop("tool_calls")
            message["function_call"] = call["function"]
        return message

    def _reasons(self, piece: Piece | Whole) -> dict[str, Any]:
        reasons = super()._reasons(piece)
        if self._functions and piece.finish_reason == "tool_calls":
            reasons["finish_reason"] = "function_call"
        return reasons

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._num_logprobs < 0:
            return None
        content = [chat_logprob(self._tokenizer, entry, self._num_logprobs) for entry in entries]
        return {"content": content, "refusal": None}


def chat_logprob(tokenizer: Tokenizer, entry: TokenLogprob, most: int) -> dict[str, Any]:
    """A token with its log-probability and so many alternatives, as chat and its relatives have it."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return {
        **one(entry.token, entry.logprob),
        "top_logprobs": [one(token, logprob) for token, logprob in entry.top[:most]],
    }


def _delta(piece: Piece) -> dict[str, Any]:
    """What is new in a message."""
    delta: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    if piece.text:
        delta["content"] = piece.text
    if piece.calls:
        delta["tool_calls"] = [
            {"index": call.index, **_call(call)} if call.id else {"index": call.index, **_more(call)}
            for call in piece.calls
        ]
    return delta


def _message(whole: Whole) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["content"] = whole.text or None
        message["tool_calls"] = [_call(call) for call in whole.calls]
    return message


def _call(call: CallDelta) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _more(call: CallDelta) -> dict[str, Any]:
    if call.custom:
        return {"custom": {"input": call.arguments}}
    return {"function": {"arguments": call.arguments}}
