"""The weather: a seeded schedule of kills, stops, takeovers, disconnects and garbage.

Tokens are its clock: the next disturbance comes when the clients have received a certain number since the last, so
that all of them hit a server under load, whatever the machine's speed. Some follow the one before at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from tests.chaos.clients import Clients, Progress
from tests.chaos.fleet import Fleet
from tests.chaos.garbage import throw

T = TypeVar("T")

KILLS = {"kill scheduler": "scheduler", "kill runner": "runner", "kill api": "api"}
STOPS = {"stop scheduler": "scheduler", "stop runner": "runner", "stop api": "api"}
HANGS = {"hang scheduler": "scheduler", "hang runner": "runner"}
FREEZES = {"freeze scheduler": "scheduler", "freeze runner": "runner", "freeze api": "api"}
OTHERS = ("takeover", "disconnect", "garbage")
KINDS = (*KILLS, *STOPS, *HANGS, *FREEZES, *OTHERS)
FAMILIES = (STOPS, HANGS, FREEZES)
"""What takes its time, and may hit all roles at once."""
WITHOUT_PAUSE = ("disconnect", "garbage")

API_PROCESSES = 2
SILENCE_S = 20.0
START_S = 30.0
BRIEF_STOP_S = 0.3
POLL_S = 0.02


class Stuck(Exception):
    """The server did not come back: says after what."""


@dataclass(frozen=True, slots=True)
class Event:
    """One disturbance. `alone`: enough tokens came before and after it for its pause to be its own."""

    kind: str
    at: float
    alone: bool


@dataclass(slots=True)
class Plan:
    """How often each kind is to happen, how many tokens lie between two, and how many follow at once (a share).

    `together`: stops hit all roles in the same instant, and so do hangs, and what hangs for good.
    """

    counts: Mapping[str, int]
    spacing: tuple[int, int]
    share_at_once: float
    together: bool = False

    def order(self, rng: random.Random) -> list[tuple[str, ...]]:
        """All disturbances in random order; those of one tuple happen at the same time."""
        left = dict(self.counts)
        found: list[tuple[str, ...]] = []
        for family in FAMILIES if self.together else ():
            kinds = tuple(kind for kind in family if left.get(kind))
            for _ in range(min((left[kind] for kind in kinds), default=0)):
                found.append(kinds)
                left.update({kind: left[kind] - 1 for kind in kinds})
        found += [(kind,) for kind, count in left.items() for _ in range(count)]
        rng.shuffle(found)
        return found


@dataclass(slots=True)
class Storm:
    """Carries out a plan. `events` is what has happened."""

    fleet: Fleet
    clients: Clients
    progress: Progress
    rng: random.Random
    say: Callable[[str], None]
    silence_s: float = SILENCE_S
    events: list[Event] = field(default_factory=list)
    garbage: Counter[str] = field(default_factory=Counter)

    async def run(self, plan: Plan, after_each: Callable[[int], None]) -> None:
        """All disturbances of the plan, then calm. Raises Stuck when the streams don't go on."""
        order = plan.order(self.rng)
        # What is frozen has to have run: who hangs before the first sign of life is not known to be there.
        follows = [kinds[0] not in FREEZES and self.rng.random() < plan.share_at_once for kinds in order] + [False]
        follows[0] = False
        for number, kinds in enumerate(order):
            if not follows[number]:
                await self._calm(plan)
            alone = len(kinds) == 1 and not (follows[number] or follows[number + 1])
            self.events += [Event(kind, time.monotonic(), alone) for kind in kinds]
            self.say(f"{number + 1} of {len(order)}: {', '.join(kinds)}, {self.progress.tokens} tokens so far")
            if kinds[0] in HANGS:
                await self._until(lambda: self._health() == 200, "health before the hang")
            ends = await asyncio.gather(*(self._disturb(kind, plan) for kind in kinds), return_exceptions=True)
            for end in ends:
                if end is not None:
                    raise end
            after_each(number)
        await self._calm(plan)

    async def _calm(self, plan: Plan) -> None:
        goal = self.progress.tokens + self.rng.randint(*plan.spacing)
        if not await self.progress.reach(goal, self.silence_s):
            last = ", ".join(event.kind for event in self.events[-3:])
            raise Stuck(f"no token for {self.silence_s:g} s after: {last} (disturbance {len(self.events)})")

    async def _disturb(self, kind: str, plan: Plan) -> None:
        """Again with another victim when one had ended before it was hit."""
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                return await self._hit(kind, plan)

    async def _hit(self, kind: str, plan: Plan) -> None:
        if kind in KILLS:
            await self._kill(KILLS[kind])
        elif kind in STOPS:
            with self._stopped(await self._one(STOPS[kind])):
                # Until no client gets anything any more, or those of another API process have got enough.
                await self.progress.reach(self.progress.tokens + self.rng.randint(*plan.spacing), BRIEF_STOP_S)
        elif kind in HANGS:
            with self._stopped(await self._one(HANGS[kind])) as victim:
                await self._until(lambda: not _alive(victim) or self._health() == 503, "the hang to be noticed")
        elif kind in FREEZES:
            with self._stopped(await self._one(FREEZES[kind], oldest=True)) as victim:
                if FREEZES[kind] == "api":
                    self.clients.excuse(self.fleet.http_ports(victim))
                if self.fleet.is_own(victim):  # nobody watches over it but we: it is replaced by force
                    self.fleet.take_over()
                    await self.progress.reach(self.progress.tokens + 1, self.silence_s)
                else:
                    await self._until(lambda: not _alive(victim), "the end of what hangs")
            most = API_PROCESSES if FREEZES[kind] == "api" else 1
            await self._until(lambda: len(self.fleet.members(FREEZES[kind])) <= most, "the end of who was replaced")
        elif kind == "takeover":
            await self._one("scheduler")
            self.fleet.take_over()
            # If the present one was just starting it may be the later one, and win.
            await self._until(lambda: len(self.fleet.members("scheduler")) == 1, "the end of one of two schedulers")
        elif kind == "disconnect":
            calls = sorted(self.clients.live, key=lambda call: call.port)
            most = min(len(calls), 1 + len(calls) // 4)
            for call in self.rng.sample(calls, self.rng.randint(1, most) if most else 0):
                call.leave.set()
        else:
            rng = random.Random(self.rng.getrandbits(64))
            thrown = await asyncio.to_thread(throw, self.fleet.runtime_dir, self.fleet.server.port, rng)
            self.garbage[thrown] += 1

    async def _kill(self, role: str) -> None:
        victim = await self._one(role)
        if role == "api":
            self.clients.excuse(self.fleet.http_ports(victim))
        self.fleet.kill(victim)
        await self._until(lambda: not _alive(victim), "the end of what was killed")

    async def _one(self, role: str, *, oldest: bool = False) -> psutil.Process:
        """A live process of the role; one that has just been killed is waited for."""
        members = await self._until(lambda: self.fleet.members(role), f"a {role}")
        return members[0] if oldest else self.rng.choice(members)

    def _health(self) -> int:
        try:
            return self.fleet.server.request("GET", "/health").status
        except (OSError, http.client.HTTPException):
            return 0  # its API process has just been killed

    @contextlib.contextmanager
    def _stopped(self, victim: psutil.Process) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGSTOP)
        try:
            yield victim
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)

    async def _until(self, predicate: Callable[[], T], what: str) -> T:
        end = time.monotonic() + START_S
        while not (value := await asyncio.to_thread(predicate)):
            if time.monotonic() > end:
                raise Stuck(f"waited {START_S:g} s for {what} (disturbance {len(self.events)})")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), POLL_S)
        return value


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
