"""`triptych serve` as a whole, with the simulated runner: what it prints, survives, refuses and leaves behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from harness import Server, running_command, running_server, wait_until

from ops.serve_config import ServeConfig
from protocol.settings import SettingError

SIM = ("--backend", "sim", "--sim-step-ms", "1")
COMPLETION = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}


def complete(server: Server) -> int:
    return server.request("POST", "/v1/completions", COMPLETION).status


def test_it_says_where_it_is_and_gives_a_curl_that_works() -> None:
    with running_server(*SIM, "--sim-eos-rate", "0.2") as server:
        server.wait_for_log("Ctrl-C ends it")
        assert server.url in server.log()
        assert "model: smollm2-135m-instruct" in server.log()
        command = re.search(r"  (curl .*?\n.*?)\n\n", server.log(), re.DOTALL)
        assert command is not None
        arguments = shlex.split(command[1].replace("\\\n", ""))
        body = arguments[arguments.index("-d") + 1].encode()
        answer = server.request("POST", arguments[1].removeprefix(server.url), body)
        assert answer.status == 200, answer.body
        if os.path.exists("/usr/bin/curl"):
            done = subprocess.run(arguments, capture_output=True, timeout=60, check=True)
            assert b'"choices"' in done.stdout


def test_interrupting_it_ends_everything_and_leaves_no_sockets() -> None:
    with running_server(*SIM) as server:
        assert complete(server) == 200
        place = Path(psutil.Process(server.pid).environ()["TRIPTYCH_RUNTIME_DIR"])
        assert (place / "runner.sock").exists()
        assert set(server.children()) == {"api", "scheduler", "runner"}
        assert server.stop(signal.SIGINT) == 0
        server.assert_no_orphans()
        assert not place.exists()


def test_killing_it_leaves_no_process_and_it_starts_again_on_the_same_port() -> None:
    with running_server(*SIM) as server:
        environment = psutil.Process(server.pid).environ()
        server.process.kill()
        server.process.wait()
        server.assert_no_orphans()
        again = {"TRIPTYCH_RUNTIME_DIR": environment["TRIPTYCH_RUNTIME_DIR"]}
        with running_server(*SIM, "--port", str(server.port), env=again, ready=False) as second:
            second.port = server.port
            wait_until(second.is_ready, 60, "the second start")
            assert complete(second) == 200


def test_each_process_that_is_killed_comes_back_and_serves_again() -> None:
    with running_server(*SIM, "--restart-backoff-s", "0.1") as server:
        for role in ("scheduler", "api", "runner"):
            old = server.children()[role]
            old.kill()
            wait_until(lambda role=role, old=old: server.children().get(role) not in (None, old), 60, f"a new {role}")
            wait_until(server.is_ready, 60, f"readiness after the {role}")
            assert complete(server) == 200


def test_an_api_process_that_hangs_is_killed_and_comes_back_though_it_is_the_only_one() -> None:
    with running_server(*SIM, "--hang-timeout-s", "2") as server:
        assert complete(server) == 200
        old = server.children()["api"]
        old.suspend()
        assert complete(server) == 200, "who connects meanwhile waits for the next one"
        assert "api hangs (no sign of life for 2 s), killing it" in server.log()
        assert not old.is_running() and server.children()["api"] != old


def test_a_hang_is_never_shorter_than_the_time_between_signs_of_life() -> None:
    assert ServeConfig(hang_timeout_s=0).hang_timeout_s == 0
    with pytest.raises(SettingError, match="hang_timeout_s: got 0.5, allowed is 0 or at least 2 s"):
        ServeConfig(hang_timeout_s=0.5)


def test_a_port_in_use_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running_command("serve", *SIM, "--port", port) as command:
            assert command.wait() == 1
            assert f"port {port} on 127.0.0.1 is in use" in command.log()
            assert "starting" not in command.log()


def test_two_instances_side_by_side_do_not_touch_each_other(runtime_dir: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(runtime_dir), "TRIPTYCH_RUNTIME_DIR": ""}
    with running_server(*SIM, env=env) as first, running_server(*SIM, env=env) as second:
        assert len(list((runtime_dir / "triptych").glob("run-*"))) == 2
        assert complete(first) == complete(second) == 200
        second.process.kill()
        second.assert_no_orphans()
        assert complete(first) == 200
    with running_server(*SIM, env=env) as third:
        assert len(list((runtime_dir / "triptych").glob("run-*"))) == 1
        assert complete(third) == 200
    assert list((runtime_dir / "triptych").glob("run-*")) == []


def test_a_key_is_in_no_command_line_and_no_log_and_readiness_is_still_seen() -> None:
    with running_server(*SIM, env={"TRIPTYCH_API_KEY": "hunter2"}) as server:
        server.wait_for_log("Ctrl-C ends it")
        processes = (psutil.Process(server.pid), *server.children().values())
        assert "hunter2" not in server.log() + str([process.cmdline() for process in processes])
        assert "Authorization: Bearer $API_KEY" in server.log()
        assert complete(server) == 401
        allowed = server.request("POST", "/v1/completions", COMPLETION, {"Authorization": "Bearer hunter2"})
        assert allowed.status == 200


def test_a_runner_that_cannot_start_ends_it_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with running_command("serve", "--port", "0", "--model", str(tmp_path / "broken.gguf")) as command:
        assert command.wait(90) in (1, 2)
        assert "giving up: " in command.log()
        assert "its last words: " in command.log()
        command.assert_no_orphans()
