"""A replay as a log of events, one JSON object a line: what a contract is checked against, entry by entry.

The order within one instant is the order of the contract: outputs and ends, arrivals, cancellations, then what the pass
did. Equal runs give equal bytes. docs/reservation.md has the fields.
"""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from ops.replay.engine import Observer
from ops.replay.workload import Workload
from protocol.columns import i32, u64
from protocol.messages import Outputs, RequestStatus, Step
from scheduler.core import CoreScheduler
from scheduler.interface import Scheduler

_encode = msgspec.json.Encoder().encode


class EventLog(Observer):
    """Writes the events of one run, whose scheduler is a CoreScheduler, to `file` (binary, opened by the caller)."""

    def __init__(self, file: BinaryIO, workload: Workload) -> None:
        self._file = file
        self._rows = workload.rows
        self._running: set[tuple[int, int]] = set()
        self._held_passes = 0
        self._returned = 0
        self._snapshot: dict[str, int] = {}

    def _write(self, now_ns: int, event: str, **fields: object) -> None:
        self._file.write(_encode({"at_ns": now_ns, "event": event} | fields) + b"\n")

    def told(self, outputs: Outputs, now_ns: int) -> None:
        for rejection in outputs.rejected:
            self._write(now_ns, "rejected", request=rejection.id, code=rejection.code)
        if outputs.ids:
            pairs = list(zip(u64(outputs.ids).tolist(), i32(outputs.positions).tolist(), strict=True))
            self._write(now_ns, "outputs", step=outputs.step_id, tokens=pairs)
        for end in outputs.finished:
            if end.status != RequestStatus.ABORTED:  # the cancellation has said it
                status, count = end.status.name.lower(), end.num_output_tokens
                self._write(now_ns, "finish", request=end.id, status=status, outputs=count)

    def arrived(self, request: int, now_ns: int) -> None:
        row = self._rows[request]
        self._write(now_ns, "arrival", request=request, prompt=row.input_tokens, outputs=row.output_tokens)

    def cancelled(self, request: int, now_ns: int, *, live: bool) -> None:
        self._write(now_ns, "cancel" if live else "cancel_ignored", request=request)

    def passed(self, scheduler: Scheduler, now_ns: int) -> None:
        """What the pass did, in its order: pages came back, requests entered, the head was held back. Then how things
        stand, if that has changed.

        Raises TypeError for a scheduler of another class, which has no queue and no pool to look at.
        """
        if not isinstance(scheduler, CoreScheduler):
            raise TypeError(f"{type(scheduler).__name__} is no CoreScheduler: its passes can't be logged")
        returned = scheduler.draining_pages.returned
        if returned != self._returned:
            self._write(now_ns, "release", pages=returned - self._returned)
            self._returned = returned
        self._log_admissions(scheduler, now_ns)
        stats = scheduler.refresh_stats()
        held_passes = sum(stats.held_passes.values())
        head = scheduler.waiting.front(now_ns) if held_passes != self._held_passes else None
        if head is not None:
            self._write(now_ns, "admission_blocked", request=head.id, reason=head.held_by)
        self._held_passes = held_passes
        snapshot = {
            "waiting": stats.waiting,
            "running": stats.running,
            "reserved": stats.reserved_blocks,
            "free": stats.free_blocks,
            "held": stats.usable_blocks - stats.free_blocks - stats.draining_blocks,
            "draining": stats.draining_blocks,
        }
        if snapshot != self._snapshot:
            self._write(now_ns, "snapshot", **snapshot)
            self._snapshot = snapshot

    def _log_admissions(self, scheduler: CoreScheduler, now_ns: int) -> None:
        running = {(request.id, request.incarnation) for request in scheduler.table.requests()}
        if running != self._running:
            for request in scheduler.table.requests():
                if (request.id, request.incarnation) not in self._running:
                    credit = -(-(request.max_total - 1) // scheduler.block_size)
                    self._write(now_ns, "admitted", request=request.id, credit=credit, replayed=request.num_replayed)
            self._running = running

    def stepped(self, step: Step, sent_ns: int, begin_ns: int, end_ns: int) -> None:
        rows = list(zip(u64(step.ids).tolist(), i32(step.num_tokens).tolist(), strict=True))
        self._write(sent_ns, "dispatch", step=step.step_id, begins_ns=begin_ns, ends_ns=end_ns, rows=rows)
