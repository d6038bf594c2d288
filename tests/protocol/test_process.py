"""Signals, parents that die, and private directories, with real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from protocol.process import PrivateDirError, StopSignal, ensure_private_dir, setup_logging

STUBBORN = """
import signal, sys, threading
from protocol.process import die_with_parent
die_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
threading.Event().wait()
"""
PARENT = f"""
import os, subprocess, sys, threading
environment = {{**os.environ, "TRIPTYCH_PARENT_PID": str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], env=environment, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
threading.Event().wait()
"""
WAITER = """
import select
from protocol.process import StopSignal
with StopSignal() as stop:
    print("up", flush=True)
    select.select([stop], [], [])
    print("stopping", stop.requested, flush=True)
    select.select([], [], [])
"""


def start(program: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def test_a_signal_makes_the_descriptor_readable_and_the_process_goes_on() -> None:
    with StopSignal() as stop:
        assert not stop.requested
        assert select.select([stop], [], [], 0)[0] == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([stop], [], [], 5)[0] == [stop]
        assert stop.requested
        assert stop.signum == signal.SIGTERM


def test_leaving_the_context_puts_the_former_handlers_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_stop_requested_from_inside_wakes_the_poller_too() -> None:
    with StopSignal() as stop:
        stop.request()
        stop.request()
        assert stop.requested
        assert select.select([stop], [], [], 5)[0] == [stop]
    stop.request()


def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal((signal.SIGTERM, signal.SIGHUP)) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_an_echo_of_a_signal_is_not_a_second_one() -> None:
    seconds = []
    now = 100.0
    with StopSignal(on_second=lambda: seconds.append(now), echo_s=0.5, clock=lambda: now) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        now = 100.4
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert seconds == []


def test_the_second_signal_ends_a_process_that_is_stuck_in_its_shutdown() -> None:
    with start(WAITER) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping True\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_a_child_dies_with_its_killed_parent_even_if_it_ignores_sigterm(wait_until: Callable[..., object]) -> None:
    with start(PARENT) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 60, "the child's end")


def test_a_child_whose_parent_was_gone_before_it_could_ask_exits() -> None:
    with start(STUBBORN, TRIPTYCH_PARENT_PID="1") as process:
        assert process.wait(60) == 1


def test_a_process_started_by_hand_is_tied_to_nobody() -> None:
    program = "from protocol.process import die_with_parent; die_with_parent(); print('alive')"
    with start(program) as process:
        assert process.communicate(timeout=60)[0] == "alive\n"


def test_a_runtime_directory_is_made_private_with_its_parents(runtime_dir: Path) -> None:
    made = ensure_private_dir(runtime_dir / "a" / "b")
    assert os.stat(made).st_mode & 0o777 == 0o700
    assert ensure_private_dir(made) == made


def test_a_directory_that_others_can_enter_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "open").mkdir(mode=0o700)
    (runtime_dir / "open").chmod(0o755)
    with pytest.raises(PrivateDirError, match="0755"):
        ensure_private_dir(runtime_dir / "open")


def test_a_link_or_a_file_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "real").mkdir(mode=0o700)
    (runtime_dir / "link").symlink_to(runtime_dir / "real")
    (runtime_dir / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(PrivateDirError, match="not a directory"):
            ensure_private_dir(runtime_dir / name)


def test_an_unknown_log_level_is_an_error() -> None:
    with pytest.raises(ValueError, match="debug, info"):
        setup_logging("api", "loud")


def test_log_lines_carry_the_role_and_go_to_stderr() -> None:
    program = (
        "import logging, protocol.process; protocol.process.setup_logging('api'); logging.getLogger('x').warning('hm')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    assert " api W x: hm" in done.stderr
