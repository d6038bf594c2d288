"""Settings of `triptych serve` itself: the supervisor's own. Those of the three processes are in their classes."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.settings import SettingError, check, setting

SHORTEST_HANG_S = 2.0


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Which processes run, and how they are watched.

    `runtime_dir` empty means a private one per instance, removed at the end.
    """

    runtime_dir: str = setting(
        "", help="private directory for sockets; empty: a new one per instance, removed at the end"
    )
    api_processes: int = setting(
        1, help="API processes that share the HTTP port: more use more cores for HTTP and text", minimum=1, maximum=64
    )
    start_timeout_s: float = setting(
        600.0,
        help="how long loading may take before the start counts as failed; a process that has been ready before gets "
        "ten times its longest start, or hang_timeout_s if that is more",
        unit="s",
        minimum=1,
    )
    restart_limit: int = setting(
        16,
        help="failures of one process in a row, each within restart_window_s, that end all of it (to be killed from "
        "outside is none); a request that makes the runner fail is found among n after log2(n) + 4 of them",
        minimum=1,
    )
    restart_window_s: float = setting(
        30.0, help="a process that lived this long starts again without being counted", unit="s", minimum=0
    )
    restart_backoff_s: float = setting(
        0.5,
        help="wait before the second restart in a row (the first is at once); doubles with each one, up to 10 s",
        unit="s",
        minimum=0,
    )
    hang_timeout_s: float = setting(
        10.0,
        help="a process without a sign of life for this long is killed and started again; 0: never",
        unit="s",
        minimum=0,
    )
    stop_timeout_s: float = setting(
        10.0, help="how long each process may take to end (the API: beyond its shutdown_grace_s)", unit="s", minimum=0
    )

    def __post_init__(self) -> None:
        check(self)
        if 0 < self.hang_timeout_s < SHORTEST_HANG_S:
            allowed = f"0 or at least {SHORTEST_HANG_S:g} s: processes give a sign of life twice a second"
            raise SettingError(f"hang_timeout_s: got {self.hang_timeout_s:g}, allowed is {allowed}")
