"""Log-probabilities of prompts: gathered part by part, each once, and written as JSON when they are complete.

A `PromptReport` belongs to a generation, `ToldPrompts` to a job: what a client asked for of them, in vLLM's shape or in
that of OpenAI's echo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from protocol.columns import f32, i32
from protocol.messages import PromptLogprobs
from services.errors import ApiError
from services.text.tokenizer import Tokenizer

MOST_NUMBERS = 1 << 20
"""Log-probabilities that an answer has of its prompts at most: some 50 MB of JSON, and each request may have them."""
LOGPROB_FLOOR = -9999.0
_SLICE = 256
"""Tokens that are written without a pause for other requests."""
_encode = msgspec.json.Encoder().encode


class TokenReport(NamedTuple):
    """What is known of one prompt token but the first: the likeliest ids at its place, best first, beside its own."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class PromptReport:
    """The parts of one prompt's log-probabilities that have come, without gaps or repetitions."""

    __slots__ = ("_parts", "next", "num_prompt")

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.next = 1  # the first token has none
        self._parts: list[tuple[int, PromptLogprobs]] = []

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self.next >= self.num_prompt

    def add(self, part: PromptLogprobs) -> None:
        """Keep what is new in a part. One that leaves a gap is of no use: the report is never complete then."""
        if part.position <= self.next < part.end:
            self._parts.append((self.next - part.position, part))
            self.next = part.end

    def tokens(self) -> Iterator[TokenReport]:
        """From the second token on."""
        for known, part in self._parts:
            own, ranks = _finite(part.logprobs), i32(part.ranks).tolist()
            ids = i32(part.top_ids).reshape(len(own), -1).tolist()
            values = _finite(part.top_logprobs).reshape(len(own), -1).tolist()
            for index in range(known, len(own)):
                yield TokenReport(float(own[index]), ranks[index], ids[index], values[index])


class ToldPrompts:
    """What an answer shows of its prompts, each of which has `n` choices. `listed` and `echoed` are the numbers of
    alternatives in vLLM's list and in OpenAI's echo (of `texts`), -1: not shown. ApiError if it is too much.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        n: int,
        *,
        listed: int = -1,
        echoed: int = -1,
        texts: Sequence[str] = (),
    ) -> None:
        numbers = sum(map(len, prompts)) * n * (listed + echoed + 2)
        if numbers > MOST_NUMBERS:
            message = f"the prompts would have {numbers} log-probabilities, at most {MOST_NUMBERS} are told at once"
            raise ApiError(400, message, code="out_of_range", param="logprobs" if listed < 0 else "prompt_logprobs")
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = n
        self._listed = listed
        self._echoed = echoed
        self._texts = texts
        self._lists: dict[int, msgspec.Raw] = {}
        self._echoes: dict[int, dict[str, bytes]] = {}

    @property
    def shows_list(self) -> bool:
        """Whether there is a list."""
        return self._listed >= 0

    @property
    def shows_echo(self) -> bool:
        """Whether echoed tokens have log-probabilities."""
        return self._echoed >= 0

    async def write(self, number: int, report: PromptReport) -> None:
        """Write a prompt's complete report down."""
        ids = self._prompts[number]
        listed: list[bytes] = []
        echo = _Echo(self._tokenizer, self._texts[number] if self.shows_echo else "", self._echoed)
        tokens = zip(ids, chain((None,), report.tokens()), strict=True)
        while these := list(islice(tokens, _SLICE)):
            if self.shows_list:
                listed.append(_encode([self._entry(*one) for one in these])[1:-1])
            if self.shows_echo:
                echo.add(these)
            await asyncio.sleep(0)
        self._lists[number] = msgspec.Raw(b"[" + b",".join(listed) + b"]")
        self._echoes[number] = {name: b",".join(parts) for name, parts in echo.columns.items()}

    def list_of(self, index: int) -> msgspec.Raw:
        """vLLM's `prompt_logprobs` of a choice."""
        return self._lists[index // self._n]

    def echo_of(self, index: int, following: dict[str, list[Any]]) -> msgspec.Raw:
        """OpenAI's `logprobs` of a choice: those of its prompt, then these."""
        columns = []
        for name, parts in self._echoes[index // self._n].items():
            rest = _encode(following.get(name, []))[1:-1]
            columns.append(b'"%b":[%b]' % (name.encode(), parts + b"," + rest if rest else parts))
        return msgspec.Raw(b"{" + b",".join(columns) + b"}")

    def _entry(self, token: int, report: TokenReport | None) -> dict[str, Any] | None:
        """vLLM's dictionary of one token: its own, then the likeliest."""
        if report is None:
            return None
        found = {token: self._one(token, report.logprob, report.rank)}
        best = zip(report.top_ids[: self._listed], report.top_logprobs, strict=False)
        for rank, (other, logprob) in enumerate(best, 1):
            if other != token:
                found[other] = self._one(other, logprob, rank)
        return {str(key): value for key, value in found.items()}

    def _one(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}


class _Echo:
    """The columns of OpenAI's `logprobs` for an echoed prompt, as JSON without brackets."""

    def __init__(self, tokenizer: Tokenizer, text: str, count: int) -> None:
        self.columns: dict[str, list[bytes]] = {
            name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        }
        self._tokenizer = tokenizer
        self._text = text.encode()
        self._count = count
        self._at = self._offset = 0

    def add(self, tokens: Sequence[tuple[int, TokenReport | None]]) -> None:
        """The next tokens, with what is known of them."""
        found: dict[str, list[Any]] = {name: [] for name in self.columns}
        for token, report in tokens:
            inside = self._text[self._at : self._at + 1] >= b"\x80" and self._text[self._at] & 0xC0 == 0x80
            found["text_offset"].append(self._offset - inside)  # a character that several tokens share is theirs
            found["tokens"].append(spelled(self._tokenizer.token_bytes(token)))
            found["token_logprobs"].append(None if report is None else report.logprob)
            found["top_logprobs"].append(None if report is None else self._best(token, report))
            self._pass(token)
        for name, values in found.items():
            self.columns[name].append(_encode(values)[1:-1])

    def _pass(self, token: int) -> None:
        """Go on behind a token's text. One that isn't in the text, as special tokens may be, has none."""
        piece = self._tokenizer.token_bytes(token)
        for text in (piece, piece.lstrip(b" ")):  # what begins a text may have lost the space before it
            if text and self._text.startswith(text, self._at):
                passed = self._text[self._at : self._at + len(text)]
                self._offset += sum(byte & 0xC0 != 0x80 for byte in passed)
                self._at += len(text)
                return

    def _best(self, token: int, report: TokenReport) -> dict[str, float]:
        best = zip(report.top_ids[: self._count], report.top_logprobs, strict=False)
        return by_text(self._tokenizer, best, token, report.logprob)


def by_text(tokenizer: Tokenizer, best: Iterable[tuple[int, float]], token: int, logprob: float) -> dict[str, float]:
    """OpenAI's `top_logprobs` of one token: the alternatives, best first, and the token if it is not among them."""
    found: dict[str, float] = {}
    for other, value in best:
        found.setdefault(spelled(tokenizer.token_bytes(other)), value)
    found.setdefault(spelled(tokenizer.token_bytes(token)), logprob)
    return found


def spelled(piece: bytes) -> str:
    """A token's bytes as text; those that are none are spelled out, where there is no field for bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(column: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Numbers that JSON can hold."""
    return np.maximum(np.nan_to_num(f32(column), nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR), np.float32(LOGPROB_FLOOR))
