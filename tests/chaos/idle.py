"""What must hold when nobody asks anything any more: nothing is held, nothing was miscounted, nothing grew."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

from harness import wait_until
from prometheus_client.parser import text_string_to_metric_families

from ops.ctl import main as ctl_main
from tests.chaos.fleet import Fleet
from tests.chaos.mix import COMPLETIONS, MODEL, Ask

DEADLINE_S = 20.0
COUNTERS = ("_total", "_count", "_bucket", "_sum")
RESTED = (
    "triptych_api_requests_running",
    "triptych_scheduler_requests_running",
    "triptych_scheduler_requests_waiting",
    "triptych_scheduler_kv_cache_blocks{state=held}",
    "triptych_scheduler_steps_in_flight",
)
Samples = dict[str, float]
LAST_ASK = Ask("last", COMPLETIONS, {"model": MODEL, "prompt": "goodbye", "max_tokens": 2})


def samples(text: str) -> Samples:
    """Prometheus text as numbers; labels are part of the name, the model's is left out."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


class Counters:
    """Watches every process's counters: within one life they only grow."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last: dict[str, Samples] = {}

    def look(self) -> list[str]:
        """Read all processes once; what has gone down."""
        faults = []
        for path in sorted(self._fleet.runtime_dir.glob("*.metrics.sock")):
            seen = samples(self._fleet.metrics_of(path.name))
            began = next((value for name, value in seen.items() if name.endswith("process_start_time_seconds")), None)
            if began is None:
                continue
            before = self._last.get(key := f"{path.name} {began}", {})
            faults += [
                f"{path.name}: {name} went from {value:g} to {seen.get(name, 0):g}"
                for name, value in before.items()
                if name.partition("{")[0].endswith(COUNTERS) and seen.get(name, 0) < value
            ]
            self._last[key] = seen
        return faults


def status(fleet: Fleet) -> dict[str, Any]:
    """What `triptych ctl status --json` prints; empty when no scheduler answers."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = ctl_main(["status", "--json"], {"TRIPTYCH_RUNTIME_DIR": str(fleet.runtime_dir)})
    return json.loads(printed.getvalue()) if code == 0 else {}


def leaks(fleet: Fleet, before: dict[str, list[int]] | None, entries: set[str]) -> list[str]:
    """What is still held after everybody has gone and the server had time to notice. `before`: descriptors, once idle.

    `entries`: the names in the runtime directory before the storm.
    """
    found: list[str] = []
    fleet.server.request("POST", LAST_ASK.path, LAST_ASK.body)

    def none() -> bool:
        found[:] = [*_held(fleet), *(_descriptors(fleet, before) if before else ()), *_entries(fleet, entries)]
        return not found

    with contextlib.suppress(AssertionError):
        wait_until(none, DEADLINE_S, "an idle server")
    return found


def _held(fleet: Fleet) -> Iterator[str]:
    seen: Samples = {}
    for path in fleet.runtime_dir.glob("*.metrics.sock"):
        told = samples(fleet.metrics_of(path.name))
        if not told:
            yield f"{path.name} doesn't answer"
        seen |= {f"{path.name} {name}": value for name, value in told.items()}
    for name, value in seen.items():
        # Who has left is told to the runner with the next step, so the last one may still be there.
        if name.endswith("triptych_runner_resident_requests") and value > 1:
            yield f"{name} is {value:g}"
        if value and name.partition(" ")[2].startswith(RESTED):
            yield f"{name} is {value:g}"
    accepted = sum(value for name, value in seen.items() if "scheduler_requests_accepted_total" in name)
    finished = sum(value for name, value in seen.items() if "scheduler_requests_finished_total" in name)
    if accepted != finished:
        yield f"the scheduler accepted {accepted:g} requests and ended {finished:g}"
    stands = status(fleet)
    if not stands:
        yield "no scheduler answers"
        return
    if stands["running"] or stands["waiting"] or stands["parked"]:
        yield f"running {stands['running']}, waiting {stands['waiting']}, parked {stands['parked']}"
    if stands["free_blocks"] != stands["usable_blocks"]:
        yield f"{stands['usable_blocks'] - stands['free_blocks']} of {stands['usable_blocks']} blocks are held"


def _descriptors(fleet: Fleet, before: dict[str, list[int]]) -> Iterator[str]:
    for role, counts in fleet.descriptors().items():
        if len(counts) != len(before[role]):
            yield f"{len(counts)} {role} processes instead of {len(before[role])}"
        elif counts and max(counts) > max(before[role]):
            yield f"{role} holds {counts} descriptors, {before[role]} before"


def _entries(fleet: Fleet, entries: set[str]) -> Iterator[str]:
    now = {entry.name for entry in fleet.runtime_dir.iterdir()}
    if now != entries:
        yield f"in the runtime directory: new {sorted(now - entries)}, missing {sorted(entries - now)}"
