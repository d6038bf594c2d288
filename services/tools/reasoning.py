"""Splits an answer into what the model thinks, between `<think>` and `</think>`, and what it says."""

from __future__ import annotations

from enum import Enum, auto

OPEN, CLOSE = "<think>", "</think>"
MARKERS = (OPEN, CLOSE)


class _State(Enum):
    BEFORE, INSIDE, AFTER = auto(), auto(), auto()


class Reasoning:
    """Reads one answer. `inside`: it begins with thoughts, because the prompt has opened them or the model always does.

    Otherwise only an answer that begins with `<think>` has thoughts. Blanks around both parts are markup. Counts the
    tokens up to the end marker, if it gets one token at a time.
    """

    def __init__(self, *, inside: bool) -> None:
        self.num_tokens = 0
        self._inside = inside
        self._state = _State.BEFORE
        self._held = ""
        self._undecided = 0
        self._trim = False

    @property
    def thinking(self) -> bool:
        """Whether the next token may be a thought."""
        return self._state is not _State.AFTER

    def feed(self, text: str, num_tokens: int = 0) -> tuple[str, str]:
        """The next text, made by so many tokens; returns thoughts and content."""
        if self._state is _State.INSIDE:
            self.num_tokens += num_tokens
        elif self._state is _State.BEFORE:
            self._undecided += num_tokens
        self._held += text
        if self._state is _State.BEFORE:
            self._decide()
        thoughts = self._thoughts() if self._state is _State.INSIDE else ""
        return thoughts, self._content() if self._state is _State.AFTER else ""

    def finish(self) -> tuple[str, str]:
        """What was held back when the answer ends."""
        held, self._held = self._held, ""
        if self._state is _State.AFTER or (self._state is _State.BEFORE and not self._inside):
            return "", held if self._state is _State.BEFORE else ""
        return held.rstrip(), ""

    def _decide(self) -> None:
        begin = self._held.lstrip()
        if len(begin) < len(OPEN) and OPEN.startswith(begin):
            return
        opened = begin.startswith(OPEN)
        if opened or self._inside:
            self._held = begin.removeprefix(OPEN)
            self._state, self._trim = _State.INSIDE, True
            self.num_tokens += self._undecided
        else:
            self._state = _State.AFTER

    def _thoughts(self) -> str:
        """What is surely a thought: no beginning of the end marker, and no blanks that may be the last ones."""
        self._trim_held()
        end = self._held.find(CLOSE)
        if end >= 0:
            thoughts, self._held = self._held[:end].rstrip(), self._held[end + len(CLOSE) :]
            self._state = _State.AFTER
            self._trim = True
            return thoughts
        cut = len(self._held)
        for length in range(min(len(CLOSE) - 1, cut), 0, -1):
            if CLOSE.startswith(self._held[-length:]):
                cut -= length
                break
        cut = len(self._held[:cut].rstrip())
        thoughts, self._held = self._held[:cut], self._held[cut:]
        return thoughts

    def _content(self) -> str:
        self._trim_held()
        content, self._held = self._held, ""
        return content

    def _trim_held(self) -> None:
        """Drop the blanks that a part begins with."""
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
