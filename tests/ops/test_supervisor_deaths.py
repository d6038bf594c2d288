"""Who ended a child, and what follows: kills from outside at whatever instant end nothing but the child."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from harness import wait_until

from ops.child import Child, Program
from ops.deaths import Coroner, Death
from ops.supervisor import RestartPolicy, Supervisor
from protocol.process import EXIT_REPLACED, FORCED_EXIT
from tests.ops.supervisor_kit import UP, Host, hosts_in

# Ready when it may be; refuses its settings when it is told to.
SLOW = """
import os, pathlib, select
from protocol.process import StopSignal, Watchdog, die_with_parent
die_with_parent()
watchdog = Watchdog.from_environment()
place = pathlib.Path(os.environ["PLACE"])
if (place / "refuse").exists():
    (place / "refuse").unlink()
    raise SystemExit(2)
with StopSignal() as stop:
    print("up", os.getpid())
    while not (place / "go").exists():
        select.select([stop], [], [], 0.01)
    watchdog.beat()
    print("begun")
    (place / "ready").touch()
    while not stop.requested:
        watchdog.beat()
        select.select([stop], [], [], 0.1)
"""
# Fails twice, serves until it is replaced, fails twice, and serves.
UNSTEADY = f"""
import os, pathlib, select
from protocol.process import StopSignal, Watchdog, die_with_parent
die_with_parent()
watchdog = Watchdog.from_environment()
starts = pathlib.Path(os.environ["PLACE"], "starts")
number = len(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text("x" * number)
print("start", number)
if number in (1, 2, 4, 5):
    raise SystemExit(7)
watchdog.beat()
if number == 3:
    raise SystemExit({EXIT_REPLACED})
with StopSignal() as stop:
    select.select([stop], [], [])
"""
# Leaves one behind that holds its output, and speaks when told to.
SURVIVED = """
import os, subprocess, sys, threading
code = '''
import os, pathlib, threading
place = pathlib.Path(os.environ["PLACE"])
while not (place / "speak").exists():
    threading.Event().wait(0.01)
print("last words", flush=True)
(place / "spoken").touch()
'''
if not os.environ.get("AGAIN"):
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""


@pytest.fixture
def supervise(runtime_dir: Path) -> Iterator[Callable[..., Host]]:
    with hosts_in(runtime_dir) as start:
        yield start


def test_kills_from_outside_end_nothing_however_many_come_and_at_whatever_instant(
    supervise: Callable[..., Host],
) -> None:
    host = supervise(api=SLOW)
    for start in range(1, 6):
        host.until("| up", start)
        os.kill(host.pid_of("api"), signal.SIGKILL)
    (host.place / "go").touch()
    for ready in range(1, 6):
        host.until("| begun", ready)
        os.kill(host.pid_of("api"), signal.SIGKILL if ready % 2 else signal.SIGTERM)
    host.until("| begun", 6)
    assert host.log().count("(no failure)") == 10
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_failures_before_and_after_a_time_of_service_are_not_in_a_row(supervise: Callable[..., Host]) -> None:
    host = supervise({"stable": 0.0}, scheduler=UNSTEADY)
    host.until("| start 6")
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_settings_that_were_good_once_are_not_to_blame_for_a_start_that_is_refused(
    supervise: Callable[..., Host],
) -> None:
    host = supervise(api=SLOW)
    (host.place / "go").touch()
    host.until("READY")
    (host.place / "refuse").touch()
    os.kill(host.pid_of("api"), signal.SIGKILL)
    host.until("| begun", 2)
    assert "api exited with status 2" in host.log()
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_a_start_that_the_system_refuses_is_tried_again(supervise: Callable[..., Host], runtime_dir: Path) -> None:
    python = runtime_dir / "python"
    python.symlink_to(sys.executable)
    host = supervise({"limit": 30}, python=str(python), api=UP)
    host.until("READY")
    python.unlink()
    os.kill(host.pid_of("api"), signal.SIGKILL)
    host.until("api could not be started")
    python.symlink_to(sys.executable)
    host.until("| up", 2)
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_what_can_never_be_started_ends_all_and_nothing_else_is_begun() -> None:
    said: list[str] = []
    missing, fine = Program("runner", ["/no/such/program"]), Program("api", [sys.executable, "-c", "print('up')"])
    supervisor = Supervisor(
        [missing, fine],
        write=said.append,
        probe=lambda: False,
        on_ready=lambda seconds: None,
        policy=RestartPolicy(limit=1),
    )
    assert supervisor.run() == 1
    assert not any(line.endswith("| up") for line in said)
    assert said[-1].startswith(" triptych | ended: runner failed at once; it could not be started (")


def test_a_process_that_could_not_be_started_leaves_no_descriptor_open() -> None:
    gc.collect()  # what earlier tests left open would be closed at any moment
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        Child(Program("api", ["/no/such/program"]), print, 0.0, again=False)
    assert psutil.Process().num_fds() <= before


def test_what_outlives_a_child_may_speak_in_the_instant_of_its_end(supervise: Callable[..., Host]) -> None:
    host = supervise(api=SURVIVED + UP)
    host.until("READY")
    child, supervisor = psutil.Process(host.pid_of("api")), psutil.Process(host.process.pid)
    supervisor.suspend()
    wait_until(lambda: supervisor.status() == psutil.STATUS_STOPPED, 60, "the supervisor to stand still")
    child.kill()
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE, 60, "the child's end")
    (host.place / "speak").touch()
    wait_until((host.place / "spoken").exists, 60, "the last words")
    supervisor.resume()
    host.until("| up", 2)
    assert host.lines("api").count("last words") == 1
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 0


def test_who_replaces_a_stranger_is_given_time_to_be_there() -> None:
    wait = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(wait, stdin=subprocess.PIPE) as first,
        subprocess.Popen(wait, stdin=subprocess.PIPE) as second,
    ):
        holders = iter([first.pid, None, second.pid])
        said: list[str] = []

        def write(line: str) -> None:
            said.append(line)
            if line.endswith(f"pid {first.pid} has the place of scheduler"):
                first.kill()
            elif line.endswith(f"pid {second.pid} has the place of scheduler"):
                os.kill(os.getpid(), signal.SIGTERM)

        replaced = [sys.executable, "-c", f"raise SystemExit({EXIT_REPLACED})"]
        program = Program("scheduler", replaced, holder=lambda: next(holders), abandoned=lambda: False)
        supervisor = Supervisor(
            [program],
            write=write,
            probe=lambda: False,
            on_ready=lambda seconds: None,
            clock=lambda: time.monotonic() / 4,  # a busy machine has time too
        )
        assert supervisor.run() == 0
        assert not any("nobody has the place" in line for line in said), said
        second.kill()


def supervisor_of_nothing(probe: Callable[[], bool], on_ready: Callable[[float], None]) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    return Supervisor([], write=said.append, probe=probe, on_ready=on_ready), said


def test_a_question_for_readiness_that_fails_is_asked_again() -> None:
    answers = iter([ValueError("what?"), ValueError("what?"), True])

    def probe() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    supervisor, said = supervisor_of_nothing(probe, lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    assert supervisor.run() == 0
    assert said[0] == " triptych | can't tell whether all is ready: ValueError('what?')"
    assert len([line for line in said if "can't tell" in line]) == 1


def test_an_error_of_the_supervisors_own_is_its_last_line() -> None:
    def on_ready(seconds: float) -> None:
        raise RuntimeError("no")

    supervisor, said = supervisor_of_nothing(lambda: True, on_ready)
    assert supervisor.run() == 1
    assert said[0].endswith("Traceback (most recent call last):")
    assert said[-1] == " triptych | ended: an error of the supervisor's own: RuntimeError('no')"


@pytest.mark.parametrize(
    ("status", "by_us", "text", "from_outside"),
    [
        (0, False, "exited with status 0", True),
        (FORCED_EXIT, False, "exited with status 130", True),
        (1, False, "exited with status 1", False),
        (-signal.SIGTERM, False, "was killed by SIGTERM", True),
        (-signal.SIGSEGV, False, "was killed by SIGSEGV", False),
        (-signal.SIGKILL, False, "was killed by SIGKILL from outside", True),
        (-signal.SIGKILL, True, "was killed by SIGKILL", False),
        (-99, False, "was killed by signal 99", False),
    ],
)
def test_a_failure_is_told_from_a_kill(tmp_path: Path, status: int, by_us: bool, text: str, from_outside: bool) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 1\noom_kill 3\n")
    assert Coroner(str(vmstat)).judge(status, by_us=by_us) == Death(text, from_outside)


def test_a_kill_for_want_of_memory_is_a_failure(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 3\n")
    coroner = Coroner(str(vmstat))
    vmstat.write_text("oom_kill 4\n")
    assert coroner.judge(-signal.SIGKILL, by_us=False) == Death("was killed by SIGKILL (out of memory)", False)
    assert coroner.judge(-signal.SIGKILL, by_us=False).from_outside
    vmstat.unlink()
    assert coroner.judge(-signal.SIGKILL, by_us=False) == Death("was killed by SIGKILL (out of memory?)", False)
