"""The supervisor with small real child processes: start, restart, giving up, stopping in order, leaving nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from harness import wait_until

from protocol.process import EXIT_REPLACED
from tests.ops.supervisor_kit import DRAINS, STUBBORN, UP, Host, hosts_in


@pytest.fixture
def supervise(runtime_dir: Path) -> Iterator[Callable[..., Host]]:
    with hosts_in(runtime_dir) as start:
        yield start


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_in_reverse_order_and_cleanly(supervise: Callable[..., Host], signum: signal.Signals) -> None:
    host = supervise(runner=UP, api=UP)
    host.until("READY")
    host.until("| up", 2)
    host.process.send_signal(signum)
    assert host.end() == 0
    said = [line.split("|")[0].strip() for line in host.log().splitlines() if line.endswith("bye")]
    assert said == ["api", "runner"]
    assert host.log().splitlines()[-1] == f" triptych | ended: told to by {signum.name}"
    assert (host.place / "cleaned").exists()


def test_a_group_is_told_to_end_together_and_the_others_wait_for_all_of_it(supervise: Callable[..., Host]) -> None:
    host = supervise({"grace": 20.0}, runner=UP, api_1=DRAINS, api_2=DRAINS)
    host.until("READY")
    host.until("| up", 3)
    host.process.send_signal(signal.SIGTERM)
    host.until("| draining", 2)
    assert "bye" not in host.log(), "the runner goes on while they drain"
    (host.place / "drained").touch()
    assert host.end() == 0
    assert host.log().count("| draining") == 2


def test_a_child_that_dies_is_started_again_with_its_restart_settings(supervise: Callable[..., Host]) -> None:
    host = supervise(runner=UP, scheduler=UP)
    host.until("| up", 2)
    host.until("READY")
    runner = host.pid_of("runner")
    os.kill(host.pid_of("scheduler"), signal.SIGKILL)
    host.until("| up", 3)
    assert host.lines("scheduler")[-1].endswith(" 1")
    assert "scheduler was killed by SIGKILL" in host.log()
    assert host.pid_of("runner") == runner
    assert psutil.pid_exists(runner)
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_a_child_that_somebody_else_ended_cleanly_is_started_again(supervise: Callable[..., Host]) -> None:
    host = supervise(api=UP)
    host.until("READY")
    host.until("| up")
    os.kill(host.pid_of("api"), signal.SIGTERM)
    host.until("| up", 2)
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_a_child_that_keeps_failing_ends_all_with_its_last_words(supervise: Callable[..., Host]) -> None:
    host = supervise(runner=UP, api="print('no such thing'); raise SystemExit(7)")
    assert host.end() == 1
    assert host.lines("api") == ["no such thing"] * 3
    assert "giving up: api failed 3 times in a row; it exited with status 7" in host.log()
    assert "its last words: no such thing" in host.log()
    assert host.lines("runner")[-1] == "bye"
    assert host.log().splitlines()[-1].endswith("| ended: api failed 3 times in a row; it exited with status 7")


def test_refused_settings_are_not_tried_again(supervise: Callable[..., Host]) -> None:
    host = supervise(runner=UP, api="print('--port: got x'); raise SystemExit(2)")
    assert host.end() == 2
    assert host.lines("api") == ["--port: got x"]
    assert "its last words: --port: got x" in host.log()


def test_a_start_that_takes_too_long_ends_all(supervise: Callable[..., Host]) -> None:
    host = supervise({"start": 0.5}, runner="import threading; threading.Event().wait()")
    assert host.end() == 1
    assert "giving up: not ready after 0.5 s" in host.log()
    assert host.log().splitlines()[-1] == " triptych | ended: not ready after 0.5 s (--start-timeout-s)"


def test_a_child_that_ignores_sigterm_is_killed_with_what_it_started(supervise: Callable[..., Host]) -> None:
    host = supervise({"grace": 3.0}, runner=UP, api=STUBBORN)
    host.until("READY")
    host.until("| up", 2)
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 1
    assert "api did not end within 3 s, killing it" in host.log()
    assert host.lines("runner")[-1] == "bye"


def test_a_death_elsewhere_does_not_cut_the_draining_of_another(supervise: Callable[..., Host]) -> None:
    host = supervise({"grace": 20.0}, runner=UP, api=DRAINS)
    host.until("READY")
    host.until("| up", 2)
    host.process.send_signal(signal.SIGTERM)
    host.until("draining")
    os.kill(host.pid_of("runner"), signal.SIGKILL)
    host.until("runner was killed by SIGKILL from outside while stopping")
    (host.place / "drained").touch()
    assert host.end() == 1
    assert host.lines("api")[-1] == "bye"


def test_the_second_signal_ends_all_at_once_and_still_cleans_up(supervise: Callable[..., Host]) -> None:
    host = supervise(runner=STUBBORN)
    host.until("READY")
    host.until("| up")
    host.process.send_signal(signal.SIGINT)
    host.until("stopping")

    def ended() -> bool:
        host.process.send_signal(signal.SIGINT)
        return host.process.poll() is not None

    wait_until(ended, 60, "the end after another signal")
    assert host.end() == 130
    assert (host.place / "cleaned").exists()
    assert host.log().splitlines()[-1] == " triptych | ended at once: told to a second time"


def test_one_signal_that_arrives_twice_at_once_is_one(supervise: Callable[..., Host]) -> None:
    host = supervise(runner=UP)
    host.until("READY")
    host.until("| up")
    for _ in range(2):
        host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_children_die_with_a_killed_supervisor(supervise: Callable[..., Host]) -> None:
    host = supervise(runner=UP, api=UP)
    host.until("| up", 2)
    host.process.kill()
    host.end()


def test_a_child_that_was_replaced_is_not_started_again(supervise: Callable[..., Host]) -> None:
    host = supervise(runner=UP, scheduler=UP + f"raise SystemExit({EXIT_REPLACED})")
    host.until("READY")
    host.until("| up", 2)
    os.kill(host.pid_of("scheduler"), signal.SIGTERM)
    host.until("scheduler was replaced")
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0
    assert len(host.lines("scheduler")) == 2


def test_every_line_is_passed_on_and_redrawn_progress_is_not_repeated(supervise: Callable[..., Host]) -> None:
    code = """
    import sys, threading
    for number in range(3000): print("line", number)
    for part in range(100): sys.stdout.write(f"\\rload {part} %"); sys.stdout.flush()
    print("\\nhalf", end="")
    """
    host = supervise(api=code + "raise SystemExit(2)")
    assert host.end() == 2
    lines = host.lines("api")
    assert [line for line in lines if line.startswith("line")] == [f"line {number}" for number in range(3000)]
    assert lines[-2:] == ["load 99 %", "half"]


def test_a_supervisor_with_nothing_to_do_does_nothing(supervise: Callable[..., Host]) -> None:
    host = supervise(runner=UP)
    host.until("READY")
    supervisor = psutil.Process(host.process.pid)
    wait_until(lambda: supervisor.num_threads() == 1, 60, "the end of the readiness thread")
    before = supervisor.num_ctx_switches().voluntary
    host.place.joinpath("beat").touch()
    with pytest.raises(AssertionError):
        wait_until(lambda: supervisor.num_ctx_switches().voluntary > before + 5, 1, "the supervisor to wake up")
