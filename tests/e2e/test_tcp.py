"""The three processes over TCP with a shared key: they serve, and strangers are turned away."""

from __future__ import annotations

from pathlib import Path

import zmq
from harness import free_port, request, running_command, running_server, wait_until

from protocol.security import write_keys
from tests.e2e.kit import samples_of


def test_three_processes_speak_over_tcp_with_their_key_and_turn_a_stranger_away(runtime_dir: Path) -> None:
    key = runtime_dir / "key"
    keys = write_keys(str(key))
    address = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--backend", "sim", "--curve-key-file", str(key))
    links = ("--scheduler-address", address, "--runner-address", f"tcp://127.0.0.1:{free_port()}")
    with running_server(*flags, *links) as server:
        body = {"model": "smollm2-135m-instruct", "prompt": "a", "max_tokens": 5}
        assert server.request("POST", "/v1/completions", body).status == 200
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(address)
        stranger.send(b"hello")
        try:
            name = "triptych_scheduler_failed_handshakes_total{link=api}"
            wait_until(lambda: samples_of(server).get(name, 0) > 0, 60, "the stranger to be counted")
        finally:
            stranger.close()
            context.term()
        assert request(server.port, "GET", "/health").status == 200
        assert keys.secret.decode() not in server.log()


def test_a_scheduler_that_everybody_could_command_does_not_start(runtime_dir: Path) -> None:
    flags = ("--runtime-dir", str(runtime_dir), "--scheduler-address", f"tcp://0.0.0.0:{free_port()}")
    with running_command("scheduler", *flags) as scheduler:
        assert scheduler.wait() == 2
        assert "--allow-insecure-bind" in scheduler.log() and "keygen" in scheduler.log()
