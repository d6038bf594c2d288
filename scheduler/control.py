"""What operators and APIs may ask of a running scheduler: pause, drain, change policy and limits, explain a request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.messages import Control, ControlReply, RequestStatus
from protocol.settings import SettingError, convert, specs
from scheduler.config import SchedulerConfig
from scheduler.policies.peak import Outlook
from scheduler.presets import chosen
from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler

log = logging.getLogger("triptych.scheduler")

LIVE_SETTINGS = frozenset(
    {
        *("preset", "queue_policy", "admission_policy", "batch_policy", "victim_policy", "recovery_policy"),
        *("max_num_seqs", "max_num_batched_tokens", "watermark", "long_prefill_token_threshold"),
        *("long_prefill_token_threshold_adaptive", "schedule_conservativeness", "clip_max_new_tokens", "queue_seed"),
        *("forecast_confidence", "forecast_memory"),
        *("queue_fallback_waiting", "tenant_weights", "max_queue_age_s", "max_bypasses", "max_preemptions"),
        *("priority_preemption_threshold", "waiting_timeout_s", "kv_fetch_timeout_s", "max_num_queued_reqs"),
        *("max_step_failures", "pipeline_depth"),
    }
)
"""Settings that can change while requests are live. The others decide how the process was built."""


class ControlError(ValueError):
    """An order that can't be carried out; says what is allowed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def answer(core: CoreScheduler, message: Control) -> ControlReply:
    """Carry out an order. Whatever is wrong with it is the answer; nothing else is disturbed."""
    try:
        action = ACTIONS.get(message.action)
        if action is None:
            raise ControlError("unknown_action", f"{message.action!r} is not one of {', '.join(sorted(ACTIONS))}")
        body = action(core, message.arguments)
    except ControlError as error:
        return ControlReply(message.nonce, False, msgspec.json.encode({"code": error.code, "message": str(error)}))
    return ControlReply(message.nonce, True, msgspec.json.encode(body))


def _pause(core: CoreScheduler, arguments: dict[str, str]) -> Any:
    what = arguments.get("what", "new")
    if what not in ("new", "all"):
        raise ControlError("invalid_argument", f"pause {what!r}: expected new or all")
    core.paused = what
    log.warning("paused: %s", what)
    return status(core, {})


def _resume(core: CoreScheduler, arguments: dict[str, str]) -> Any:
    core.paused, core.draining = "no", False
    log.warning("resumed")
    return status(core, {})


def _drain(core: CoreScheduler, arguments: dict[str, str]) -> Any:
    core.draining = True
    log.warning("draining: new requests get 503, %d go on", len(core.requests))
    return status(core, {})


def _reset_prefix_cache(core: CoreScheduler, arguments: dict[str, str]) -> Any:
    """Forget all cached content. With `running=true` running requests recompute, else their own blocks stay."""
    if arguments.get("running", "false") == "true":
        for request in reversed(core.table.requests()):
            core.preempt(request, may_swap=False)
            core.renew(request)  # what is in flight was computed on content that is to be forgotten
        for request in list(core.requests.values()):
            core.drop_kept(request)
    forgotten = core.sealing.forget_all()
    log.warning("prefix cache reset: %d hashes forgotten", forgotten)
    return {"forgotten": forgotten}


def _set(core: CoreScheduler, arguments: dict[str, str]) -> Any:
    """Change settings; all of them or, if one is wrong, none."""
    known = specs(SchedulerConfig)
    changed: dict[str, Any] = {}
    for name, text in arguments.items():
        if name not in LIVE_SETTINGS:
            allowed = ", ".join(sorted(LIVE_SETTINGS))
            raise ControlError("unknown_setting", f"{name} can't be changed while running; these can: {allowed}")
        try:
            changed[name] = convert(known[name], text, name)
        except SettingError as error:
            raise ControlError("invalid_argument", str(error)) from error
    config = replace(core.config, **changed)
    if config.max_num_seqs > core.table.capacity and "max_num_seqs" in changed:
        most = core.table.capacity
        raise ControlError("invalid_argument", f"max_num_seqs {config.max_num_seqs}: this process was built for {most}")
    try:
        core.adopt(config)
    except ValueError as error:
        raise ControlError("invalid_argument", str(error)) from error
    log.warning("settings changed: %s", ", ".join(f"{name}={value}" for name, value in changed.items()))
    return status(core, {})


def status(core: CoreScheduler, arguments: dict[str, str]) -> dict[str, Any]:
    """How things stand, and what is in force."""
    stats = core.refresh_stats()
    preset = chosen(core.config)
    return {
        "paused": core.paused,
        "draining": core.draining,
        "running": stats.running,
        "waiting": stats.waiting,
        "swapped": stats.swapped,
        "parked": stats.parked,
        "free_blocks": stats.free_blocks,
        "usable_blocks": stats.usable_blocks,
        "preemptions": stats.preemptions,
        "held_passes": {str(test): count for test, count in stats.held_passes.items()},
        "new_token_ratio": stats.new_token_ratio,
        "forecast": None if (outlook := core.strategies.admission.outlook) is None else asdict(outlook),
        "strategies": {field.name: getattr(preset, field.name) for field in fields(preset)},
        "settings": {name: getattr(core.config, name) for name in sorted(LIVE_SETTINGS)},
    }


def record(core: CoreScheduler, request: Request) -> dict[str, Any]:
    """Everything that is known of one request, as JSON."""
    return {
        "id": str(request.id),
        "label": request.label,
        "tenant": request.tenant,
        "status": request.status.name,
        "priority": request.priority,
        "prompt_tokens": request.num_prompt,
        "output_tokens": request.num_outputs,
        "cached_tokens": max(request.num_cached, 0),
        "queue_ms": round(((request.first_admitted_ns or core.now()) - request.arrival_ns) / 1e6, 3),
        "held_passes": dict(request.held),
        "held_ms": request.held_ms(core.now()),
        "forecast": None if request.outlook is None else asdict(request.outlook),
        "bypassed": request.num_bypassed,
        "preemptions": request.num_preemptions,
        "replayed_tokens": request.num_replayed,
        "events": request.timeline.as_json(request.arrival_ns),
        "events_cut": request.timeline.cut,
    }


def _find(core: CoreScheduler, arguments: dict[str, str]) -> dict[str, Any]:
    """The record of the request `id`, or `{"requests": [...]}` of all with the label `label`."""
    if "label" in arguments:
        label = arguments["label"]
        live = [_record(core, request) for request in core.requests.values() if request.label == label]
        ended = core.history.labelled(label)
        if not live and not ended:
            raise ControlError("not_found", f"no request {label!r} is live or among the last to end")
        return {"requests": ended + live}
    text = arguments.get("id", "")
    if not (text.isascii() and text.isdigit()):
        raise ControlError("invalid_argument", f"id {text!r}: expected a request's number")
    request = core.requests.get(int(text))
    found = _record(core, request) if request is not None else core.history.get(int(text))
    if found is None:
        raise ControlError("not_found", f"no request {text} is live or among the last to end")
    return found


def _record(core: CoreScheduler, request: Request) -> dict[str, Any]:
    """A live request's record; what its row knows better is written back first."""
    if request.slot >= 0:
        core.table.flush(request.slot)
    return record(core, request)


def timeline(core: CoreScheduler, arguments: dict[str, str]) -> dict[str, Any]:
    """What happened to a request, event by event."""
    return _find(core, arguments)


def explain(core: CoreScheduler, arguments: dict[str, str]) -> dict[str, Any]:
    """The same in sentences."""
    found = _find(core, arguments)
    if "requests" in found:
        return {"requests": [_explained(one) for one in found["requests"]]}
    return _explained(found)


def _explained(found: dict[str, Any]) -> dict[str, Any]:
    live = found["status"] in {s.name for s in RequestStatus if not s.is_finished}
    sentences = [
        f"Request {found['id']} ({found['label'] or 'no label'}) {'is' if live else 'ended'} {found['status']}: "
        f"{found['prompt_tokens']} prompt tokens, {found['output_tokens']} outputs, "
        f"{found['cached_tokens']} prompt tokens from the prefix cache."
    ]
    reasons = {
        "tokens": "the step's token budget was used up",
        "slots": "all running slots were taken",
        "blocks": "its KV blocks were not free",
        "watermark": "too few blocks would have been left for those that run",
    }
    for test, passes in found["held_passes"].items():
        sentences.append(
            f"It stood first in the queue for {passes} passes, {found['held_ms'][test]:.1f} ms, "
            f"while {reasons.get(test, test)}."
        )
        if test == "blocks" and found["forecast"]:
            sentences.append(f"By the last forecast that kept it out, {Outlook(**found['forecast'])}.")
    sentences.append(f"It waited {found['queue_ms']:.1f} ms to be admitted.")
    if found["bypassed"]:
        sentences.append(f"{found['bypassed']} requests that fitted were let past it meanwhile.")
    for index, event in enumerate(found["events"]):
        if event["event"] == "preempted":
            back = next((later for later in found["events"][index:] if later["event"] == "admitted"), None)
            sentences.append(_preemption(found["id"], event, back))
    if found["replayed_tokens"]:
        sentences.append(f"{found['replayed_tokens']} tokens had to be computed again.")
    return found | {"explanation": sentences}


def _preemption(request_id: str, event: dict[str, Any], back: dict[str, Any] | None) -> str:
    """One preemption and what came of it, as a sentence."""
    whom = f"request {event['by']} ({event['by_label'] or 'no label'})"
    if not event["by"]:
        whom = "an operator's order or a lost runner"
    elif event["by"] == request_id:
        whom = "its own next block, since none was free and no other was to give way"
    text = (
        f"At {event['ms']:.1f} ms it was preempted for {whom}, with {event['computed']} tokens computed "
        f"({event['recovery']})"
    )
    if back is None:
        return f"{text} and has not come back."
    return f"{text}; {back['ms'] - event['ms']:.1f} ms later it came back, {back['replayed']} tokens to compute again."


ACTIONS: dict[str, Callable[[CoreScheduler, dict[str, str]], Any]] = {
    "pause": _pause,
    "resume": _resume,
    "drain": _drain,
    "reset_prefix_cache": _reset_prefix_cache,
    "set": _set,
    "status": status,
    "timeline": timeline,
    "explain": explain,
}
