"""What strangers may send to a link: it is refused, counted, logged once, and changes nothing for anybody else."""

from __future__ import annotations

import logging
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from harness import wait_until

from protocol import wire
from protocol.channels import MAX_FIRST_FRAME_BYTES, ClientChannel, ServerChannel, new_instance
from protocol.columns import pack_u64
from protocol.messages import Abort, ApiToScheduler, Heartbeat, Hello, Refused, SchedulerToApi, Welcome


class Link:
    """A server with one peer that has been welcomed, and what the server's owner has been handed."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.address = f"ipc://{directory}/link.sock"
        self.server: ServerChannel[Any] = ServerChannel(self.context, self.address, ApiToScheduler)
        self.hello = Hello("api", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, new_instance())
        self.client: ClientChannel[Any] = ClientChannel(self.context, self.address, SchedulerToApi, lambda: self.hello)
        self.handed: list[Any] = []
        self.strangers: list[zmq.Socket[bytes]] = []
        wait_until(self.turn, 60, "a welcome")

    def turn(self) -> bool:
        """One round; whether the true peer has a session."""
        self.client.tick()
        for identity, message in self.server.receive():
            if isinstance(message, Hello):
                welcome = Welcome("scheduler", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, "s", 1)
                self.server.welcome(identity, welcome)
            if not isinstance(message, Heartbeat):
                self.handed.append(message)
        self.client.receive()
        return self.client.connected

    def stranger(self, *frames: bytes) -> zmq.Socket[bytes]:
        """A connection of its own that sends these messages."""
        made = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.connect(self.address)
        self.strangers.append(made)
        for frame in frames:
            made.send(frame)
        return made

    def until(self, name: str, count: int) -> None:
        """Turn until a counter is there."""

        def there() -> bool:
            self.turn()
            return int(getattr(self.server.stats, name)) >= count

        wait_until(there, 60, f"{count} {name} of {self.server.stats}")

    def assert_undisturbed(self) -> None:
        """The true peer's session is the one that it was, and works."""
        assert len(self.server.peers) == 1 and self.client.connected
        before = len(self.handed)
        self.client.send(Abort(pack_u64([7])))

        def arrived() -> bool:
            self.turn()
            return len(self.handed) > before

        wait_until(arrived, 60, "the true peer's message")
        assert self.handed[before:] == [Abort(pack_u64([7]))] and self.client.connected

    def close(self) -> None:
        for one in self.strangers:
            one.close()
        self.client.close()
        self.server.close()
        self.context.term()


@pytest.fixture
def link(runtime_dir: Path) -> Iterator[Link]:
    made = Link(runtime_dir)
    yield made
    made.close()


def frame(message: Any, session: int = 1, sequence: int = 0) -> bytes:
    return struct.pack("<II", session, sequence) + msgspec.msgpack.encode(message)


def test_random_bytes_are_counted_and_logged_once(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(5)
    with caplog.at_level(logging.WARNING):
        link.stranger(*(rng.randbytes(rng.randrange(200)) for _ in range(300)))
        link.until("bad_frames", 300)
    assert len([record for record in caplog.records if "bad frame" in record.message]) == 1
    link.assert_undisturbed()


def test_truncated_frames_are_refused(link: Link) -> None:
    whole = frame(link.hello)
    link.stranger(*(whole[:size] for size in range(len(whole))))
    link.until("bad_frames", len(whole))
    link.assert_undisturbed()


def test_a_large_frame_from_a_peer_without_a_session_is_not_even_decoded(link: Link) -> None:
    large = frame(Abort(bytes(MAX_FIRST_FRAME_BYTES)))
    stranger = link.stranger(large)
    link.until("bad_frames", 1)
    assert stranger.poll(60_000)
    refused = wire.Codec[Any](SchedulerToApi).decode(stranger.recv())[2]
    assert isinstance(refused, Refused) and "without a session" in refused.message
    link.assert_undisturbed()


def test_bytes_that_are_no_zeromq_are_cut_off_and_counted(link: Link) -> None:
    for junk in (b"GET / HTTP/1.1\r\n\r\n", random.Random(6).randbytes(100), b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.connect(link.address.removeprefix("ipc://"))
            raw.sendall(junk)
            raw.shutdown(socket.SHUT_WR)
            wait_until(lambda: raw.recv(4096) == b"", 60, "the end of the connection")
    link.until("failed_handshakes", 3)
    link.assert_undisturbed()


@pytest.mark.parametrize(
    ("change", "code"), [({"version": 0}, wire.BAD_VERSION), ({"schema_digest": "0" * 16}, wire.BAD_DIGEST)]
)
def test_a_peer_of_another_build_is_refused_and_counted(link: Link, change: dict[str, Any], code: str) -> None:
    stranger = link.stranger(frame(msgspec.structs.replace(link.hello, instance=new_instance(), **change)))
    link.until("refused_hellos", 1)
    assert stranger.poll(60_000)
    assert wire.Codec[Any](SchedulerToApi).decode(stranger.recv())[2].code == code
    link.assert_undisturbed()


def test_a_captured_frame_that_is_sent_again_does_nothing_from_wherever_it_comes(link: Link) -> None:
    sent: list[bytes] = []
    true_send = link.client.socket.send

    def capture(data: Any, *options: Any) -> Any:
        sent.append(bytes(data))
        return true_send(data, *options)

    link.client.socket.send = capture  # type: ignore[method-assign,assignment]
    link.assert_undisturbed()
    link.client.socket.send = true_send  # type: ignore[method-assign]
    handed = list(link.handed)
    for one in sent:
        true_send(one)
    link.until("stale_frames", len(sent))
    link.stranger(*sent)
    link.until("stale_frames", 2 * len(sent))
    assert link.handed == handed, "neither was handed on"
    link.assert_undisturbed()


def test_a_captured_hello_opens_no_session_for_another_connection(link: Link) -> None:
    hello = frame(link.hello, session=link.client._session)
    stranger = link.stranger(hello)
    link.until("stale_frames", 1)
    assert stranger.poll(60_000)
    assert wire.Codec[Any](SchedulerToApi).decode(stranger.recv())[2].code == wire.REPLAYED
    link.assert_undisturbed()
