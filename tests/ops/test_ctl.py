"""`triptych ctl`: what it sends, whom it asks, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from harness import ROOT

from ops import ctl
from ops.cli import main as cli_main
from ops.runtime_dir import RuntimeDir, live
from protocol import wire
from protocol.channels import ServerChannel
from protocol.messages import ApiToScheduler, Control, ControlReply, Hello, Refused, Welcome


class Answering:
    """A scheduler's end of the link that answers every Control with `answer`, or refuses the connection."""

    def __init__(self, directory: Path) -> None:
        self.heard: list[Control] = []
        self.roles: list[str] = []
        self.ok, self.answer = True, b'{"forgotten": 3}'
        self.only: dict[str, str] | None = None
        self.refusal: Refused | None = None
        self._stop = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._channel: ServerChannel[Any] = ServerChannel(
            self._context, f"ipc://{directory}/scheduler.sock", ApiToScheduler
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._channel.socket.poll(10)
            for peer, message in self._channel.receive():
                if isinstance(message, Hello):
                    self.roles.append(message.role)
                    if self.refusal is not None:
                        self._channel.refuse(peer, self.refusal)
                    else:
                        welcome = Welcome("scheduler", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, "0" * 16, 1)
                        self._channel.welcome(peer, welcome)
                elif isinstance(message, Control):
                    self.heard.append(message)
                    known = self.only is None or message.arguments == self.only
                    body = self.answer if known else b'{"code": "not_found", "message": "no such request"}'
                    self._channel.send(peer, ControlReply(message.nonce, self.ok and known, body))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._channel.close()
        self._context.term()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Answering]:
    answering = Answering(tmp_path)
    yield answering
    answering.close()


def run(directory: Path, *words: str) -> int:
    return ctl.main(words, {"TRIPTYCH_RUNTIME_DIR": str(directory)})


@pytest.mark.parametrize(
    ("words", "action", "arguments"),
    [
        (["status"], "status", {}),
        (["pause"], "pause", {}),
        (["pause", "all"], "pause", {"what": "all"}),
        (["reset-prefix-cache", "running=true"], "reset_prefix_cache", {"running": "true"}),
        (["set", "max-num-seqs=8", "queue_policy=lof"], "set", {"max_num_seqs": "8", "queue_policy": "lof"}),
        (["timeline", "17"], "timeline", {"id": "17"}),
        (["drain", "replica=1"], "drain", {"replica": "1"}),
        (["pause", "all", "replica=0"], "pause", {"what": "all", "replica": "0"}),
        (["set", "max-num-seqs=8", "replica=2"], "set", {"max_num_seqs": "8", "replica": "2"}),
        (["explain", "17", "replica=1"], "explain", {"id": "17", "replica": "1"}),
    ],
)
def test_words_become_one_message(words: list[str], action: str, arguments: dict[str, str]) -> None:
    first = next(ctl.controls(words[0], words[1:]))
    assert (first.action, first.arguments) == (action, arguments)


@pytest.mark.parametrize(
    "words",
    [
        ["statsu"],
        ["status", "now"],
        ["pause", "some"],
        ["set"],
        ["set", "max_num_seqs"],
        ["set", "replica=1"],
        ["reset-prefix-cache", "all=true"],
        ["explain"],
        ["timeline", "1", "2"],
        [],
        ["status", "--what"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_a_line_that_helps(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(words, {}) == 2
    said = capsys.readouterr().err
    assert "triptych ctl" in said
    if words == ["statsu"]:
        assert "Did you mean status?" in said


def test_an_answer_is_printed_for_people_or_as_it_is(
    scheduler: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "reset-prefix-cache") == 0
    assert capsys.readouterr().out == "The prefix cache has forgotten 3 blocks.\n"
    assert run(tmp_path, "--json", "reset-prefix-cache") == 0
    assert capsys.readouterr().out == '{"forgotten": 3}\n'
    assert scheduler.roles == ["ctl", "ctl"]


def test_a_refused_order_is_exit_code_1_with_the_reason(
    scheduler: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.ok, scheduler.answer = False, b'{"code": "unknown_setting", "message": "foo can\'t be changed"}'
    assert run(tmp_path, "set", "foo=1") == 1
    assert capsys.readouterr().err == "triptych ctl: foo can't be changed\n"


def test_a_refused_connection_is_exit_code_1(
    scheduler: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.refusal = Refused("wrong_role", "no orders, please")
    assert run(tmp_path, "status") == 1
    assert "no orders, please" in capsys.readouterr().err


def test_nobody_there_is_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ctl, "PATIENCE_S", 0.2)
    assert run(tmp_path, "status") == 3
    assert f"{tmp_path}/scheduler.sock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "found_as"),
    [("17", {"id": "17"}), ("17", {"label": "17"}), ("job", {"label": "job"}), ("cmpl-ab", {"label": "ab"}),
     ("chatcmpl-ab", {"label": "ab"}), ("cmpl-ab", {"label": "cmpl-ab"})],
)  # fmt: skip
def test_a_request_is_looked_for_under_all_that_its_name_may_be(
    scheduler: Answering, tmp_path: Path, name: str, found_as: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.only = found_as
    scheduler.answer = msgspec.json.encode({"requests": [{"explanation": ["It ran.", "It ended."]}] * 2})
    assert cli_main(["explain", name, "--runtime-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "It ran.\nIt ended.\n\nIt ran.\nIt ended.\n"
    assert scheduler.heard[-1].arguments == found_as


def test_a_request_that_nobody_knows_is_exit_code_1(scheduler: Answering, tmp_path: Path) -> None:
    scheduler.only = {}
    assert run(tmp_path, "explain", "17") == 1


def test_without_an_address_the_newest_live_server_is_meant(runtime_dir: Path) -> None:
    place = str(runtime_dir)  # short: a longer one would not leave room for socket names
    environ = {"XDG_RUNTIME_DIR": place}
    assert [path for path in live(environ) if path.startswith(place)] == []
    with RuntimeDir.create(environ) as old, RuntimeDir.create(environ) as new:
        (Path(new.path) / "scheduler.sock").touch()
        mine = [path for path in live(environ) if path.startswith(place)]
        assert sorted(mine) == sorted([old.path, new.path]) and mine[0] == new.path
    assert [path for path in live(environ) if path.startswith(place)] == []


def test_it_starts_without_torch_and_without_a_web_server() -> None:
    code = "import sys, ops.ctl; print(sorted({'torch', 'uvicorn', 'starlette', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
