"""Children that live and do nothing: found by their silence, whatever they hang in, and never by mistake."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from harness import wait_until

from tests.ops.supervisor_kit import Host, hosts_in

BEATS = """
import os, pathlib, select, threading
from protocol.process import StopSignal, Watchdog, die_with_parent
die_with_parent()
watchdog = Watchdog.from_environment()
place = pathlib.Path(os.environ["PLACE"])
with StopSignal() as stop:
    print("up", os.getpid(), os.environ.get("AGAIN", ""))
    for order in ("hang at start", "hang at every start"):
        if os.environ.get("AGAIN") and (place / order).exists():
            if order == "hang at start":
                (place / order).unlink()
            threading.Event().wait()
    (place / "ready").touch()
    while not stop.requested:
        watchdog.beat()
        if (place / "stuck").exists():
            (place / "stuck").unlink()
            threading.Event().wait()
        select.select([stop], [], [], 0.02)
    print("bye")
"""
SOON = {"hang": 3.0}


@pytest.fixture
def supervise(runtime_dir: Path) -> Iterator[Callable[..., Host]]:
    with hosts_in(runtime_dir) as start:
        yield start


def begun(host: Host, times: int) -> None:
    """Wait until the program has been started so often, and its supervisor has seen all ready."""
    host.until("| up", times)
    host.until("READY")


def test_a_stopped_child_is_killed_and_started_again(supervise: Callable[..., Host]) -> None:
    host = supervise(SOON, api=BEATS)
    begun(host, 1)
    os.kill(host.pid_of("api"), signal.SIGSTOP)
    begun(host, 2)
    assert "api hangs (no sign of life for 3 s), killing it" in host.log()
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_a_child_whose_loop_is_stuck_is_killed_and_started_again(supervise: Callable[..., Host]) -> None:
    host = supervise(SOON, api_1=BEATS)
    begun(host, 1)
    (host.place / "stuck").touch()
    begun(host, 2)
    assert host.log().count("hangs (no sign of life for 3 s), killing it") == 1


def test_time_in_which_the_supervisor_stood_still_too_is_no_hang(supervise: Callable[..., Host]) -> None:
    host = supervise({"hang": 4.0}, api=BEATS)
    begun(host, 1)
    child, supervisor = psutil.Process(host.pid_of("api")), psutil.Process(host.process.pid)

    def looks(count: int) -> None:
        before = supervisor.num_ctx_switches().voluntary
        wait_until(lambda: supervisor.num_ctx_switches().voluntary >= before + count, 60, "the supervisor to look")

    child.suspend()
    looks(2)
    supervisor.suspend()
    until = time.monotonic() + 5.0
    wait_until(lambda: time.monotonic() > until, 60, "longer than a hang may be")
    supervisor.resume()
    looks(1)
    child.resume()
    (host.place / "stuck").touch()
    wait_until(lambda: not (host.place / "stuck").exists(), 60, "the child to go on")
    begun(host, 2)
    assert host.log().count("hangs") == 1, "only the real one"


def test_a_start_that_hangs_is_found_when_it_is_not_the_first_one(supervise: Callable[..., Host]) -> None:
    host = supervise(SOON, api=BEATS)
    begun(host, 1)
    (host.place / "hang at start").touch()
    os.kill(host.pid_of("api"), signal.SIGKILL)
    host.until("api hangs (not ready")
    begun(host, 3)
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0
    assert host.lines("api")[-1] == "bye"


def test_starts_that_hang_are_failures_however_long_they_lasted(supervise: Callable[..., Host]) -> None:
    host = supervise(SOON | {"stable": 0.0}, api=BEATS)
    begun(host, 1)
    (host.place / "hang at every start").touch()
    os.kill(host.pid_of("api"), signal.SIGKILL)
    assert host.end() == 1
    assert host.log().count("api hangs (not ready") == 3
    assert "giving up: api failed 3 times in a row; it was killed by SIGKILL" in host.log()
