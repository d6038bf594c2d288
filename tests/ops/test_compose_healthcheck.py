"""The containers' health check as Docker runs it: a process with an exit code, against real metrics and HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from protocol.exposition import new_registry, serve_metrics
from protocol.messages import Limits
from runner.metrics import RunnerMetrics
from scheduler.metrics import Metrics

SCRIPT = Path(__file__).parent.parent.parent / "ops" / "docker" / "healthcheck.py"


def check(role: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-IS", str(SCRIPT), role],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@contextmanager
def metrics(role: str, registry: CollectorRegistry, runtime_dir: Path) -> Iterator[None]:
    with serve_metrics(registry, unix_path=str(runtime_dir / f"{role}.metrics.sock")):
        yield


def test_the_scheduler_is_healthy_exactly_while_a_runner_has_welcomed_it(tmp_path: Path) -> None:
    registry = new_registry("scheduler")
    gauges = Metrics(registry)
    with metrics("scheduler", registry, tmp_path):
        code, said = check("scheduler", TRIPTYCH_RUNTIME_DIR=str(tmp_path))
        assert code == 1
        assert "no runner" in said
        gauges.runner_up.set(1)
        assert check("scheduler", TRIPTYCH_RUNTIME_DIR=str(tmp_path)) == (0, "")


def test_the_runner_is_healthy_once_it_serves_the_metrics_of_its_pool(tmp_path: Path) -> None:
    code, said = check("runner", TRIPTYCH_RUNTIME_DIR=str(tmp_path))
    assert code == 1
    assert "runner.metrics.sock" in said
    runner = RunnerMetrics(Limits("m", 16, 10, 128, 100, 8, 64))
    with metrics("runner", runner.registry, tmp_path):
        assert check("runner", TRIPTYCH_RUNTIME_DIR=str(tmp_path)) == (0, "")
    assert check("runner", TRIPTYCH_RUNTIME_DIR=str(tmp_path))[0] == 1


def test_metrics_without_the_readiness_gauge_are_unhealthy(tmp_path: Path) -> None:
    with metrics("runner", CollectorRegistry(), tmp_path):
        code, said = check("runner", TRIPTYCH_RUNTIME_DIR=str(tmp_path))
    assert code == 1
    assert "missing" in said


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1)])
def test_the_api_is_healthy_when_its_ready_route_says_so(status: int, code: int) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"runner": "absent"}')

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            got, said = check("api", TRIPTYCH_PORT=str(server.server_port))
        finally:
            server.shutdown()
            thread.join()
    assert got == code
    assert asked == ["/ready"]
    assert ("absent" in said) == (code == 1)


@pytest.mark.parametrize("role", ["", "engine"])
def test_an_unknown_role_is_a_usage_error(role: str) -> None:
    code, said = check(role)
    assert code == 2
    assert "api|scheduler|runner" in said
