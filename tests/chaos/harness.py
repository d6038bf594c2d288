"""One storm from the first start to the last look for leaks, and the report of it. The command is `__main__.py`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from harness import running_server

from tests.chaos.clients import Clients, Progress, Tally
from tests.chaos.fleet import ROLES, Fleet
from tests.chaos.idle import Counters, leaks, status
from tests.chaos.mix import Lengths, mix
from tests.chaos.storm import API_PROCESSES, KINDS, WITHOUT_PAUSE, Event, Plan, Storm, Stuck

COMMON = (
    "--api-processes", str(API_PROCESSES), "--restart-window-s", "0", "--restart-backoff-s", "0.02",
    "--runner-silence-s", "1", "--heartbeat-timeout-s", "1", "--lease-s", "2", "--hang-timeout-s", "3",
)  # fmt: skip
LOOK_EVERY = 5
USUAL_GAP_S = 0.5
"""A silence that began longer before a disturbance than this is an earlier one's."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """A backend with its load: how `triptych serve` is started, who asks what, and how often it is disturbed."""

    flags: tuple[str, ...]
    lengths: Lengths
    spacing: tuple[int, int]
    clients: int
    asks: int


BACKENDS: Mapping[str, Setting] = {
    # 255 blocks are too few for 16 clients: requests are preempted all the time.
    "sim": Setting(
        ("--backend", "sim", "--sim-step-ms", "2", "--sim-num-blocks", "256", "--sim-eos-rate", "0.003"),
        Lengths(prompt=(5, 200), output=(20, 300)), spacing=(100, 500), clients=16, asks=42,
    ),
    "model": Setting(
        ("--dtype", "float32", "--num-threads", "1", "--num-blocks-override", "65", "--max-model-len", "640"),
        Lengths(prompt=(5, 60), output=(16, 48)), spacing=(20, 80), clients=6, asks=14,
    ),
}  # fmt: skip


@dataclass(slots=True)
class Report:
    """What a storm did and what it found. `faults` are in words; a clean one has none and no leaks."""

    backend: str
    seed: int
    events: list[Event] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    garbage: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    leaked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    log: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing at all was wrong."""
        return not (self.faults or self.leaked or self.tally.faults)

    def pauses(self, kind: str) -> list[float]:
        """The longest silence (s) of any stream after each disturbance of a kind that had nothing else beside it."""
        found = []
        for event, after in zip(self.events, [*self.events[1:], None], strict=True):
            if event.kind == kind and event.alone and kind not in WITHOUT_PAUSE:
                end = after.at if after else float("inf")
                own = (gap for at, gap in self.gaps if event.at < at <= end and at - gap > event.at - USUAL_GAP_S)
                found.append(max(own, default=0.0))
        return found

    def json(self) -> dict[str, Any]:
        """The numbers, for a file."""
        tally = self.tally
        kinds: dict[str, dict[str, Any]] = {}
        for kind, count in Counter(event.kind for event in self.events).items():
            kinds[kind] = {"count": count}
            if pauses := self.pauses(kind):
                kinds[kind] |= {"pause_median_s": statistics.median(pauses), "pause_max_s": max(pauses)}
        return {
            "backend": self.backend, "seed": self.seed, "seconds": self.seconds, "clean": self.clean, "kinds": kinds,
            "answers": tally.answers, "streams": tally.streams, "tokens": tally.tokens, "left": tally.left,
            "cut": tally.cut, "lost": tally.lost, "repeated": tally.repeated, "differing": tally.differing,
            "malformed": tally.malformed, "failed": tally.failed, "leaked": self.leaked,
            "faults": [*self.faults, *tally.faults], "garbage": dict(self.garbage),
        }  # fmt: skip

    def text(self) -> str:
        """The same as a table for a person."""
        data = self.json()
        lines = [f"{self.backend}, seed {self.seed}: {len(self.events)} disturbances in {self.seconds:.0f} s", ""]
        lines.append(f"{'':16}{'count':>7}{'per minute':>12}{'median pause':>14}{'longest':>10}")
        for kind in sorted(data["kinds"], key=KINDS.index):
            row = data["kinds"][kind]
            median, longest = (f"{row[name]:.2f} s" if name in row else "-" for name in _PAUSES)
            rate = 60 * row["count"] / max(self.seconds, 1e-9)
            lines.append(f"{kind:16}{row['count']:>7}{rate:>12.1f}{median:>14}{longest:>10}")
        names = ("answers", "streams", "tokens", "left", "cut")
        lines += ["", ", ".join(f"{name} {data[name]}" for name in names)]
        names = ("lost", "repeated", "differing", "malformed", "failed")
        lines.append(", ".join([*(f"{name} {data[name]}" for name in names), f"leaked {len(self.leaked)}"]))
        lines += [f"  LEAK {leak}" for leak in self.leaked] + [f"  FAULT {fault}" for fault in data["faults"]]
        return "\n".join(lines)


_PAUSES = ("pause_median_s", "pause_max_s")


def run(
    backend: str,
    seed: int,
    counts: Mapping[str, int],
    *,
    at_once: float = 0.15,
    together: bool = False,
    extra: tuple[str, ...] = (),
    say: Say = lambda line: None,
) -> Report:
    """Start a server, learn the twins, disturb it `counts` times, and look at what is left. Blocks until all is over.

    `at_once`: the share of disturbances that follow the one before at once. `together`: see `Plan`. `extra` are
    further flags of `triptych serve`; `say` hears of each disturbance.
    """
    report = Report(backend, seed)
    setting = BACKENDS[backend]
    with running_server(*COMMON, *setting.flags, *extra, env={"PYTHONFAULTHANDLER": "1"}) as server:
        fleet = Fleet(server)
        try:
            uvloop.run(_storm(fleet, setting, Plan(counts, setting.spacing, at_once, together), report, say))
        finally:
            report.log = server.log() + fleet.log_of_own()
        shared = fleet.shared_memory()
        if (code := fleet.stop()) != 0:
            report.faults.append(f"triptych serve ended with status {code}")
        server.assert_no_orphans()
        report.leaked += [f"{path} outlives its processes" for path in shared if Path(path).exists()]
        if fleet.runtime_dir.exists():
            report.leaked.append(f"{fleet.runtime_dir} is left")
        report.log = server.log() + fleet.log_of_own()
    return report


async def _storm(fleet: Fleet, setting: Setting, plan: Plan, report: Report, say: Say) -> None:
    progress = Progress()
    clients = Clients(fleet.server.port, mix(report.seed, setting.asks, setting.lengths), progress, report.seed)
    await clients.learn_twins(setting.clients)
    calm = await asyncio.to_thread(leaks, fleet, None, {entry.name for entry in fleet.runtime_dir.iterdir()})
    assert not calm, f"before the storm: {calm}"
    descriptors, entries = fleet.descriptors(), {entry.name for entry in fleet.runtime_dir.iterdir()}

    counters = Counters(fleet)
    storm = Storm(fleet, clients, progress, random.Random(f"storm {report.seed}"), say)
    looks: set[asyncio.Future[list[str]]] = set()

    def after_each(number: int) -> None:
        if number % LOOK_EVERY == 0 and all(look.done() for look in looks):
            looks.add(asyncio.ensure_future(asyncio.to_thread(counters.look)))

    began = time.monotonic()
    running = asyncio.ensure_future(clients.run(setting.clients))
    try:
        await storm.run(plan, after_each)
    except Stuck as stuck:
        report.faults += [str(stuck), *await asyncio.to_thread(_scene, fleet)]
        clients.leave()
    report.seconds = time.monotonic() - began
    clients.stop()
    await running
    for look in looks:
        report.faults += await look
    report.events, report.gaps, report.garbage, report.tally = storm.events, progress.gaps, storm.garbage, clients.tally
    try:
        report.leaked += await asyncio.to_thread(leaks, fleet, descriptors, entries)
    except OSError as error:  # the report and the log say what it died of
        report.faults.append(f"the server is gone: {error}")


def _scene(fleet: Fleet) -> Iterator[str]:
    """How things stand where the streams don't go on."""
    for role in ROLES:
        yield f"{role}: {[(process.pid, process.status()) for process in fleet.members(role)]}"
    yield f"status: {status(fleet)}"
    with contextlib.suppress(OSError):
        yield f"health: {fleet.server.request('GET', '/health').body.decode()}"
