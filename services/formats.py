"""OpenAI's JSON for answers and stream chunks of both endpoints. Builds bytes; decides nothing.

A chunk is assembled from a head that is encoded once per answer: a token's chunk costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from services.choice import Piece, TokenLogprob
from services.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer. `completion_tokens` counts every sampled token, the one that ended it included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def payload(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
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


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer have in common."""

    id: str
    created: int
    model: str


class Format(Protocol):
    """How one endpoint writes its answers."""

    def first(self, index: int, prompt_ids: Sequence[int]) -> bytes:
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

    def __init__(
        self, head: Head, tokenizer: Tokenizer, *, logprobs: int, usage_null: bool = False, token_ids: bool = False
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._num_logprobs = logprobs
        self._token_ids = token_ids
        self._open = b"data: " + _encode(self._top(self.chunk_object))[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if usage_null else b"]}\n\n"

    def _top(self, kind: str) -> dict[str, Any]:
        return {"id": self._head.id, "object": kind, "created": self._head.created, "model": self._head.model}

    def _event(self, choice: bytes, usage: Usage | None) -> bytes:
        if usage is None:
            return self._open + choice + self._close
        return self._open + choice + b'],"usage":' + _encode(usage.payload()) + b"}\n\n"

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event with the usage and no choices."""
        return self._event(b"", usage)

    def _answer(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return _encode({**self._top(self.answer_object), "choices": choices, "usage": usage.payload()})

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def _reasons(self, piece: Piece | Whole) -> dict[str, Any]:
        reasons: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            reasons["stop_reason"] = piece.stop_reason
        return reasons

    @property
    def _plain(self) -> bool:
        return self._num_logprobs < 0 and not self._token_ids


class CompletionFormat(_Base):
    """`text_completion` objects. `echo` holds the prompt's text per choice index, empty if it isn't echoed."""

    chunk_object = answer_object = "text_completion"

    def __init__(self, *args: Any, echo: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._echo = echo

    def first(self, index: int, prompt_ids: Sequence[int]) -> bytes:
        """The echoed prompt, and the prompt's ids if token ids were asked for."""
        if not self._echo and not self._token_ids:
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo[index] if self._echo else "",
            "logprobs": None,
            "finish_reason": None,
        }
        if self._token_ids:
            choice |= {"prompt_token_ids": list(prompt_ids), "token_ids": []}
        return self._event(_encode(choice), None)

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """One event with new text."""
        if self._plain and piece.finish_reason is None:
            choice = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, _encode(piece.text))
            return self._event(choice, usage)
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
                "logprobs": self._logprobs(index, whole.logprobs),
                **self._reasons(whole),
            }
            if self._token_ids:
                fields |= {"prompt_token_ids": list(whole.prompt_ids), "token_ids": whole.token_ids}
            made.append(fields)
        return self._answer(made, usage)

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._num_logprobs < 0:
            return None
        shift = len(self._echo[index]) if self._echo else 0
        return {
            "text_offset": [entry.offset + shift for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "tokens": [self._text(entry.token) for entry in entries],
            "top_logprobs": [self._top_dict(entry) for entry in entries],
        }

    def _top_dict(self, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives, best first, and the sampled token if it is not among them."""
        found: dict[str, float] = {}
        for token, logprob in [*entry.top[: self._num_logprobs], (entry.token, entry.logprob)]:
            found.setdefault(self._text(token), logprob)
        return found

    def _text(self, token: int) -> str:
        """A token as text; bytes that are none are spelled out, since this endpoint has no field for them."""
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatFormat(_Base):
    """`chat.completion` objects and their chunks."""

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def first(self, index: int, prompt_ids: Sequence[int]) -> bytes:
        """The chunk with the role."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._token_ids:
            choice |= {"prompt_token_ids": list(prompt_ids), "token_ids": []}
        return self._event(_encode(choice), None)

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """One event with new text."""
        if self._plain and piece.finish_reason is None:
            choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                index,
                _encode(piece.text),
            )
            return self._event(choice, usage)
        fields: dict[str, Any] = {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
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
                "message": {"role": "assistant", "content": whole.text, "refusal": None},
                "logprobs": self._logprobs(whole.logprobs),
                **self._reasons(whole),
            }
            if self._token_ids:
                fields |= {"prompt_token_ids": list(whole.prompt_ids), "token_ids": whole.token_ids}
            made.append(fields)
        return self._answer(made, usage)

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._num_logprobs < 0:
            return None
        content = []
        for entry in entries:
            top = [self._one(token, logprob) for token, logprob in entry.top[: self._num_logprobs]]
            content.append({**self._one(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}
