"""Tool calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Generator

from services.tools.parser import Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(Parser):
    """One JSON object for each pair of markers."""

    markers = (OPEN, CLOSE)

    def parse(self) -> Generator[None, None, None]:
        """Content up to a marker, then a call or, if what follows is none, more content."""
        while (yield from self.content_until(OPEN)):
            self._at -= len(OPEN)
            self.pin()
            self._at = len(OPEN)
            yield from self.blanks()
            if (yield from self.call_object(marked=True)):
                yield from self.close_call(CLOSE)
            else:
                self.no_call(OPEN)
