"""What parsers report, as it comes: content and tool calls. Numbers the calls; knows no format.

Blanks around calls are kept out of content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class CallDelta:
    """What is new in one call. The first delta of a call, and no other, has its id and name.

    `custom`: it is one of a custom tool, and `arguments` the text of its input.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    custom: bool = False


class Sink:
    """Collects what a parser finds. `single` keeps the first call and drops the others.

    Blanks before a call, and after one that nothing was said before, are markup. So blanks at the end of content wait
    until it is known what follows.
    """

    def __init__(self, new_id: Callable[[], str], *, single: bool = False) -> None:
        self._new_id = new_id
        self._single = single
        self._begun = 0
        self._ended = 0
        self._blanks = ""
        self._said = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    @property
    def num_calls(self) -> int:
        """Calls that have begun, dropped ones included."""
        return self._begun

    @property
    def complete(self) -> bool:
        """Whether there are calls and none is cut."""
        return self._begun > 0 and self._begun == self._ended

    def content(self, text: str) -> None:
        """Text that is no call."""
        text = self._blanks + text
        if self._begun and not self._said:
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._content.append(shown)
            self._said = True

    def begin(self, name: str) -> None:
        """A call of this function begins."""
        self._blanks = ""
        if not self._dropped(self._begun):
            self._calls.append(CallDelta(self._begun, self._new_id(), name))
        self._begun += 1

    def arguments(self, text: str) -> None:
        """The next piece of the arguments' JSON."""
        index = self._begun - 1
        if not text or self._dropped(index):
            return
        if self._calls and self._calls[-1].index == index:
            self._calls[-1].arguments += text
        else:
            self._calls.append(CallDelta(index, arguments=text))

    def end(self) -> None:
        """The call that began last is complete."""
        self._ended = self._begun

    def finish(self) -> None:
        """Nothing more comes. Blanks at the end of an answer without calls are content."""
        if self._blanks and not self._begun:
            self._content.append(self._blanks)
        self._blanks = ""

    def take(self) -> tuple[str, list[CallDelta]]:
        """What came since the last time."""
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _dropped(self, index: int) -> bool:
        return self._single and index > 0
