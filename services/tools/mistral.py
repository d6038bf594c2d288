"""Tool calls as Mistral's models write them: `[TOOL_CALLS][{…}, …]`, and since version 11 `[TOOL_CALLS]name{…}`."""

from __future__ import annotations

import re
from collections.abc import Generator

from services.tools.parser import NAME, Parser, Steps

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Mistral(Parser):
    """A list of objects, or a name and its arguments, after each marker."""

    markers = (CALLS, CALL_ID, ARGS)

    def parse(self) -> Generator[None, None, None]:
        """Content up to a marker, then its calls or, if what follows is none, more content."""
        while (yield from self.content_until(CALLS)):
            self._at -= len(CALLS)
            self.pin()
            self._at = len(CALLS)
            yield from self.blanks()
            if (yield from self.peek()) in ("[", "{"):
                found = yield from self._list()
            else:
                found = yield from self._named()
            if not found:
                self.no_call(CALLS)

    def _list(self) -> Steps:
        """`[{…}, {…}]`, or one object alone. What isn't a call in it, and what follows, is content."""
        yield from self.literal("[")
        found = False
        while True:
            yield from self.blanks()
            if not (yield from self.call_object(marked=True)):
                if found:
                    self.back()
                return found
            found = True
            yield from self.close_call()
            self.pin()
            yield from self.blanks()
            if (yield from self.literal("]")):
                self.unpin()
                return True
            if not (yield from self.literal(",")):
                self.back()
                return True

    def _named(self) -> Steps:
        """`name{…}`, perhaps with a call's id and a marker between the two."""
        name = yield from self.match(NAME)
        if not name:
            return False
        yield from self.blanks()
        if (yield from self.literal(CALL_ID)):
            yield from self.match(_ID)
        yield from self.literal(ARGS)
        yield from self.blanks()
        if (yield from self.peek()) != "{":
            return False
        self.unpin()
        self.sink.begin(name)
        if (yield from self.value(self.sink.arguments)):
            self.sink.end()
        else:
            yield from self.close_call()
        return True
