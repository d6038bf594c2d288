"""Applying what came back: tokens to rows by comparison, ends, failures. Never by counting what to ignore.

Results are applied in the order of their steps, whatever the order in which they arrive. A result's row is (request,
incarnation, position): it counts if the request still has that incarnation and expects that position next; else it is
stale and dropped.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protocol.columns import i32, u64
from protocol.messages import PromptLogprobs, RequestStatus, RowError, StepFailure, StepResult, TokenLogprobs
from scheduler.flight import Flight
from scheduler.request import Request
from scheduler.table import SlotArray

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler

log = logging.getLogger("triptych.scheduler")

S = RequestStatus
OUTPUT_COST = 2.0
"""What an output token counts in fair queueing, where a prompt token counts 1 (arXiv 2401.00588, section 3)."""


def apply(core: CoreScheduler, result: StepResult) -> None:
    """Apply a result. One of another epoch, or one that came before, changes nothing; one that comes before its turn
    waits for it, since a token can only follow the one before."""
    if result.epoch != core.epoch or all(flight.step_id != result.step_id for flight in core.flights):
        log.debug("ignored the result of step %d of epoch %d", result.step_id, result.epoch)
        return
    core.early[result.step_id] = result
    while core.flights and core.flights[0].step_id in core.early:
        flight = core.flights.popleft()
        _apply(core, flight, core.early.pop(flight.step_id))


def _apply(core: CoreScheduler, flight: Flight, result: StepResult) -> None:
    if result.failure is not None:
        _fail(core, flight, result.failure)
        return
    core.sealing.step_done(flight.step_id)
    if core.suspects.watching:
        core.suspects.step_done(flight)
    core.suspension.rates.saw_step(flight.num_tokens, len(flight.ids), (result.execute_ns - result.copy_ns) / 1e9)
    core.suspension.rates.saw_copy(flight.num_copied * core.limits.kv_bytes_per_block, result.copy_ns / 1e9)
    core.planner.returned(flight, result)
    for error in result.errors:
        _fail_row(core, error)
    for part in result.prompt_logprobs:
        _pass_on_prompt(core, part)
    _apply_tokens(core, flight, result)


# --- tokens ---------------------------------------------------------------------------------------------------


def _apply_tokens(core: CoreScheduler, flight: Flight, result: StepResult) -> None:
    ids, positions, tokens = u64(result.ids), i32(result.positions), i32(result.tokens)
    incarnations = i32(result.incarnations)
    slots = _slots_of(flight, ids)
    table = core.table
    valid = (
        (slots >= 0)
        & (table.id[slots] == ids)
        & (table.incarnation[slots] == incarnations)
        & (table.known[slots] == positions)
        & table.live[slots]
    )
    fresh: set[tuple[int, int]] | None = set() if result.logprobs else None
    if np.count_nonzero(valid) < len(valid):
        late = ~valid
        columns = (ids[late].tolist(), incarnations[late].tolist(), positions[late].tolist(), tokens[late].tolist())
        for request_id, incarnation, position, token in zip(*columns, strict=True):
            _apply_late(core, request_id, incarnation, position, token, fresh)
        slots, ids, positions, tokens = slots[valid], ids[valid], positions[valid], tokens[valid]
    if len(slots):
        table.tail[slots, positions % core.block_size] = tokens
        table.known[slots] = positions + 1
        outputs = positions - table.prompt[slots]
        core.outbox.add_tokens(table.peer[slots], ids, outputs, tokens)
        core.planner.note_first_tokens(slots, outputs)
        core.stats.generated_tokens += len(slots)
        core.sealing.seal_full(slots)
        if core.strategies.queue.wants_charges:
            core.strategies.queue.charge(output_charges(core, slots))
        if fresh is not None:
            fresh.update(zip(ids.tolist(), positions.tolist(), strict=True))
    if fresh is not None:
        _pass_on_logprobs(core, result.logprobs, fresh)
    if len(slots):
        end_rows(core, slots, tokens)


def output_charges(core: CoreScheduler, slots: SlotArray) -> dict[str, float]:
    """What each tenant is charged for one output token in each of these rows."""
    served = np.bincount(core.table.tenant[slots])
    return {core.tenants.name(n): OUTPUT_COST * served[n] for n in np.flatnonzero(served).tolist()}


def _slots_of(flight: Flight, ids: npt.NDArray[np.uint64]) -> SlotArray:
    """The slots that rows had when the step was sent; -1 for a row that the step didn't sample."""
    if len(ids) == len(flight.sampled_ids) and np.count_nonzero(ids == flight.sampled_ids) == len(ids):
        return flight.sampled_slots
    known = dict(zip(flight.sampled_ids.tolist(), flight.sampled_slots.tolist(), strict=True))
    return np.array([known.get(request_id, -1) for request_id in ids.tolist()], np.intp)


def _apply_late(
    core: CoreScheduler,
    request_id: int,
    incarnation: int,
    position: int,
    token: int,
    fresh: set[tuple[int, int]] | None,
) -> None:
    """A token for a request that left its row since: still its next one if it waits with the same incarnation."""
    request = core.requests.get(request_id)
    if (
        request is None
        or request.status != S.PREEMPTED
        or request.incarnation != incarnation
        or request.num_tokens != position
    ):
        core.stats.stale_tokens += 1
        return
    request.data += token.to_bytes(4, "little", signed=True)
    core.stats.generated_tokens += 1
    if core.strategies.queue.wants_charges:
        core.strategies.queue.charge({request.tenant: OUTPUT_COST})
    core.outbox.add_tokens(
        np.array([request.peer], np.int32),
        np.array([request_id], np.uint64),
        np.array([position - request.num_prompt], np.int32),
        np.array([token], np.int32),
    )
    if fresh is not None:
        fresh.add((request_id, position))
    end_if_complete(core, request)


def _pass_on_logprobs(core: CoreScheduler, entries: list[TokenLogprobs], fresh: set[tuple[int, int]]) -> None:
    for entry in entries:
        request = core.requests.get(entry.id)
        if request is not None and (entry.id, entry.position) in fresh:
            position = entry.position - request.num_prompt
            core.outbox.of(request.peer).logprobs.append(
                TokenLogprobs(entry.id, position, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs)
            )


def _pass_on_prompt(core: CoreScheduler, part: PromptLogprobs) -> None:
    """What goes on from what the API has been told of the prompt, or repeats some of it first. The rest is stale."""
    request = core.requests.get(part.id)
    if request is None or request.incarnation != part.incarnation:
        return
    if part.position <= request.told < part.end:
        request.told = part.end
        core.outbox.of(request.peer).prompt_logprobs.append(part)


# --- ends -----------------------------------------------------------------------------------------------------


def end_rows(core: CoreScheduler, slots: SlotArray, tokens: npt.NDArray[np.int32]) -> None:
    """Finish the rows whose newest token ends them. A stop on the last allowed token is a stop."""
    table = core.table
    full = table.known[slots] >= table.total[slots]
    stopped = table.heeds_eos[slots] & core.is_eos[tokens]
    watched = table.watched[slots]
    if not np.count_nonzero(full | stopped | watched):
        return
    status = np.where(full, S.LENGTH, S.RUNNING)
    status[stopped] = S.STOPPED
    for index in np.flatnonzero(watched).tolist():
        slot = int(slots[index])
        table.flush(slot)
        request = table.request[slot]
        assert request is not None
        end = _end_of(core, request, int(tokens[index]))
        if end is not None:
            status[index] = end
    for index in np.flatnonzero(status != S.RUNNING).tolist():
        request = table.request[int(slots[index])]
        assert request is not None
        if status[index] == S.STOPPED:
            request.stop_token = int(tokens[index])
        core.finish(request, S(int(status[index])))


def is_watched(core: CoreScheduler, request: Request) -> bool:
    """Whether something other than the model's end tokens and its length can end the request."""
    params = request.params
    usual_end = not params.eos_token_ids or set(params.eos_token_ids) == set(core.limits.eos_token_ids)
    repetition = params.repetition_max_pattern > 0
    return bool(params.stop_token_ids) or params.min_tokens > 0 or not usual_end or repetition


def _end_of(core: CoreScheduler, request: Request, token: int) -> RequestStatus | None:
    """How `token`, the newest of the request's outputs, ends it; None if it doesn't. A request whose own conditions
    can't be told ends alone."""
    try:
        return _own_end(core, request, token)
    except Exception:
        log.exception("request %d: its stop conditions can't be told", request.id)
        request.end_code, request.end_message = "internal_error", "its stop conditions can't be told"
        return S.ERROR


def _own_end(core: CoreScheduler, request: Request, token: int) -> RequestStatus | None:
    params = request.params
    if request.num_outputs < params.min_tokens:
        return None
    ends = params.eos_token_ids or core.limits.eos_token_ids
    if token in params.stop_token_ids or (not params.ignore_eos and token in ends):
        return S.STOPPED
    if params.repetition_max_pattern and repeats(
        np.frombuffer(request.data, np.int32)[request.num_prompt :],
        params.repetition_min_pattern,
        params.repetition_max_pattern,
        params.repetition_min_count,
    ):
        return S.REPETITION
    return None


def repeats(outputs: npt.NDArray[np.int32], min_pattern: int, max_pattern: int, min_count: int) -> bool:
    """Whether `outputs` [n] end in `min_count` copies of one pattern of `min_pattern` to `max_pattern` tokens."""
    for length in range(max(min_pattern, 1), max_pattern + 1):
        if length * min_count > len(outputs):
            return False
        end = outputs[len(outputs) - length * min_count :].reshape(min_count, length)
        if bool((end == end[0]).all()):
            return True
    return False


def end_if_complete(core: CoreScheduler, request: Request) -> None:
    """Finish a waiting request whose known outputs already end it."""
    token = int.from_bytes(request.data[-4:], "little", signed=True)
    end = _end_of(core, request, token)
    if end is None and request.num_tokens >= request.max_total:
        end = S.LENGTH
    if end is not None:
        if end == S.STOPPED:
            request.stop_token = token
        core.finish(request, end)


# --- failures -------------------------------------------------------------------------------------------------


def _fail_row(core: CoreScheduler, error: RowError) -> None:
    request = core.requests.get(error.id)
    if request is not None and request.incarnation == error.incarnation:
        request.end_code, request.end_message = error.code, error.message
        core.sealing.forget(request.blocks)  # whatever made this row fail may be in its KV
        core.finish(request, S.ERROR)


def _fail(core: CoreScheduler, flight: Flight, failure: StepFailure) -> None:
    """A step failed: nothing it would have written can be trusted, nor what later steps built on it.

    Its requests are computed again under a new incarnation, so that what the steps behind it report about them
    is stale. They are suspects: the one whose fault it was is found and ends.
    """
    core.stats.failed_steps += 1
    log.error("step %d failed (%s): %s", flight.step_id, failure.code, failure.message)
    core.sealing.step_failed(flight.step_id)
    for request_id, incarnation in flight.swapped:  # their copies were not made
        request = core.requests.get(request_id)
        if request is not None and request.incarnation == incarnation:
            core.suspension.forget(request)
    live = [request for request, _ in flight.live(core.requests)]
    for request in live:
        request.timeline.add(core.now(), "step_failed", code=failure.code, requests=len(flight.ids))
    core.suspects.step_failed(flight, failure, live)
    for request in live:
        if request.status.is_finished:
            continue
        if request.status == S.RUNNING:
            core.preempt(request, may_swap=False)
        core.drop_kept(request)
        core.renew(request)
        core.waiting.isolate(request)
