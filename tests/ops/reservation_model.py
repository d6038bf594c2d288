"""The reservation contract once more, slow and obvious: lists, integers, no pages, no engine. It writes the event log.

It shares no code with what it checks. Times are nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A request of the workload; `cancel_ns` 0 is never."""

    at_ns: int
    prompt: int
    outputs: int
    cancel_ns: int = 0


@dataclass(frozen=True)
class World:
    """What there is: pages of `size` tokens, slots, tokens a dispatch, the chunk cap (0: none), the release delay."""

    pages: int
    size: int
    slots: int
    budget: int
    cap: int = 0
    delay_ns: int = 0
    tick_ns: int = 1_000_000_000


@dataclass
class Live:
    """A request that has been admitted."""

    number: int
    asked: Asked
    credit: int
    computed: int = 0
    emitted: int = 0
    pages: int = 0


@dataclass
class Model:
    """One run. `line` is who takes turns, first to last."""

    world: World
    asked: list[Asked]
    log: list[Event] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    line: list[Live] = field(default_factory=list)
    admission_order: list[Live] = field(default_factory=list)
    draining: list[tuple[int, int]] = field(default_factory=list)
    returned: int = 0
    ended: set[int] = field(default_factory=set)
    to_arrive: list[int] = field(default_factory=list)
    to_cancel: list[tuple[int, int]] = field(default_factory=list)
    flight: tuple[int, list[tuple[Live, int]]] | None = None
    steps: int = 0
    last_snapshot: Event = field(default_factory=dict)

    def write(self, at_ns: int, event: str, **fields: Any) -> None:
        self.log.append({"at_ns": at_ns, "event": event} | fields)

    def credit(self, asked: Asked) -> int:
        kept = asked.prompt + asked.outputs - 1
        return kept // self.world.size + (1 if kept % self.world.size else 0)

    def run(self) -> list[Event]:
        self.to_arrive = sorted(range(len(self.asked)), key=lambda i: self.asked[i].at_ns)
        now = 0
        while True:
            if self.flight is not None and self.flight[0] == now:
                self.hear(now - 1)
                self.complete(now)
            self.hear(now)
            self.decide(now)
            ahead = []
            if self.flight is not None:
                ahead = [self.flight[0]]
            else:
                ahead += [self.asked[i].at_ns for i in self.to_arrive[:1]]
                ahead += [at for at, _ in self.to_cancel]
                ahead += [due for due, _ in self.draining]
            if not ahead:
                return self.log
            now = min(ahead)

    def hear(self, upto: int) -> None:
        """Arrivals and cancellations in the order of their times, arrivals first where they tie."""
        while True:
            arrivals = [(self.asked[i].at_ns, 0, i) for i in self.to_arrive[:1]]
            cancels = [(at, 1, i) for at, i in self.to_cancel]
            due = [entry for entry in arrivals + cancels if entry[0] <= upto]
            if not due:
                return
            at, kind, number = min(due)
            if kind == 0:
                self.to_arrive.pop(0)
                self.arrive(number, at)
            else:
                self.to_cancel.remove((at, number))
                self.cancel(number, at)

    def arrive(self, number: int, now: int) -> None:
        asked = self.asked[number]
        self.write(now, "arrival", request=number, prompt=asked.prompt, outputs=asked.outputs)
        if asked.cancel_ns:
            self.to_cancel.append((asked.cancel_ns, number))
        if self.credit(asked) > self.world.pages:
            self.write(now, "rejected", request=number, code="kv_capacity_exceeded")
            self.ended.add(number)
        else:
            self.queue.append(number)

    def cancel(self, number: int, now: int) -> None:
        if number in self.ended:
            self.write(now, "cancel_ignored", request=number)
            return
        self.write(now, "cancel", request=number)
        self.ended.add(number)
        if number in self.queue:
            self.queue.remove(number)
            return
        self.drop(next(live for live in self.line if live.number == number), now)

    def drop(self, live: Live, now: int) -> None:
        """The credit is gone from here on; the pages drain."""
        self.line.remove(live)
        if live.pages and self.world.delay_ns:
            self.draining.append((now + self.world.delay_ns, live.pages))
        else:
            self.returned += live.pages

    def complete(self, now: int) -> None:
        assert self.flight is not None
        rows, self.flight = self.flight[1], None
        emitting = [live for live, _ in rows if live in self.line and live.computed >= live.asked.prompt]
        if emitting:
            self.write(now, "outputs", step=self.steps, tokens=[[live.number, live.emitted] for live in emitting])
        for live in emitting:
            live.emitted += 1
            if live.emitted == live.asked.outputs:
                self.write(now, "finish", request=live.number, status="length", outputs=live.emitted)
                self.ended.add(live.number)
                self.drop(live, now)

    def decide(self, now: int) -> None:
        self.returned += sum(pages for due, pages in self.draining if due <= now)
        self.draining = [(due, pages) for due, pages in self.draining if due > now]
        if self.returned:
            self.write(now, "release", pages=self.returned)
            self.returned = 0
        alone = len(self.line) + len(self.queue) <= 1
        blocked = self.admit(now)
        rows = self.deal(alone)
        if blocked:
            self.write(now, "admission_blocked", request=self.queue[0], reason=blocked)
        held, draining = sum(live.pages for live in self.line), sum(pages for _, pages in self.draining)
        snapshot = {
            "waiting": len(self.queue),
            "running": len(self.line),
            "reserved": sum(live.credit for live in self.line),
            "free": self.world.pages - held - draining,
            "held": held,
            "draining": draining,
        }
        if snapshot != self.last_snapshot:
            self.write(now, "snapshot", **snapshot)
            self.last_snapshot = snapshot
        if rows:
            self.steps += 1
            ends = now + self.world.tick_ns
            dealt = [[live.number, count] for live, count in rows]
            self.write(now, "dispatch", step=self.steps, begins_ns=now, ends_ns=ends, rows=dealt)
            self.flight = (ends, rows)

    def admit(self, now: int) -> str:
        """First come, first served, until something binds: its name, empty if nobody is left to wait."""
        while self.queue:
            number = self.queue[0]
            active = sum(live.credit for live in self.line)
            credit, draining = self.credit(self.asked[number]), sum(pages for _, pages in self.draining)
            if len(self.line) >= self.world.slots:
                return "slots"
            if active + credit > self.world.pages:
                return "credits"
            if active + credit + draining > self.world.pages:
                return "draining"
            self.queue.pop(0)
            self.line.append(Live(number, self.asked[number], credit))
            self.write(now, "admitted", request=number, credit=credit, replayed=0)
        return ""

    def deal(self, alone: bool) -> list[tuple[Live, int]]:
        """Decodes in turn, then prompts in turn; the first served of each kind goes to the end of the line."""
        budget = self.world.budget
        decodes = [live for live in self.line if live.computed >= live.asked.prompt]
        prompts = [live for live in self.line if live.computed < live.asked.prompt]
        rows: list[tuple[Live, int]] = []
        for group in (decodes, prompts):
            first = None
            for live in group:
                wanted = 1 if group is decodes else live.asked.prompt - live.computed
                if self.world.cap and not alone:
                    wanted = min(wanted, self.world.cap)
                count = min(wanted, budget)
                if count:
                    budget -= count
                    live.computed += count
                    live.pages = -(-live.computed // self.world.size)
                    rows.append((live, count))
                    first = first or live
            if first is not None:
                self.line.remove(first)
                self.line.append(first)
        return rows
