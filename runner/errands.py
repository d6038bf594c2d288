"""What a scheduler asks of the runner beside steps: to compile a grammar, to fetch KV. They never hold up a step.

An executor says what it will answer and when, and the link's thread keeps the time; or it promises an answer, and gives
it from a thread of its own. Nothing is computed here.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from protocol.messages import CompileGrammar, FetchKv, GrammarStatus, KvStatus

Errand = CompileGrammar | FetchKv
ErrandStatus = GrammarStatus | KvStatus


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell the scheduler, `after_s` seconds after it asked."""

    status: ErrandStatus
    after_s: float = 0.0


Promise = Future[GrammarStatus]
"""An answer that comes once there is one. It must not raise."""


def refusal(errand: Errand, reason: str) -> Answer:
    """The answer of a runner that can't do this, at once."""
    if isinstance(errand, CompileGrammar):
        return Answer(GrammarStatus(errand.id, reason))
    return Answer(KvStatus(errand.id, errand.incarnation, 0, reason))


def unable(errand: Errand) -> Answer:
    """What a runner answers that has neither a grammar engine nor KV sources."""
    what = "compiles no grammars" if isinstance(errand, CompileGrammar) else "has no KV sources"
    return refusal(errand, f"this runner {what}")
