"""Turns one request's tokens into text as they come: whole characters only, stop strings applied, nothing taken back.

It does not know about end ids: whoever owns the request ends it there and doesn't push that token.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from services.text.stop import StopMatcher
from services.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8
_utf8 = codecs.getincrementaldecoder("utf-8")


class Delta(NamedTuple):
    """`text` to send now; `stopped`: the stop string that ended the output; `tokens`: how many more tokens now have all
    their text sent, so that per-token data (logprobs) can go out with the text it belongs to."""

    text: str
    stopped: str | None
    tokens: int


class Detokenizer:
    """The text of one output. The joined deltas and `finish()` equal `Tokenizer.decode` of all its tokens at once.

    - Special tokens are skipped if asked, but those in `shown` never.
    - A character spread over several tokens is sent when its last byte is there. What is still incomplete at the end
      becomes U+FFFD, once. The cost per token doesn't depend on the length of the output.
    - With a prompt, the output goes on from it: a first token `▁Hi` keeps its space, and a character whose first bytes
      end the prompt belongs to the output.
    - Stop strings: see `StopMatcher`. A match must end in a token after the first `min_tokens`. Text after the stop is
      dropped even inside the token that completed it, and tokens pushed later are ignored. `token_count` counts the
      tokens up to and with that one: all of them are usage, whether their text was sent or not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self._decoder = _utf8("replace")
        self._inside = False  # a character that isn't complete
        self._prompt_tail = b""
        self._begun = any(token not in self._skipped and tokenizer.token_bytes(token) for token in prompt_ids)
        if self._begun:
            self._prompt_tail = self._incomplete_end(prompt_ids)
        self._sent: list[str] = []
        self._decoded_length = self._sent_length = 0
        self._ends: deque[int] = deque()  # where in the decoded text each token not yet reported ends
        self.token_count = 0
        self.stopped: str | None = None
        self._finished = False

    @property
    def text(self) -> str:
        """All text sent so far."""
        if len(self._sent) > 1:
            self._sent = ["".join(self._sent)]
        return self._sent[0] if self._sent else ""

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Takes the next tokens; returns what may be sent. After a stop, and for no tokens, the delta is empty."""
        if self._finished:
            raise RuntimeError("a finished output takes no more tokens")
        parts: list[str] = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.token_count += 1
            text = self._text(token_id)
            self._decoded_length += len(text)
            # A token that ends inside a character has its text out when that character is.
            self._ends.append(self._decoded_length + self._inside)
            if not text:
                continue
            if self._matcher is None:
                parts.append(text)
                continue
            text, self.stopped = self._matcher.feed(text, armed=self.token_count > self._min_tokens)
            parts.append(text)
        return self._send("".join(parts))

    def finish(self) -> str:
        """Ends the output: returns what was held back, an incomplete character as U+FFFD. Empty after a stop."""
        if self._finished or self.stopped is not None:
            self._finished = True
            return ""
        self._finished = True
        rest = (self._matcher.release() if self._matcher else "") + self._decoder.decode(b"", final=True)
        self._ends.clear()
        return self._send(rest).text

    def _send(self, text: str) -> Delta:
        if text:
            self._sent.append(text)
            self._sent_length += len(text)
        if self.stopped is not None:
            tokens = len(self._ends)
            self._ends.clear()
        else:
            tokens = 0
            while self._ends and self._ends[0] <= self._sent_length:
                self._ends.popleft()
                tokens += 1
        return Delta(text, self.stopped, tokens)

    def _text(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        # Between whole characters a token's text doesn't depend on its neighbours: most are looked up, not decoded.
        if self._begun and not self._inside and not self._prompt_tail:
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        text = self._decode(token_id)
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def _decode(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        if not raw:
            return ""
        if not self._begun:
            self._begun = True
            raw = self._tokenizer.first_token_bytes(token_id)
        elif self._prompt_tail:
            tail, self._prompt_tail = self._prompt_tail, b""
            if _continues(tail, raw[:1]):
                raw = tail + raw
        return self._decoder.decode(raw)

    def _incomplete_end(self, prompt_ids: Sequence[int]) -> bytes:
        """The first bytes of a character that end the prompt without completing it; mostly none."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        decoder = _utf8("replace")
        decoder.decode(tail)
        return decoder.getstate()[0]


def _continues(tail: bytes, byte: bytes) -> bool:
    """Whether `tail + byte` is, or can still become, a character."""
    try:
        _utf8("strict").decode(tail + byte)
    except UnicodeDecodeError:
        return False
    return True
