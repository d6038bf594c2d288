"""What a process has spent and what its clients have got for it, between two moments. Linux: it reads /proc."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from pathlib import Path

from ops.bench.api_streams import Streams
from ops.bench.processes import cpu_times


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one case. `writes` is 0 where the system doesn't tell."""

    tokens: int
    events: int
    writes: int
    user_s: float
    system_s: float
    wall_s: float

    @property
    def cpu_s(self) -> float:
        """CPU time in all, of all threads."""
        return self.user_s + self.system_s


class Snapshot(Sample):
    """The same counted from the beginning."""

    @classmethod
    def of(cls, pid: int, streams: Streams) -> Snapshot:
        """How things are now. ProcessLookupError if the process is gone."""
        return cls(streams.tokens, streams.events, writes(pid), *cpu_times(pid), time.perf_counter())

    def until(self, later: Snapshot) -> Sample:
        """What has come since."""
        return Sample(*(after - before for before, after in zip(astuple(self), astuple(later), strict=True)))


def writes(pid: int) -> int:
    """Write calls of a process since its start (those of `write` and `writev`, not `send`); 0 if it can't be read."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw"))
