"""Requests that go from one scheduler to another in the same process, because the first one's runner stays away.

They go as an API would submit them again: the prompt and the tokens that the client has. Beside that goes only how
often a runner died with them in flight, so that one that kills runners is found wherever it goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.messages import Submit
from scheduler.interface import HandedOver
from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler


def hand_over(core: CoreScheduler, most_tokens: int) -> list[HandedOver]:
    """All requests with at most so many tokens leave, in the order of their arrival; nobody is told."""
    core.suspects.runner_died(core.flights)
    core.flights.clear()
    leaving = []
    for request in sorted(core.requests.values(), key=lambda request: request.arrival):
        if request.slot >= 0:
            core.table.flush(request.slot)
        if request.num_tokens <= most_tokens:
            leaving.append(HandedOver(request.peer, _submit_of(core, request), core.suspects.deaths_of(request)))
            core.vacate(request)
            core.stats.finished["moved"] = core.stats.finished.get("moved", 0) + 1
    core.suspects.settle()
    return leaving


def take_in(core: CoreScheduler, handed_over: HandedOver) -> None:
    """One of them comes here."""
    submit = handed_over.submit
    core.add(handed_over.peer, submit)
    request = core.requests.get(submit.id)
    if request is not None:
        request.timeline.add(core.now(), "moved", deaths=handed_over.deaths)
        if handed_over.deaths:
            core.suspects.blame(request, handed_over.deaths)


def _submit_of(core: CoreScheduler, request: Request) -> Submit:
    keys, now = dict(request.cache_keys), core.now()
    split = 4 * request.num_prompt
    return Submit(
        id=request.id,
        prompt=bytes(request.data[:split]),
        params=request.params,
        emitted=bytes(request.data[split:]),
        priority=request.priority,
        label=request.label,
        cache_salt=keys.get("salt", ""),
        tenant=request.tenant,
        resumed=True,
        timeout_ms=_left_ms(request.expires_ns, now),
        deadline_ms=_left_ms(request.deadline_ns, now),
        routing_key=request.routing_key,
        open=request.open,
        kv_source=request.kv_source,
        prompt_logprobs_from=request.told,
        adapter=keys.get("adapter", ""),
        adapter_generation=int(keys.get("adapter_generation", "0")),
    )


def _left_ms(until_ns: int, now_ns: int) -> int:
    """What is left of a time; 0 stands for none."""
    return max((until_ns - now_ns) // 1_000_000, 1) if until_ns else 0
