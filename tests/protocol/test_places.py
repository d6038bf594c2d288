"""Who may listen at a path: one process at a time, whoever comes in the same instant, hangs, dies or only looks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness import ROOT, wait_until

from protocol.channels import AddressError, AddressTaken, ServerChannel
from protocol.messages import ApiToScheduler
from protocol.places import Place, PlaceTaken, holder_pid, is_abandoned, listener_at

# For each path it is told, it listens there or says who does; "." gives it up again.
CONTENDER = """
import sys, zmq
from protocol.channels import AddressTaken, ServerChannel
from protocol.messages import ApiToScheduler
context, held = zmq.Context(), None
print("up", flush=True)
for line in sys.stdin:
    if line == ".\\n":
        if held: held.close()
        held, said = None, "left"
    else:
        try:
            held, said = ServerChannel(context, "ipc://" + line.strip(), ApiToScheduler), "has it"
        except AddressTaken as taken:
            said = f"taken by {taken.pid}"
    print(said, flush=True)
"""


class Contender:
    """A process that may listen."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTENDER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def contenders() -> Iterator[Callable[[int], list[Contender]]]:
    made: list[Contender] = []

    def start(count: int) -> list[Contender]:
        made.extend(Contender() for _ in range(count))
        assert [one.heard() for one in made] == ["up"] * count
        return made

    yield start
    for one in made:
        one.end()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def server_at(context: zmq.Context[Any], path: Path) -> ServerChannel[Any]:
    return ServerChannel(context, f"ipc://{path}", ApiToScheduler)


def test_of_those_that_start_in_one_instant_one_gets_the_place_and_the_others_are_told_who(
    runtime_dir: Path, contenders: Callable[[int], list[Contender]]
) -> None:
    all_of_them = contenders(4)
    for number in range(25):
        for one in all_of_them:
            one.tell(str(runtime_dir / f"{number}.sock"))
        said = {one.pid: one.heard() for one in all_of_them}
        (winner,) = [pid for pid, text in said.items() if text == "has it"]
        assert set(said.values()) == {"has it", f"taken by {winner}"}
        for one in all_of_them:
            one.tell(".")
            assert one.heard() == "left"
    assert os.listdir(runtime_dir) == []


def test_nobody_gets_in_between_the_claim_and_the_bind(runtime_dir: Path, context: zmq.Context[Any]) -> None:
    claimed = Place.claim(str(runtime_dir / "x.sock"))
    with pytest.raises(AddressTaken, match=f"pid {os.getpid()}, since 20"):
        server_at(context, runtime_dir / "x.sock")
    claimed.release()
    server_at(context, runtime_dir / "x.sock").close()
    assert os.listdir(runtime_dir) == []


def test_the_place_of_a_killed_process_is_free(
    runtime_dir: Path, context: zmq.Context[Any], contenders: Callable[[int], list[Contender]]
) -> None:
    (holder,) = contenders(1)
    holder.tell(str(runtime_dir / "x.sock"))
    assert holder.heard() == "has it"
    assert holder_pid(str(runtime_dir / "x.sock")) == holder.pid
    assert not is_abandoned(f"ipc://{runtime_dir}/x.sock")
    holder.end()
    assert holder_pid(str(runtime_dir / "x.sock")) is None
    assert is_abandoned(f"ipc://{runtime_dir}/x.sock")
    channel = server_at(context, runtime_dir / "x.sock")
    assert holder_pid(str(runtime_dir / "x.sock")) == os.getpid()
    channel.close()
    assert os.listdir(runtime_dir) == []


def test_a_stopped_holder_is_replaced_by_force_and_leaves_its_successor_alone_when_it_wakes(
    runtime_dir: Path, context: zmq.Context[Any], contenders: Callable[[int], list[Contender]]
) -> None:
    path = runtime_dir / "x.sock"
    (holder,) = contenders(1)
    holder.tell(str(path))
    assert holder.heard() == "has it"
    os.kill(holder.pid, signal.SIGSTOP)
    successor: ServerChannel[Any] = ServerChannel(context, f"ipc://{path}", ApiToScheduler, bind=False)
    wait_until(lambda: _refusal(successor).endswith("which is stopped"), 60, "the holder to stop")
    successor.bind(by_force=True)
    os.kill(holder.pid, signal.SIGCONT)
    holder.tell(".")
    assert holder.heard() == "left"
    assert holder_pid(str(path)) == os.getpid() and path.exists()
    with pytest.raises(AddressTaken, match=f"pid {os.getpid()}, "):
        server_at(context, path)
    successor.close()
    assert os.listdir(runtime_dir) == []


def _refusal(channel: ServerChannel[Any]) -> str:
    with pytest.raises(AddressTaken) as taken:
        channel.bind()
    return str(taken.value)


def test_who_lost_the_place_before_it_could_listen_is_told(runtime_dir: Path) -> None:
    slow = Place.claim(str(runtime_dir / "x.sock"))
    quick = Place.claim(str(runtime_dir / "x.sock"), by_force=True)
    quick.listening()
    with pytest.raises(PlaceTaken, match=f"pid {os.getpid()}, "):
        slow.listening()
    assert slow.taken and not quick.taken
    slow.release()
    assert holder_pid(str(runtime_dir / "x.sock")) == os.getpid()
    quick.release()
    assert os.listdir(runtime_dir) == []


def test_a_place_whose_directory_was_cleared_was_taken_by_nobody(runtime_dir: Path) -> None:
    place = Place.claim(str(runtime_dir / "x.sock"))
    (runtime_dir / "x.sock.lock").unlink()
    assert not place.taken
    place.release()
    assert not place.taken
    assert not is_abandoned(f"ipc://{runtime_dir}/x.sock"), "who had it left by itself"


def test_a_look_at_who_has_the_place_is_not_noticed_there(runtime_dir: Path, context: zmq.Context[Any]) -> None:
    now = 0.0
    channel: ServerChannel[Any] = ServerChannel(
        context, f"ipc://{runtime_dir}/x.sock", ApiToScheduler, clock=lambda: now
    )
    assert {listener_at(f"ipc://{runtime_dir}/x.sock") for _ in range(20)} == {os.getpid()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(runtime_dir / "x.sock"))

    def counted() -> bool:
        nonlocal now
        now += 1.0
        channel.receive()
        return channel.stats.failed_handshakes > 0

    wait_until(counted, 60, "the connection that said nothing to be counted")
    assert channel.stats.failed_handshakes == 1
    channel.close()


@pytest.mark.parametrize(("failed", "said"), [(1, "1 connection spoke"), (2, "2 connections spoke")])
def test_the_warning_counts_connections(
    runtime_dir: Path, context: zmq.Context[Any], failed: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = server_at(context, runtime_dir / "x.sock")
    channel._monitor.events = lambda: [zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL] * failed  # type: ignore[method-assign]
    channel.receive()
    assert said in caplog.text
    channel.close()


def test_a_listener_without_a_lock_keeps_its_place_and_other_files_are_left_alone(
    runtime_dir: Path, context: zmq.Context[Any]
) -> None:
    path = runtime_dir / "x.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        assert listener_at(f"ipc://{path}") == os.getpid()
        with pytest.raises(AddressTaken, match=f"pid {os.getpid()}, "):
            server_at(context, path)
    (runtime_dir / "file").write_text("mine")
    with pytest.raises(AddressError, match="not a socket"):
        server_at(context, runtime_dir / "file")
    assert (runtime_dir / "file").read_text() == "mine"
    server_at(context, path).close()
    assert os.listdir(runtime_dir) == ["file"]
