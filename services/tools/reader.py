"""From an answer's text to a message: thoughts, content, tool calls. The same for streams and whole answers."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from services.tools.calls import CallDelta
from services.tools.custom import Inputs
from services.tools.parser import Parser
from services.tools.reasoning import Reasoning


class Parts(NamedTuple):
    """What is new in a message."""

    reasoning: str
    content: str
    calls: list[CallDelta]


class MessageReader:
    """Reads one choice. Without a parser what isn't thought is content. `custom` names tools whose input is a text."""

    def __init__(
        self,
        reasoning: Reasoning | None,
        parser: Parser | None,
        *,
        show_reasoning: bool = True,
        custom: Collection[str] = (),
    ) -> None:
        self._reasoning = reasoning
        self._parser = parser
        self._show = show_reasoning
        self._inputs = Inputs(custom) if custom else None
        self._thoughts: list[str] = []
        self._content: list[str] = []

    @property
    def thinking(self) -> bool:
        """Whether tokens have to come one at a time, for counting those of the reasoning."""
        return self._reasoning is not None and self._reasoning.thinking

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that were thoughts, markers included."""
        return self._reasoning.num_tokens if self._reasoning is not None else 0

    @property
    def called(self) -> bool:
        """Whether the answer has calls, all of them complete."""
        return self._parser is not None and self._parser.sink.complete

    def feed(self, text: str, num_tokens: int = 0) -> None:
        """The next text, made by so many tokens."""
        if self._reasoning is None:
            self._say(text)
            return
        thoughts, content = self._reasoning.feed(text, num_tokens)
        self._thoughts.append(thoughts)
        self._say(content)

    def finish(self) -> None:
        """The answer is over."""
        if self._reasoning is not None:
            thoughts, content = self._reasoning.finish()
            self._thoughts.append(thoughts)
            self._say(content)
        if self._parser is not None:
            self._parser.finish()

    def take(self) -> Parts:
        """What came since the last time."""
        thoughts, content = "".join(self._thoughts), "".join(self._content)
        self._thoughts.clear()
        self._content.clear()
        calls: list[CallDelta] = []
        if self._parser is not None:
            content, calls = self._parser.sink.take()
            if self._inputs is not None:
                calls = self._inputs.replaced(calls)
        return Parts(thoughts if self._show else "", content, calls)

    def _say(self, text: str) -> None:
        if self._parser is not None:
            self._parser.feed(text)
        else:
            self._content.append(text)
