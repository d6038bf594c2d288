"""Watches a replay and keeps what the report needs: columns per request, bins over time, a sample of lives.

A step costs a handful of vector operations, whatever the batch; memory is a few numbers per request and a bounded
number of bins.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from ops.replay.accounts import TokenAccounts
from ops.replay.engine import Coast
from ops.replay.lanes import LaneRecorder
from ops.replay.workload import Workload
from protocol.columns import i32, u64
from protocol.messages import Outputs, Step
from scheduler.interface import Scheduler, Stats

MOST_BINS = 512
READINGS_PER_BIN = 8
GAP_BIN_NS = 1_000_000
GAP_BINS = 1 << 16
MOST_LANES = 120
MARKED_STEPS = (100, 1_000, 10_000)


class Bins:
    """Sums over equal spans of time: when the run outgrows `MOST_BINS` of them, pairs are merged."""

    def __init__(self, width_ns: int = 100_000_000) -> None:
        self.width_ns = width_ns
        self.sums: dict[str, list[float]] = {}
        self.used = 0

    def add(self, name: str, now_ns: int, amount: float) -> None:
        """Add to the sum of the bin at a time."""
        sums = self.sums.get(name)
        if sums is None:
            sums = self.sums[name] = [0.0] * MOST_BINS
        index = self._at(now_ns)
        self.sums[name][index] += amount

    def coasted(self, run: Coast) -> None:
        """Add steps that all decode the same rows, and what they put out, each at its end."""
        ends, rows, done = run.ends_ns, len(run.ids), 0
        begin, last = run.begin_ns, int(ends[-1])
        self._at(last)
        while done < len(ends):
            now = int(ends[done])
            border = (now // self.width_ns + 1) * self.width_ns
            upto = len(ends) if last < border else int(np.searchsorted(ends, border))
            steps, end = upto - done, int(ends[upto - 1])
            for name, amount in (("steps", steps), ("busy", end - begin), ("tokens", rows * steps)):
                self.add(name, now, amount)
            self.add("outputs", now, rows * steps)
            begin, done = end, upto

    def spread(self, name: str, begin_ns: int, end_ns: int, level: float) -> None:
        """Add a level that held from `begin_ns` to `end_ns`, as level x ns, to all the bins it touches."""
        while begin_ns < end_ns:
            self._at(end_ns - 1)
            upto = min(end_ns, (begin_ns // self.width_ns + 1) * self.width_ns)
            self.add(name, begin_ns, level * (upto - begin_ns))
            begin_ns = upto

    def _at(self, now_ns: int) -> int:
        while now_ns >= self.width_ns * MOST_BINS:
            self.width_ns *= 2
            for name, sums in self.sums.items():
                self.sums[name] = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)] + [0.0] * (MOST_BINS // 2)
            self.used = (self.used + 1) // 2
        index = now_ns // self.width_ns
        self.used = max(self.used, index + 1)
        return index


class Columns:
    """What is kept of each request, [rows of the trace] each. Times in ns, -1 for never."""

    def __init__(self, count: int) -> None:
        self.first: npt.NDArray[np.int64] = np.full(count, -1, np.int64)
        self.last: npt.NDArray[np.int64] = np.full(count, -1, np.int64)
        self.end: npt.NDArray[np.int64] = np.full(count, -1, np.int64)
        self.max_gap: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.outputs: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.queue: npt.NDArray[np.int64] = np.full(count, -1, np.int64)
        self.cached: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.preemptions: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.status: list[str] = [""] * count


class Recorder:
    """An observer of one run. It asks the scheduler for its levels a bounded number of times per bin."""

    def __init__(self, workload: Workload, *, digest: bool = False) -> None:
        self.workload = workload
        count = len(workload.rows)
        self.columns = Columns(count)
        self.gaps: npt.NDArray[np.int64] = np.zeros(GAP_BINS, np.int64)
        self.bins = Bins()
        self.accounts = TokenAccounts(count)
        stride = -(-len(workload.order) // MOST_LANES) or 1
        self.lanes = LaneRecorder(workload.order[::stride])
        self.levels: dict[str, float] = {}
        """Level x ns over the whole run: running, waiting, used, ratio."""
        self.cancels_ignored = 0
        self.steps = self.busy_ns = self.row_steps = self.peak_rows = self.scheduled = 0
        self.peak_waiting = 0
        self.peak_used = 0.0
        self.end_ns = 0
        self.decisions: dict[str, int] = {}
        self.stats = Stats()
        self._scheduler: Scheduler | None = None
        self._live = 0
        self._level: dict[str, float] = {}
        self._since_ns = self._next_reading_ns = 0
        self._held: dict[str, int] = {}
        self._preemptions = 0
        self._crc = 0 if digest else -1

    def passed(self, scheduler: Scheduler, now_ns: int) -> None:
        self._scheduler = scheduler

    def arrived(self, request: int, now_ns: int) -> None:
        self._live += 1
        self.lanes.arrived(request, now_ns)

    def cancelled(self, request: int, now_ns: int, *, live: bool) -> None:
        self.cancels_ignored += not live

    def stepped(self, step: Step, sent_ns: int, begin_ns: int, end_ns: int) -> None:
        ids, counts = u64(step.ids).astype(np.int64), i32(step.num_tokens)
        rows, tokens = len(counts), int(counts.sum())
        self.steps += 1
        self.busy_ns += end_ns - begin_ns
        self.row_steps += rows
        self.scheduled += tokens
        self.peak_rows = max(self.peak_rows, rows)
        for new in step.new:
            self.accounts.admitted(new)
        self.accounts.scheduled(ids, counts)
        if step.new or step.left:
            self.lanes.stepped(step, sent_ns)
        self.bins.add("steps", end_ns, 1)
        self.bins.add("busy", end_ns, end_ns - begin_ns)
        self.bins.add("tokens", end_ns, tokens)
        if sent_ns >= self._next_reading_ns:
            self._read(sent_ns)
        if self._crc >= 0:
            self._digest(decision(ids, counts))

    def looks_ns(self) -> int:
        return self._next_reading_ns

    def coasted(self, run: Coast) -> None:
        ids, ends = run.ids.astype(np.int64), run.ends_ns
        steps, rows = len(ends), len(ids)
        self.busy_ns += int(ends[-1]) - run.begin_ns
        self.row_steps += rows * steps
        self.scheduled += rows * steps
        self.peak_rows = max(self.peak_rows, rows)
        self.accounts.scheduled(ids, steps)
        self.bins.coasted(run)
        self._gaps(ids, int(ends[0]))
        if steps > 1:
            between = np.diff(ends)
            self.columns.max_gap[ids] = np.maximum(self.columns.max_gap[ids], between.max())
            np.add.at(self.gaps, np.minimum(between // GAP_BIN_NS, GAP_BINS - 1), rows)
        self.columns.last[ids] = ends[-1]
        self.lanes.told(ids, int(ends[0]))
        pairs = decision(ids, 1) if self._crc >= 0 else b""
        for _ in range(steps):
            self.steps += 1
            if pairs:
                self._digest(pairs)

    def told(self, outputs: Outputs, now_ns: int) -> None:
        if outputs.ids:
            self._tokens(u64(outputs.ids).astype(np.int64), i32(outputs.positions), now_ns)
        columns = self.columns
        for end in outputs.finished:
            columns.status[end.id] = end.status.name.lower()
            columns.end[end.id] = now_ns
            columns.outputs[end.id] = end.num_output_tokens
            columns.queue[end.id] = end.queue_ns
            columns.cached[end.id] = end.num_cached_tokens
            columns.preemptions[end.id] = end.num_preemptions
            self._ended(end.id, end.num_output_tokens, now_ns)
        for rejection in outputs.rejected:
            columns.status[rejection.id] = rejection.code
            self._ended(rejection.id, 0, now_ns)

    def finish(self) -> None:
        """The run is over: take the last numbers."""
        self.accounts.finish()
        self._read(max(self.end_ns, self._since_ns))

    def _ended(self, request: int, outputs: int, now_ns: int) -> None:
        self.end_ns = now_ns
        self.accounts.ended(request, outputs)
        self.lanes.ended(request, now_ns, self._scheduler)
        self._live -= 1
        if not self._live:
            self._account_levels(now_ns)
            self._level = {}
            self._next_reading_ns = now_ns

    def _tokens(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int32], now_ns: int) -> None:
        columns = self.columns
        fresh = positions == 0
        ids_again = ids
        if np.count_nonzero(fresh):
            columns.first[ids[fresh]] = now_ns
            ids_again = ids[~fresh]
        if len(ids_again):
            self._gaps(ids_again, now_ns)
        columns.last[ids] = now_ns
        self.bins.add("outputs", now_ns, len(ids))
        self.lanes.told(ids, now_ns)

    def _gaps(self, ids: npt.NDArray[np.int64], now_ns: int) -> None:
        """Each of these has got a token that is not its first."""
        columns = self.columns
        gaps = now_ns - columns.last[ids]
        columns.max_gap[ids] = np.maximum(columns.max_gap[ids], gaps)
        np.add.at(self.gaps, np.minimum(gaps // GAP_BIN_NS, GAP_BINS - 1), 1)

    def _read(self, now_ns: int) -> None:
        """Look at the scheduler's levels; a few times per bin, so that a long run costs no more than a short one."""
        self._account_levels(now_ns)
        self._next_reading_ns = now_ns + self.bins.width_ns // READINGS_PER_BIN
        if self._scheduler is None:
            return
        stats = self.stats = self._scheduler.refresh_stats()
        stats.queue_seconds, stats.preemption_counts = [], []  # taken, as metrics would: they grow with the run
        used = 1 - stats.free_blocks / max(stats.usable_blocks, 1)
        self.peak_used, self.peak_waiting = max(self.peak_used, used), max(self.peak_waiting, stats.waiting)
        self._level = {"running": stats.running, "waiting": stats.waiting, "used": used}
        if stats.new_token_ratio is not None:
            self._level["ratio"] = stats.new_token_ratio
        for test, passes in stats.held_passes.items():
            self.bins.add(f"held {test}", now_ns, passes - self._held.get(test, 0))
        self.bins.add("preemptions", now_ns, stats.preemptions - self._preemptions)
        self._held, self._preemptions = {str(test): n for test, n in stats.held_passes.items()}, stats.preemptions

    def _account_levels(self, now_ns: int) -> None:
        """The levels of the last reading held until now."""
        for name, level in self._level.items():
            self.bins.spread(name, self._since_ns, now_ns, level)
            self.levels[name] = self.levels.get(name, 0.0) + level * (now_ns - self._since_ns)
        self._since_ns = now_ns

    def _digest(self, pairs: bytes) -> None:
        self._crc = zlib.crc32(pairs, self._crc)
        if self.steps in MARKED_STEPS:
            self.decisions[str(self.steps)] = self._crc
        self.decisions["all"] = self._crc


def decision(ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int32] | int) -> bytes:
    """A step as the digest takes it: (request, tokens) of each row, as 32-bit numbers."""
    pairs = np.empty((len(ids), 2), "<u4")
    pairs[:, 0], pairs[:, 1] = ids, counts
    return pairs.tobytes()
