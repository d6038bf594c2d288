"""Tool calls as Llama 3.x writes them: `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Generator

from services.tools.parser import Parser

TAG = "<|python_tag|>"


class LlamaJson(Parser):
    """A call is an object that begins the answer or follows the tag or another call, `;` between them or not.

    JSON anywhere else is content: an answer may show what a call looks like.
    """

    markers = (TAG,)

    def parse(self) -> Generator[None, None, None]:
        """Calls at the beginning, then content up to a tag and calls behind it."""
        tag = ""
        while True:
            yield from self._calls(tag)
            tag = yield from self.content_until(TAG)
            if not tag:
                return
            self._at -= len(tag)

    def _calls(self, tag: str) -> Generator[None, None, None]:
        """As many calls as there are. A tag without a call is content."""
        self.pin()
        yield from self.blanks()
        tagged = yield from self.literal(TAG)
        while True:
            yield from self.blanks()
            if not (yield from self.call_object(marked=tagged)):
                break
            tag = ""
            yield from self.close_call()
            self.pin()
            yield from self.blanks()
            if not (yield from self.literal(";")):
                yield from self.literal(",")
            yield from self.blanks()
            tagged = yield from self.literal(TAG)
        if tag:
            self.no_call(tag)
        else:
            self.back()
