"""A scheduler's answers to `triptych ctl` as text for a person at a terminal. Only formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Body = Mapping[str, Any]
INDENT = 24


def render(action: str, body: Body) -> str:
    """The text for an action's answer."""
    if action == "explain":
        return _each(body, lambda record: "\n".join(record["explanation"]))
    if action == "timeline":
        return _each(body, _timeline)
    if action == "reset-prefix-cache":
        return f"The prefix cache has forgotten {body['forgotten']} blocks."
    return "\n".join([*_HEADLINES.get(action, ()), *_status(body, settings=action in ("status", "set"))])


_HEADLINES = {
    "pause": ("Paused.",),
    "resume": ("Resumed.",),
    "drain": ("Draining: new requests get 503, all others go on to their end.",),
    "set": ("Changed.",),
}
_PAUSED = {"no": "no", "new": "new requests wait, those that run go on", "all": "nothing is computed"}


def _each(body: Body, text: Any) -> str:
    return "\n\n".join(text(record) for record in body.get("requests", [body]))


def _status(body: Body, *, settings: bool) -> list[str]:
    held = body["usable_blocks"] - body["free_blocks"]
    parked = ", ".join(f"{count} {state}" for state, count in body["parked"].items()) or "0"
    ratio = body["new_token_ratio"]
    rows = [
        ("running", body["running"]),
        ("waiting", f"{body['waiting']} (of these swapped out: {body['swapped']})"),
        ("parked", parked),
        ("paused", _PAUSED.get(body["paused"], body["paused"])),
        ("draining", "yes" if body["draining"] else "no"),
        ("KV blocks", f"{held} of {body['usable_blocks']} held"),
        ("preemptions", body["preemptions"]),
        ("passes held back by", ", ".join(f"{test} {count}" for test, count in body["held_passes"].items()) or "-"),
        ("new-token ratio", "-" if ratio is None else f"{ratio:.3f}"),
        ("forecast", _forecast(body.get("forecast"))),
    ]
    for one in body.get("replicas", ()):
        rows += [(f"replica {one['replica']}", _replica(one))]
    if settings:
        rows += [("strategies", "")]
        rows += [(f"  {name}", _value(value)) for name, value in body["strategies"].items()]
        rows += [("settings", "")]
        rows += [(f"  {name}", _value(value)) for name, value in body["settings"].items()]
    width = max(INDENT, *(len(name) + 2 for name, _ in rows))
    return [f"{name:{width}}{value}".rstrip() for name, value in rows]


def _replica(one: Body) -> str:
    """How one of several stands."""
    held = one["usable_blocks"] - one["free_blocks"]
    more = [_PAUSED.get(one["paused"], one["paused"])] if one["paused"] != "no" else []
    more += ["draining"] if one["draining"] else []
    state = one["runner"] if one["runner"] == "ready" else f"runner {one['runner']}"
    levels = f"{one['running']} running, {one['waiting']} waiting, {held} of {one['usable_blocks']} blocks held"
    return ", ".join([state, levels, *more])


def _forecast(seen: Body | None) -> str:
    """What the newcomer tested last would have brought the batch to."""
    if seen is None:
        return "-"
    return (
        f"{seen['peak']:.0f} of {seen['capacity']} blocks at the fullest, in about {seen['steps']} steps "
        f"({seen['confidence']:.1%} confidence, from {seen['observed']} ended requests)"
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text or "-"


def _timeline(record: Body) -> str:
    lines = [
        f"request {record['id']} ({record['label'] or 'no label'}): {record['status']}, "
        f"{record['prompt_tokens']} prompt tokens, {record['output_tokens']} outputs",
        f"{'ms':>12}  event",
    ]
    for event in record["events"]:
        details = {name: value for name, value in event.items() if name not in ("ms", "event")}
        text = "  ".join(f"{name}={_detail(value)}" for name, value in details.items() if value not in ("", {}))
        lines.append(f"{event['ms']:12.3f}  {event['event']:14} {text}".rstrip())
    if record["events_cut"]:
        lines.append(f"({record['events_cut']} events in the middle were not kept)")
    return "\n".join(lines)


def _detail(value: Any) -> str:
    return ",".join(f"{name}:{count}" for name, count in value.items()) if isinstance(value, dict) else str(value)
