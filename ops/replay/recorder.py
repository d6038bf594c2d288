"""Watches a replay and keeps what the report needs: columns per request, bins over time, a sample of lives.

A step costs a handful of vector operations, whatever the batch; memory is a few numbers per request and a bounded
number of bins.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ops.replay.workload import Workload
from protocol.columns import i32, u64
from protocol.messages import Outputs, Step
from scheduler.interface import Stats

MOST_BINS = 512
GAP_BIN_NS = 1_000_000
GAP_BINS = 1 << 16
MOST_LANES = 120
MARKED_STEPS = (100, 1_000, 10_000)


class Bins:
    """Sums over equal spans of time: when the run outgrows `MOST_BINS` of them, pairs are merged."""

    def __init__(self, names: tuple[str, ...], width_ns: int = 100_000_000) -> None:
        self.width_ns = width_ns
        self.sums = {name: [0.0] * MOST_BINS for name in names}
        self.used = 0

    def at(self, now_ns: int) -> int:
        """The bin of a time; makes room for it."""
        while now_ns >= self.width_ns * MOST_BINS:
            self.width_ns *= 2
            for name, sums in self.sums.items():
                self.sums[name] = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)] + [0.0] * (MOST_BINS // 2)
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
    """An observer of one run. `stats` asks the scheduler for its levels; it is called a bounded number of times."""

    def __init__(self, workload: Workload, stats: Callable[[], Stats], *, digest: bool = False) -> None:
        self.workload = workload
        self.columns = Columns(len(workload.rows))
        self.gaps: npt.NDArray[np.int64] = np.zeros(GAP_BINS, np.int64)
        self.bins = Bins(("busy", "rows", "running", "waiting", "used", "weight", "tokens", "outputs", "steps", "time"))
        self.marks: list[tuple[int, int, float, dict[str, int]]] = []
        """(time, preemptions so far, ratio, passes held so far by each test), at each reading."""
        self.cancels_ignored = 0
        self.steps = self.busy_ns = self.row_steps = self.peak_rows = self.scheduled = 0
        self.peak_waiting = 0
        self.peak_used = 0.0
        self.end_ns = 0
        self.decisions: dict[str, int] = {}
        self.stats = Stats()
        self._stats = stats
        self._next_reading_ns = 0
        self._crc = 0 if digest else -1
        stride = max(1, len(workload.order) // MOST_LANES)
        self.sampled: set[int] = set(workload.order[::stride])

    def arrived(self, request: int, now_ns: int) -> None:
        """Nothing to keep: the trace has it."""

    def cancelled(self, request: int, now_ns: int, *, live: bool) -> None:
        self.cancels_ignored += not live

    def stepped(self, step: Step, sent_ns: int, begin_ns: int, end_ns: int) -> None:
        counts = np.frombuffer(step.num_tokens, "<i4")
        rows, tokens = len(counts), int(counts.sum())
        self.steps += 1
        self.busy_ns += end_ns - begin_ns
        self.row_steps += rows
        self.scheduled += tokens
        self.peak_rows = max(self.peak_rows, rows)
        index, sums = self.bins.at(end_ns), self.bins.sums
        sums["steps"][index] += 1
        sums["time"][index] += end_ns - begin_ns
        sums["tokens"][index] += tokens
        if sent_ns >= self._next_reading_ns:
            self._read(sent_ns)
        if self._crc >= 0:
            self._digest(step, counts)

    def _digest(self, step: Step, counts: npt.NDArray[np.int32]) -> None:
        pairs = np.empty((len(counts), 2), "<u4")
        pairs[:, 0], pairs[:, 1] = u64(step.ids), counts
        self._crc = zlib.crc32(pairs.tobytes(), self._crc)
        if self.steps in MARKED_STEPS:
            self.decisions[str(self.steps)] = self._crc
        self.decisions["all"] = self._crc

    def _read(self, now_ns: int) -> None:
        """Look at the scheduler's levels; a few times per bin, so that a long run costs no more than a short one."""
        stats = self._stats()
        used = 1 - stats.free_blocks / max(stats.usable_blocks, 1)
        self.peak_used, self.peak_waiting = max(self.peak_used, used), max(self.peak_waiting, stats.waiting)
        index, sums = self.bins.at(now_ns), self.bins.sums
        sums["weight"][index] += 1
        sums["running"][index] += stats.running
        sums["waiting"][index] += stats.waiting
        sums["used"][index] += used
        ratio = -1.0 if stats.new_token_ratio is None else stats.new_token_ratio
        self.marks.append((now_ns, stats.preemptions, ratio, dict(stats.held_passes)))
        self._next_reading_ns = now_ns + self.bins.width_ns // 8
        if len(self.marks) > 16 * MOST_BINS:
            self.marks = self.marks[::2]

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
            self.end_ns = now_ns
        for rejection in outputs.rejected:
            columns.status[rejection.id] = rejection.code

    def _tokens(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int32], now_ns: int) -> None:
        columns = self.columns
        fresh = positions == 0
        if fresh.any():
            columns.first[ids[fresh]] = now_ns
            ids_again = ids[~fresh]
        else:
            ids_again = ids
        if len(ids_again):
            gaps = now_ns - columns.last[ids_again]
            columns.max_gap[ids_again] = np.maximum(columns.max_gap[ids_again], gaps)
            np.add.at(self.gaps, np.minimum(gaps // GAP_BIN_NS, GAP_BINS - 1), 1)
        columns.last[ids] = now_ns
        self.bins.sums["outputs"][self.bins.at(now_ns)] += len(ids)

    def finish(self) -> None:
        """The run is over: take the last numbers."""
        self.stats = self._stats()
