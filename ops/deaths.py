"""What a child's exit status says: in words, and whether it failed or was ended by somebody outside.

What follows from it is the supervisor's business.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from protocol.process import FORCED_EXIT

VMSTAT = "/proc/vmstat"
_ENDINGS = (0, FORCED_EXIT, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Of one that was told to end. None of our processes ends like this by itself."""


@dataclass(frozen=True, slots=True)
class Death:
    """`text` reads on after the role's name. `from_outside`: neither the process nor its supervisor brought it about,
    so that it says nothing about whether the process can run."""

    text: str
    from_outside: bool


class Coroner:
    """Tells who ended a process. The kernel kills for want of memory with the signal that people kill with, and counts
    how often on the whole machine."""

    def __init__(self, vmstat: str = VMSTAT) -> None:
        self._vmstat = vmstat
        self._oom_kills = self._count()

    def judge(self, status: int, *, by_us: bool) -> Death:
        """`by_us`: the supervisor has killed it."""
        if status >= 0:
            return Death(f"exited with status {status}", status in _ENDINGS)
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        if by_us:
            return Death(f"was killed by {name}", False)
        if -status != signal.SIGKILL:
            return Death(f"was killed by {name}", status in _ENDINGS)
        before, self._oom_kills = self._oom_kills, self._count()
        if before is None or self._oom_kills is None:
            return Death(f"was killed by {name} (out of memory?)", False)
        if self._oom_kills > before:
            return Death(f"was killed by {name} (out of memory)", False)
        return Death(f"was killed by {name} from outside", True)

    def _count(self) -> int | None:
        """None where the kernel doesn't say."""
        try:
            with open(self._vmstat, encoding="ascii") as file:
                return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
        except (OSError, ValueError):
            return None
