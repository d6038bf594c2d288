"""Channels over real sockets: handshakes, sessions, losses that are seen, and sends that never block."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness import wait_until

from protocol import wire
from protocol.channels import AddressError, ChannelFull, ClientChannel, PeerGone, ServerChannel
from protocol.messages import (
    Abort,
    ApiToScheduler,
    Goodbye,
    Heartbeat,
    Hello,
    Outputs,
    Refused,
    SchedulerToApi,
    Welcome,
)


class Ends:
    """Both ends of one link in one process, with everything that each has received."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.address = address
        self.server = self.new_server()
        self.client = self.new_client()
        self.at_server: list[tuple[bytes, Any]] = []
        self.at_client: list[Any] = []

    def new_server(self) -> ServerChannel[Any]:
        return ServerChannel(self.context, self.address, ApiToScheduler)

    def new_client(self, **changes: Any) -> ClientChannel[Any]:
        hello = Hello(**({"role": "api", "version": 1, "schema_digest": wire.SCHEMA_DIGEST, "instance": "i"} | changes))
        return ClientChannel(self.context, self.address, SchedulerToApi, lambda: hello)

    def pump(self, welcoming: bool = True) -> None:
        """Let both ends do what they would do in their loops."""
        self.client.tick()
        for identity, message in self.server.receive():
            self.at_server.append((identity, message))
            if welcoming and isinstance(message, Hello):
                self.server.welcome(identity, Welcome("scheduler", 1, wire.SCHEMA_DIGEST, "s", 1))
        self.at_client += self.client.receive()

    def until(self, done: Callable[[], Any], what: str, welcoming: bool = True) -> None:
        def look() -> Any:
            self.pump(welcoming)
            return done()

        wait_until(look, 10, what)

    def connect(self) -> bytes:
        self.until(lambda: self.client.connected, "a session")
        return self.server.peers[0]

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.context.term()


@pytest.fixture
def ends(runtime_dir: Path) -> Iterator[Ends]:
    both = Ends(f"ipc://{runtime_dir}/link.sock")
    yield both
    both.close()


def of_kind(messages: list[Any], kind: type) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


def test_a_handshake_opens_a_session_and_messages_flow_both_ways(ends: Ends) -> None:
    identity = ends.connect()
    ends.client.send(Abort(b"\0" * 8))
    ends.server.send(identity, Outputs(1, 2))
    ends.until(lambda: of_kind(ends.at_client, Outputs), "outputs")
    ends.until(lambda: [m for _, m in ends.at_server if isinstance(m, Abort)], "the abort")
    assert ends.server.stats.lost_frames == ends.client.stats.lost_frames == 0


def test_a_late_server_is_found_and_a_welcome_may_take_longer_than_many_hellos(ends: Ends) -> None:
    ends.close()
    ends.context = zmq.Context()
    ends.client = ends.new_client()
    for _ in range(3):
        ends.client.tick()
    ends.server = ends.new_server()
    ends.until(lambda: ends.client.stats.sent >= 4, "some hellos", welcoming=False)
    hellos = [identity for identity, message in ends.at_server if isinstance(message, Hello)]
    assert len(hellos) == 1, "repeats of a hello under consideration are not shown again"
    ends.server.welcome(hellos[0], Welcome("scheduler", 1, wire.SCHEMA_DIGEST, "s", 1))
    ends.until(lambda: ends.client.connected, "a session")


@pytest.mark.parametrize(
    ("change", "code"), [({"version": 2}, wire.BAD_VERSION), ({"schema_digest": "0" * 16}, wire.BAD_DIGEST)]
)
def test_another_build_is_refused_with_a_reason_on_both_sides(ends: Ends, change: dict[str, Any], code: str) -> None:
    ends.client.close()
    ends.client = ends.new_client(**change)
    ends.until(lambda: of_kind(ends.at_client, Refused), "the refusal")
    assert of_kind(ends.at_client, Refused)[0].code == code
    assert not ends.client.connected and not ends.server.peers and ends.server.stats.refused_hellos >= 1
    assert not ends.at_server, "the owner never sees it"


def test_a_client_that_outlived_its_session_shakes_hands_again(ends: Ends) -> None:
    identity = ends.connect()
    ends.server.drop(identity)
    ends.client.send(Abort(b""))
    ends.until(lambda: len(of_kind(ends.at_client, Welcome)) == 2, "the second welcome")
    assert not [m for _, m in ends.at_server if isinstance(m, Abort)], "a message of the old session is not delivered"


def test_a_restarted_server_gets_a_fresh_session_and_no_old_frames(ends: Ends) -> None:
    ends.connect()
    ends.server.close()
    ends.client.send(Abort(b"\1" * 8))
    ends.server = ends.new_server()
    ends.client.send(Abort(b"\2" * 8))
    ends.until(lambda: len(of_kind(ends.at_client, Welcome)) == 2, "the second welcome")
    ends.client.send(Abort(b"\3" * 8))
    ends.until(lambda: [m for _, m in ends.at_server if isinstance(m, Abort)], "the new abort")
    assert [m for _, m in ends.at_server if isinstance(m, Abort)] == [Abort(b"\3" * 8)]


def test_late_news_of_a_connection_that_broke_leave_the_next_session_alone(ends: Ends) -> None:
    ends.connect()
    ends.server.close()
    ends.server = ends.new_server()

    def read_without_a_tick() -> bool:
        with contextlib.suppress(ChannelFull, PeerGone):
            ends.client.send(Abort(b"\1" * 8))
        for identity, message in ends.server.receive():
            if isinstance(message, Hello):
                ends.server.welcome(identity, Welcome("scheduler", 1, wire.SCHEMA_DIGEST, "s", 2))
        ends.at_client += ends.client.receive()
        return len(of_kind(ends.at_client, Welcome)) == 2

    wait_until(read_without_a_tick, 60, "the second welcome")
    for _ in range(3):
        ends.pump()
    assert ends.client.connected and len(of_kind(ends.at_client, Welcome)) == 2


def test_a_goodbye_ends_the_session_for_the_client(ends: Ends) -> None:
    identity = ends.connect()
    ends.server.drop(identity, Goodbye("shutdown", "bye"))
    ends.until(lambda: of_kind(ends.at_client, Goodbye), "the goodbye")
    assert of_kind(ends.at_client, Goodbye)[0].code == "shutdown"


def test_silence_ends_a_session(ends: Ends) -> None:
    now = [0.0]
    ends.client.close()
    hello = Hello("api", 1, wire.SCHEMA_DIGEST, "i")
    ends.client = ClientChannel(
        ends.context, ends.address, SchedulerToApi, lambda: hello, silence_s=3, clock=lambda: now[0]
    )
    ends.until(lambda: ends.client.connected, "a session")
    now[0] = 2.9
    assert ends.client.tick() is False and ends.client.connected
    now[0] = 3.1
    assert ends.client.tick() is True and not ends.client.connected


def test_heartbeats_flow_without_being_asked_for(ends: Ends) -> None:
    ends.connect()
    ends.until(lambda: [m for _, m in ends.at_server if isinstance(m, Heartbeat)], "a heartbeat")


def test_bad_frames_are_counted_answered_and_end_nothing(ends: Ends) -> None:
    identity = ends.connect()
    for junk in (b"", b"x", os.urandom(100), b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x07pickled\x94."):
        ends.client.socket.send(junk)
    ends.client.socket.send_multipart([b"two", b"frames"])
    ends.until(lambda: ends.server.stats.bad_frames == 5, "five bad frames")
    ends.server.send(identity, Outputs(1, 2))
    ends.until(lambda: of_kind(ends.at_client, Outputs), "outputs after the junk")
    assert of_kind(ends.at_client, Refused)[0].code == wire.BAD_FRAME


def test_a_repeated_frame_is_dropped(ends: Ends) -> None:
    ends.connect()
    codec: wire.Codec[Any] = wire.Codec(SchedulerToApi)
    frame = codec.encode(Abort(b"\1" * 8), ends.client._session, 0)
    ends.client.socket.send(frame)
    ends.client.socket.send(frame)
    ends.until(lambda: ends.server.stats.stale_frames == 1, "the repeat")
    assert ends.server.stats.lost_frames == 0
    assert len([m for _, m in ends.at_server if isinstance(m, Abort)]) == 1


def test_a_frame_that_the_client_lost_ends_the_session_and_the_next_one_begins(ends: Ends) -> None:
    identity = ends.connect()
    ends.server._sessions[identity].sent += 3
    ends.server.send(identity, Outputs(1, 2))
    ends.until(lambda: ends.client.stats.lost_frames == 3, "the gap")
    assert not of_kind(ends.at_client, Outputs)
    ends.until(lambda: ends.client.connected, "another session")


def test_what_follows_a_frame_that_the_server_lost_is_refused_until_the_next_session(ends: Ends) -> None:
    ends.connect()
    ends.client._sent += 3
    ends.client.send(Abort(b"\1" * 8))
    ends.client.send(Abort(b"\2" * 8))
    ends.until(lambda: ends.server.stats.lost_frames == 3 and not ends.client.connected, "the refusal")
    ends.until(lambda: ends.client.connected, "another session")
    assert not [m for _, m in ends.at_server if isinstance(m, Abort)]
    ends.client.send(Abort(b"\3" * 8))
    ends.until(lambda: [m for _, m in ends.at_server if isinstance(m, Abort)], "an abort in the new session")


def test_a_send_to_nobody_raises_and_is_not_forgotten_silently(ends: Ends) -> None:
    with pytest.raises(PeerGone):
        ends.server.send(b"nobody", Outputs(1, 1))
    with pytest.raises(PeerGone):
        ends.client.send(Abort(b""))


def test_a_peer_that_has_left_is_reported_by_the_send(ends: Ends) -> None:
    identity = ends.connect()
    ends.client.close()

    def gone() -> bool:
        try:
            ends.server.send(identity, Outputs(1, 1))
        except PeerGone:
            return True
        return False

    wait_until(gone, 60, "the send to fail")
    ends.client = ends.new_client()


def test_a_reader_that_does_not_read_fills_its_queue_and_then_raises_without_blocking(ends: Ends) -> None:
    identity = ends.connect()
    big = Outputs(1, 1, tokens=bytes(20_000))
    with pytest.raises(ChannelFull):
        for _ in range(20_000):
            ends.server.send(identity, big)
    assert ends.server.stats.send_failures == 1


def test_large_messages_arrive_whole_under_a_stalled_reader(ends: Ends) -> None:
    identity = ends.connect()
    sent = []
    for number in range(200):
        body = number.to_bytes(4, "little") * 60_000
        sent.append(hashlib.blake2b(body).digest())
        ends.server.send(identity, Outputs(1, number, tokens=body))
    ends.until(lambda: len(of_kind(ends.at_client, Outputs)) == 200, "all messages")
    assert [hashlib.blake2b(m.tokens).digest() for m in of_kind(ends.at_client, Outputs)] == sent


def test_the_socket_file_is_private_and_removed(ends: Ends) -> None:
    path = ends.address.removeprefix("ipc://")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    ends.server.close()
    assert not os.path.exists(path)
    ends.server = ends.new_server()


def test_a_second_server_on_a_live_address_is_refused_and_a_dead_ones_file_is_swept(ends: Ends) -> None:
    with pytest.raises(AddressError, match="another live process"):
        ends.new_server()
    ends.server.close()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(ends.address.removeprefix("ipc://"))
    stale.close()
    ends.server = ends.new_server()
    ends.connect()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ipc://" + "/x" * 60, "107"),
        ("ipc://relative.sock", "absolute"),
        ("http://127.0.0.1:1", "expected"),
        ("tcp://127.0.0.1:notaport", "can't bind"),
    ],
)
def test_a_bad_address_says_what_is_wrong(address: str, why: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with pytest.raises(AddressError, match=why):
        ServerChannel(context, address, ApiToScheduler)
    context.term()


def test_a_process_with_unsent_messages_exits_at_once(runtime_dir: Path) -> None:
    program = f"""
import zmq
from protocol.channels import ClientChannel
from protocol.messages import Hello, SchedulerToApi
context = zmq.Context()
client = ClientChannel(context, "ipc://{runtime_dir}/nobody.sock", SchedulerToApi, lambda: Hello("api", 1, "d", "i"))
for _ in range(10):
    client.tick()
    client._last_hello = -1e9
client.close()
context.term()
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True, cwd=Path(__file__).parents[2])
