"""The runner as a process: it serves, is measured, and ends when told to."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runner.kit import new, step, tokens_of
from tests.runner.link_kit import Scheduler

ROOT = Path(__file__).parents[2]
CODE = """
import json, sys
from runner.config import RunnerConfig
from runner.main import run
sys.exit(run(RunnerConfig(**json.loads(sys.argv[1]))))
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Start]:
    """Start a simulated runner in the runtime directory; all are killed at the end."""
    made: list[subprocess.Popen[str]] = []

    def begin(**changes: Any) -> subprocess.Popen[str]:
        config = {"backend": "sim", "runtime_dir": str(runtime_dir), "sim_step_ms": 1.0, **changes}
        made.append(
            subprocess.Popen(
                [sys.executable, "-c", CODE, json.dumps(config)], cwd=ROOT, stderr=subprocess.PIPE, text=True
            )
        )
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def scrape(path: Path) -> str:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(60)
    connection.sock.connect(str(path))
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_it_serves_steps_and_metrics_and_stops_in_order(runtime_dir: Path, start: Start) -> None:
    process = start()
    scheduler = Scheduler(f"ipc://{runtime_dir}/runner.sock")
    epoch = scheduler.welcome().epoch
    scheduler.channel.send(step(1, {1: 3}, epoch=epoch, arrivals=[new(1, [1, 2, 3], [1])]))
    assert tokens_of(scheduler.result()).keys() == {1}
    text = scrape(runtime_dir / "runner.metrics.sock")
    assert "triptych_runner_kv_blocks 8191.0" in text and "triptych_runner_process_cpu_seconds_total" in text
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=200)
    scheduler.close()
    assert process.returncode == 0, log
    assert "ready at ipc://" in log
    assert list(runtime_dir.iterdir()) == []


def test_a_second_runner_on_the_same_address_says_so_and_leaves_the_first_alone(
    runtime_dir: Path, start: Start
) -> None:
    start()
    scheduler = Scheduler(f"ipc://{runtime_dir}/runner.sock")
    epoch = scheduler.welcome().epoch
    second = start()
    _, log = second.communicate(timeout=200)
    assert second.returncode == 1 and "another live process listens there" in log
    scheduler.channel.send(step(1, {1: 3}, epoch=epoch, arrivals=[new(1, [1, 2, 3], [1])]))
    assert tokens_of(scheduler.result()).keys() == {1}
    scheduler.close()


def test_what_a_killed_runner_left_behind_is_no_obstacle(runtime_dir: Path, start: Start) -> None:
    first = start()
    scheduler = Scheduler(f"ipc://{runtime_dir}/runner.sock")
    epoch = scheduler.welcome().epoch
    first.kill()
    first.communicate()
    start()
    again = Scheduler(f"ipc://{runtime_dir}/runner.sock", epoch=epoch)
    assert again.welcome().epoch > epoch
    again.close()
    scheduler.close()


def test_a_model_that_is_missing_ends_the_start_with_its_name(start: Start) -> None:
    process = start(backend="model", model="/nowhere/model.gguf")
    _, log = process.communicate(timeout=200)
    assert process.returncode == 1 and "/nowhere/model.gguf" in log and "Traceback" not in log
