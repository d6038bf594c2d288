"""The grammar of a chat answer: calls that have to come, the form of what it says, and thoughts before them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from protocol.grammar import LARK, lark, tagged
from services.errors import invalid
from services.structured import Form
from services.tools.dialect import Dialect
from services.tools.grammar import AnswerGrammar, enforceable
from services.tools.request import ToolUse

Check = Callable[[Form], Awaitable[str]]


async def answer_grammar(
    check: Check, dialect: Dialect, use: ToolUse | None, form: Form | None, prompt_ids: Sequence[int]
) -> str:
    """The grammar as the request carries it, "" if the answer is free. ApiError 400 for one that can't be compiled.

    Calls that must come leave no place for another form. Calls that may come are an alternative to it.
    """
    if use is not None and use.forced:
        form = None
    checked = await check(form) if form is not None else ""
    calls = use if use is not None and (checked or enforceable(dialect.parser, use)) else None
    if calls is None and not (checked and dialect.reasoning):
        return checked
    param = form.param if form is not None else "tools"
    said = _as_rule(lark(checked), param) if checked else ""
    inside = bool(dialect.reasoning) and dialect.opened(prompt_ids)

    def write(mark: Callable[[str], str]) -> str:
        writer = AnswerGrammar(dialect.parser, mark, listed=dialect.listed)
        return writer.lark(calls, said, thinks=bool(dialect.reasoning), inside=inside)

    # The check knows no special tokens of the model: there, markers are text.
    plain = write(dialect.as_text)
    whole = await check(Form(LARK, plain, param))
    marked = write(dialect.as_token)
    return whole if marked == plain else tagged(LARK, marked)


def _as_rule(grammar: str, param: str) -> str:
    """A whole grammar as a part of another: without its header, and with `form` for the rule where it starts."""
    lines = [line for line in grammar.splitlines() if not line.startswith("%llguidance")]
    text, renamed = re.subn(r"(?m)^start(?=\s*[:\[])", "form", "\n".join(lines))
    if renamed != 1:
        raise invalid(f"{param}: a grammar needs one rule named start to go with tools or reasoning", param)
    return text
