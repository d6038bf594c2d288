"""The metrics endpoint of a process, over real sockets."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric

from protocol import exposition
from protocol.exposition import ExpositionError, new_registry, serve_metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("triptych_test_things", "Things", registry=registry).inc(3)
    return registry


def ask(target: str | int, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> bytes:
    client = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET, socket.SOCK_STREAM)
    with client:
        client.settimeout(60)
        client.connect(target if isinstance(target, str) else ("127.0.0.1", target))
        client.sendall(request)
        answer = b""
        while more := client.recv(65536):
            answer += more
    return answer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_the_text_is_served_on_the_unix_socket_and_on_the_port(registry: CollectorRegistry, runtime_dir: Path) -> None:
    path, port = str(runtime_dir / "x.metrics.sock"), free_port()
    with serve_metrics(registry, unix_path=path, port=port) as server:
        assert server.port == port
        for target in (path, port):
            head, body = ask(target).split(b"\r\n\r\n", 1)
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert b"Content-Type: text/plain; version=0.0.4" in head
            assert b"triptych_test_things_total 3.0" in body
            assert f"Content-Length: {len(body)}".encode() in head


def test_the_socket_is_private_and_removed_at_the_end(registry: CollectorRegistry, runtime_dir: Path) -> None:
    path = str(runtime_dir / "x.metrics.sock")
    server = serve_metrics(registry, unix_path=path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    server.close()
    server.close()
    assert not os.path.exists(path)


def test_nothing_else_is_served(registry: CollectorRegistry, runtime_dir: Path) -> None:
    path = str(runtime_dir / "x.metrics.sock")
    with serve_metrics(registry, unix_path=path):
        assert ask(path, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404")
        assert ask(path, b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405")
        assert ask(path, b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 20_000).startswith(b"HTTP/1.1 431")
        assert ask(path, b"\x80\x04K\x01.\r\n\r\n").startswith(b"HTTP/1.1 404")
        assert ask(path, b"HEAD /metrics HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
        assert ask(path, b"GET /metrics?x=1 HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_clients_that_say_nothing_or_leave_do_not_stop_the_others(
    registry: CollectorRegistry, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., object]
) -> None:
    monkeypatch.setattr(exposition, "CLIENT_TIMEOUT_S", 0.3)
    path = str(runtime_dir / "x.metrics.sock")
    with serve_metrics(registry, unix_path=path):
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(exposition.MAX_CLIENTS)]
        for number, client in enumerate(silent):
            client.connect(path)
            client.sendall(b"GET /met")
            if number % 2:
                client.close()

        def served() -> bool:
            try:
                return b"200 OK" in ask(path)
            except OSError:
                return False  # all places are taken until the silent ones time out

        wait_until(served, 60, "an answer")
        for client in silent:
            client.close()


def test_no_thread_outlives_the_end_and_holds_what_the_registry_watches(
    runtime_dir: Path, wait_until: Callable[..., object]
) -> None:
    path = str(runtime_dir / "x.metrics.sock")
    asked, go_on, order = threading.Event(), threading.Event(), []

    class Watched(CollectorRegistry):
        def collect(self) -> Iterable[Metric]:
            asked.set()
            go_on.wait(60)
            order.append("collected")
            return super().collect()

    def close() -> None:
        server.close()
        order.append("closed")

    def refused() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(path) != 0

    server = serve_metrics(Watched(), unix_path=path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as drips, socket.socket(socket.AF_UNIX) as asks:
        for client, text in ((drips, b"GET /met"), (asks, b"GET /metrics HTTP/1.1\r\n\r\n")):
            client.connect(path)
            client.sendall(text)
        assert asked.wait(60)
        closing = threading.Thread(target=close)
        closing.start()
        wait_until(refused, 60, "the end to have begun")
        go_on.set()
        closing.join(60)
    assert order == ["collected", "closed"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("metrics")]


def test_a_dead_processs_socket_file_is_swept_and_a_live_ones_is_not(
    registry: CollectorRegistry, runtime_dir: Path
) -> None:
    path = str(runtime_dir / "x.metrics.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    with serve_metrics(registry, unix_path=path):
        with pytest.raises(ExpositionError, match="live process"):
            serve_metrics(registry, unix_path=path)
        assert b"200 OK" in ask(path)


def test_a_place_that_cannot_be_had_is_an_error_that_says_why(registry: CollectorRegistry, runtime_dir: Path) -> None:
    with pytest.raises(ExpositionError, match="107"):
        serve_metrics(registry, unix_path="/tmp/" + "x" * 120)
    (runtime_dir / "file").touch()
    with pytest.raises(ExpositionError, match="not a socket"):
        serve_metrics(registry, unix_path=str(runtime_dir / "file"))
    with pytest.raises(ExpositionError, match="No such file"):
        serve_metrics(registry, unix_path=str(runtime_dir / "missing" / "x.sock"))


def test_a_port_in_use_leaves_no_socket_file_behind(registry: CollectorRegistry, runtime_dir: Path) -> None:
    path = str(runtime_dir / "x.metrics.sock")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ExpositionError, match="in use"):
        serve_metrics(registry, unix_path=path, port=taken.getsockname()[1])
    assert not os.path.exists(path)


def test_process_numbers_carry_the_roles_name_so_that_three_texts_can_be_joined(runtime_dir: Path) -> None:
    path = str(runtime_dir / "x.metrics.sock")
    with serve_metrics(new_registry("scheduler"), unix_path=path):
        body = ask(path).split(b"\r\n\r\n", 1)[1]
    names = {line.split(b"{")[0].split(b" ")[0] for line in body.splitlines() if not line.startswith(b"#")}
    assert b"triptych_scheduler_process_cpu_seconds_total" in names
    assert all(name.startswith(b"triptych_scheduler_") for name in names)
