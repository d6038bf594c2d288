"""How a request comes in: refused at the door, told to come back later, or set up to wait.

Whether it can ever run is `protocol.validation`; when it may enter is the passes' business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.messages import Rejected, RequestStatus, Submit
from protocol.validation import check_submit
from scheduler import results
from scheduler.hashing import cache_keys
from scheduler.interface import Door
from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler

S = RequestStatus


def add(core: CoreScheduler, peer: int, submit: Submit) -> None:
    """Accept a request or answer it with a rejection. If anything is raised, nothing of it stays."""
    rejection = check_submit(submit, core.limits, submit.id in core.requests) or _refuse_for_good(core, submit)
    if rejection is None and not submit.resumed:
        rejection = _refuse_for_now(core, submit)
    if rejection is not None:
        core.stats.rejected[rejection.code] = core.stats.rejected.get(rejection.code, 0) + 1
        core.outbox.of(peer).rejected.append(rejection)
        return
    request = _new_request(core, peer, submit)
    core.requests[request.id] = request
    core.tenants.enter(request.tenant)
    try:
        if submit.params.grammar:
            core.external.wait_for_grammar(request)
        else:
            core.waiting.push(request, core.now())
    except Exception:
        core.waiting.discard(request)
        core.tenants.leave(request.tenant)
        del core.requests[request.id]
        raise
    core.stats.started += 1
    core.outbox.of(peer).accepted.append(request.id)
    if submit.emitted:
        results.end_if_complete(core, request)
    elif request.expires_ns:
        core.waiting.expire_at(request)


def _refuse_for_good(core: CoreScheduler, submit: Submit) -> Rejected | None:
    """The 400 for a request that admission could never let in."""
    total = min((len(submit.prompt) >> 2) + submit.params.max_tokens, core.limits.max_model_len)
    text = core.strategies.admission.refusal(total, core.pool.num_usable)
    return Rejected(submit.id, "kv_capacity_exceeded", text, 400, 0, "max_tokens") if text else None


def _refuse_for_now(core: CoreScheduler, submit: Submit) -> Rejected | None:
    """The 503 for a request that comes at a bad time, unless it is urgent enough to displace another waiter."""
    if core.draining:
        return Rejected(submit.id, "draining", "this scheduler is draining", 503, 5)
    limit = core.config.max_num_queued_reqs
    if not limit or len(core.waiting) + len(core.waiting.parked) < limit:
        return None
    fresh = _fresh(core)
    if len(fresh) < limit:
        return None
    if _displaces(core):
        least = max(fresh, key=lambda request: (request.priority, request.arrival), default=None)
        if least is not None and submit.priority < least.priority:
            least.end_code = "displaced"
            least.end_message = f"the queue is full ({limit} requests) and a more urgent request has come"
            core.finish(least, S.ERROR)
            return None
    text = f"{len(fresh)} requests are waiting, the limit is {limit}; retry later"
    return Rejected(submit.id, "queue_full", text, 503, 1)


def door(core: CoreScheduler) -> Door:
    """What `_refuse_for_now` goes by."""
    fresh = _fresh(core)
    least = max((request.priority for request in fresh), default=0)
    return Door(core.config.max_num_queued_reqs, len(fresh), _displaces(core), least)


def _fresh(core: CoreScheduler) -> list[Request]:
    return [request for request in core.waiting if not request.first_admitted_ns]


def _displaces(core: CoreScheduler) -> bool:
    return core.strategies.queue.name == "priority"


def _new_request(core: CoreScheduler, peer: int, submit: Submit) -> Request:
    core.num_arrived += 1
    now, num_prompt = core.now(), len(submit.prompt) >> 2
    timeout_ns = submit.timeout_ms * 1_000_000 or int(core.config.waiting_timeout_s * 1e9)
    request = Request(
        id=submit.id,
        peer=peer,
        params=submit.params,
        data=bytearray(submit.prompt + submit.emitted),
        num_prompt=num_prompt,
        max_total=0,
        priority=submit.priority,
        arrival=core.num_arrived,
        label=submit.label,
        cache_keys=cache_keys(submit.cache_salt, submit.adapter, submit.adapter_generation),
        tenant=submit.tenant,
        routing_key=submit.routing_key,
        # KV from elsewhere would be of tokens that were not computed here, of which nothing could be told.
        kv_source=submit.kv_source if submit.params.prompt_logprobs < 0 else "",
        told=min(max(submit.prompt_logprobs_from, 1), num_prompt),
        open=submit.open,
        arrival_ns=now,
        arrival_processed=core.processed_tokens(),
        deadline_ns=now + submit.deadline_ms * 1_000_000 if submit.deadline_ms else 0,
        expires_ns=now + timeout_ns if timeout_ns else 0,
        num_cached=0 if submit.emitted else -1,
    )
    limit_length(core, request)
    request.timeline.add(now, "arrived", prompt_tokens=num_prompt, emitted=len(submit.emitted) >> 2)
    return request


def cached_tokens(core: CoreScheduler, submit: Submit) -> int:
    """How many of a request's leading tokens the prefix cache holds."""
    if not core.config.enable_prefix_caching:
        return 0
    keys = cache_keys(submit.cache_salt, submit.adapter, submit.adapter_generation)
    return core.sealing.count_cached(submit.prompt + submit.emitted, keys)


def fit_again(core: CoreScheduler) -> None:
    """The runner is another one: requests that its context or its pool can't hold end here."""
    for request in list(core.requests.values()):
        limit_length(core, request)
        if request.num_outputs:
            results.end_if_complete(core, request)
            continue
        if request.num_tokens < request.max_total:
            continue
        request.end_code = "kv_capacity_exceeded"
        request.end_message = f"the prompt has {request.num_tokens} tokens; this runner holds {request.max_total - 1}"
        core.finish(request, S.IGNORED)


def limit_length(core: CoreScheduler, request: Request) -> None:
    """Where the request ends at the latest: its own limit, the context, or the whole pool and one token more."""
    capacity = core.pool.num_usable * core.block_size
    most = request.num_prompt + request.params.max_tokens
    request.max_total = min(most, core.limits.max_model_len, capacity + 1)
