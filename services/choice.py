"""From one generation's tokens to what a client reads: text pieces, their logprobs, and why it ended.

Stop strings are found here; stop tokens and lengths are the scheduler's business. The same code feeds streams and
whole answers, so that both are the same.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from protocol.columns import f32, i32
from protocol.messages import RequestStatus, TokenLogprobs
from services.errors import ApiError
from services.journal import Generation
from services.prompt_logprobs import LOGPROB_FLOOR
from services.text.detokenizer import Delta, Detokenizer
from services.text.tokenizer import Tokenizer
from services.tools.calls import CallDelta
from services.tools.reader import MessageReader

_utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request wants its tokens as text. A `reader` splits the text into a message; `shown` is for its eyes.
    `silent`: no token is wanted, only what is known of the prompt."""

    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: bool = False
    silent: bool = False
    shown: frozenset[int] = frozenset()
    reader: Callable[[], MessageReader] | None = None


@dataclass(slots=True)
class TokenLogprob:
    """One sampled token: where its text starts in the answer, its log-probability, and the alternatives, best first."""

    token: int
    offset: int
    logprob: float
    top: list[tuple[int, float]]


class Piece(msgspec.Struct):
    """What is new in a choice. `finish_reason` is set on the last piece and on no other."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.shown or self.token_ids or self.logprobs or self.finish_reason)

    @property
    def shown(self) -> bool:
        """Whether there is more of the message."""
        return bool(self.text or self.reasoning or self.calls)


class Choice:
    """Follows one generation. `stop` is called when a stop string ended it, so that the scheduler ends it too."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        options: TextOptions,
        stop: Callable[[Generation], None],
    ) -> None:
        params = generation.params
        self.generation = generation
        self.done = False
        self.num_tokens = 0
        self._options = options
        self._stop = stop
        self._enders = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(params.eos_token_ids)
        )
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids=prompt_ids,
            skip_special_tokens=options.skip_special_tokens,
            shown=options.shown,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=params.min_tokens,
        )
        self._tokenizer = tokenizer
        self._reader = options.reader() if options.reader is not None else None
        self._plain = self._reader is None and not options.logprobs and not options.silent
        self._waiting: list[TokenLogprob] = []
        self._characters = _utf8("replace")
        self._offset = 0

    def advance(self) -> Piece:
        """What came since the last call, possibly nothing. After it, `error` is set if the generation failed."""
        generation, piece = self.generation, Piece()
        if self.done or self._advance_plainly(piece):
            return piece
        if self._options.silent:
            if generation.finished is not None:
                self._finish(piece, "length", None)
            return piece
        fresh = generation.tokens[self.num_tokens :]
        if self._options.logprobs:
            fresh = fresh[: max(0, len(generation.logprobs) - self.num_tokens)]
        ends = self._hide_ender(fresh)
        if fresh and ends is None:
            fresh.pop()  # may be the token that ended it: the next event tells
        stopped = self._push(fresh, piece, hide_last=bool(ends))
        if stopped is not None:
            self._stop(generation)
            self._finish(piece, "stop", stopped)
        elif generation.finished is not None and self.num_tokens < len(generation.tokens):
            generation.error = ApiError(500, "Log-probabilities of some tokens are missing", code="logprobs_lost")
        elif generation.finished is not None:
            piece.text += self._detokenizer.finish()
            status, token = generation.finished.status, generation.finished.stop_token
            if status is RequestStatus.STOPPED:
                self._finish(piece, "stop", token if token in generation.params.stop_token_ids else None)
            elif status is RequestStatus.REPETITION:
                self._finish(piece, "repetition", "repetition_detected")
            else:
                self._finish(piece, "length", None)
        if self.done and self._waiting:
            piece.logprobs += self._waiting
            self._waiting = []
        if self._reader is not None:
            self._as_message(piece, self._reader)
        return piece

    def _advance_plainly(self, piece: Piece) -> bool:
        """Tokens that are nothing but text, as most are. False: there is more to it, and nothing was done."""
        generation = self.generation
        fresh = generation.tokens[self.num_tokens :]
        if not (self._plain and fresh and generation.finished is None and fresh[-1] not in self._enders):
            return False
        before = self._detokenizer.token_count
        delta = self._detokenizer.push(fresh)
        piece.text = delta.text
        piece.token_ids = fresh
        if delta.stopped is not None:
            del fresh[self._detokenizer.token_count - before :]
            self._stop(generation)
            self._finish(piece, "stop", delta.stopped)
        self.num_tokens += len(fresh)
        return True

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that the model used to think."""
        return self._reader.reasoning_tokens if self._reader is not None else 0

    @property
    def error(self) -> ApiError | None:
        """Why this choice will never be complete."""
        return None if self.done else self.generation.error

    def _hide_ender(self, fresh: list[int]) -> bool | None:
        """Whether the last fresh token's text is to be left out because it ended the answer; None: not known yet."""
        generation = self.generation
        if not fresh or self._options.include_stop or fresh[-1] not in self._enders:
            return False
        if self.num_tokens + len(fresh) < len(generation.tokens):
            return False
        if generation.finished is not None:
            return generation.finished.stop_token == fresh[-1]
        return False if generation.error is not None else None

    def _push(self, fresh: list[int], piece: Piece, *, hide_last: bool) -> str | None:
        """Turn tokens into text; returns the stop string that was met. Counts only the tokens up to it."""
        shown = fresh[:-1] if hide_last else fresh
        before = self._detokenizer.token_count
        delta = self._read(shown, piece)
        self._take(shown[: self._detokenizer.token_count - before], piece, visible=True)
        if hide_last and delta.stopped is None:
            self._take(fresh[-1:], piece, visible=False)
        # Log-probabilities go out with the text they belong to, not while it may still be part of a stop string.
        piece.logprobs = self._waiting[: delta.tokens]
        del self._waiting[: delta.tokens]
        return delta.stopped

    def _read(self, tokens: list[int], piece: Piece) -> Delta:
        """Tokens as text. While the model may be thinking, one by one: only so its thoughts can be counted."""
        reader = self._reader
        if reader is None or not reader.thinking:
            delta = self._detokenizer.push(tokens)
            piece.text += delta.text
            return delta
        sent = 0
        stopped = None
        for token in tokens:
            text, stopped, complete = self._detokenizer.push((token,))
            reader.feed(text, 1)
            sent += complete
            if stopped is not None:
                break
        return Delta("", stopped, sent)

    def _as_message(self, piece: Piece, reader: MessageReader) -> None:
        """Replace a piece's text by what it means."""
        reader.feed(piece.text)
        if self.done:
            reader.finish()
            if piece.finish_reason == "stop" and reader.called:
                piece.finish_reason = "tool_calls"
        piece.reasoning, piece.text, piece.calls = reader.take()

    def _take(self, tokens: list[int], piece: Piece, *, visible: bool) -> None:
        piece.token_ids.extend(tokens)
        if self._options.logprobs:
            for index, token in enumerate(tokens, self.num_tokens):
                self._waiting.append(_entry(self.generation.logprobs[index], token, self._offset))
                if visible and not (self._options.skip_special_tokens and token in self._tokenizer.special_ids):
                    self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token)))
        self.num_tokens += len(tokens)

    def _finish(self, piece: Piece, reason: str, stop_reason: int | str | None) -> None:
        self.done = True
        self.generation.outcome = reason
        piece.finish_reason = reason
        piece.stop_reason = stop_reason


def _entry(report: TokenLogprobs, token: int, offset: int) -> TokenLogprob:
    top = zip(i32(report.top_ids).tolist(), f32(report.top_logprobs).tolist(), strict=True)
    return TokenLogprob(token, offset, finite(report.logprob), [(t, finite(p)) for t, p in top])


def finite(logprob: float) -> float:
    """A number that JSON can hold: minus infinity and NaN become the floor."""
    return logprob if math.isfinite(logprob) and logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
