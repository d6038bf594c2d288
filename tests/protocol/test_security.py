"""Links over TCP: keys let in who has them and nobody else, and an open door needs to be asked for."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness import running_command, wait_until

from protocol import wire
from protocol.channels import AddressError, ClientChannel, ServerChannel, new_instance
from protocol.messages import ApiToScheduler, Hello, SchedulerToApi, Welcome
from protocol.security import LinkKeys, LinkSecurity, SecurityError, is_loopback, write_keys

ANYWHERE = "tcp://127.0.0.1:*"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.term()


def secured(directory: Path, name: str = "key") -> LinkSecurity:
    return LinkSecurity(write_keys(str(directory / name)))


def connect(context: zmq.Context[Any], server: ServerChannel[Any], security: LinkSecurity) -> ClientChannel[Any]:
    hello = Hello("api", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, new_instance())
    return ClientChannel(context, server.bound_address, SchedulerToApi, lambda: hello, security=security)


def meet(server: ServerChannel[Any], client: ClientChannel[Any]) -> bool:
    """One round; whether the client has been welcomed."""
    client.tick()
    for identity, message in server.receive():
        if isinstance(message, Hello):
            server.welcome(identity, Welcome("scheduler", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, "s", 1))
    client.receive()
    return client.connected


def test_peers_with_the_same_key_speak_and_others_are_turned_away_and_counted(
    runtime_dir: Path, context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    ours = secured(runtime_dir)
    server: ServerChannel[Any] = ServerChannel(context, ANYWHERE, ApiToScheduler, security=ours)
    friend = connect(context, server, ours)
    foe = connect(context, server, secured(runtime_dir, "other"))
    bare = connect(context, server, LinkSecurity())
    try:
        wait_until(lambda: meet(server, friend), 60, "a welcome")

        def turned_away() -> bool:
            assert not meet(server, foe) and not meet(server, bare)
            return server.stats.failed_handshakes >= 2

        wait_until(turned_away, 60, "both to be counted")
        assert friend.connected and server.stats.bad_frames == 0
        assert ours.keys is not None and ours.keys.secret.decode() not in caplog.text + repr(ours)
    finally:
        for channel in (friend, foe, bare, server):
            channel.close()


def test_who_has_the_public_key_alone_is_not_let_in(runtime_dir: Path, context: zmq.Context[Any]) -> None:
    ours = secured(runtime_dir)
    assert ours.keys is not None
    server: ServerChannel[Any] = ServerChannel(context, ANYWHERE, ApiToScheduler, security=ours)
    public, secret = zmq.curve_keypair()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = ours.keys.public, public, secret
        stranger.connect(server.bound_address)
        stranger.send(b"let me in")

        def refused() -> bool:
            assert server.receive() == []
            return server.stats.failed_handshakes > 0

        wait_until(refused, 60, "a refusal")
        assert server.stats.bad_frames == 0
    finally:
        stranger.close()
        server.close()


def test_an_address_that_others_reach_needs_a_key_or_consent(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AddressError, match="keygen.*--allow-insecure-bind"):
        ServerChannel(context, "tcp://0.0.0.0:*", ApiToScheduler)
    with caplog.at_level(logging.WARNING):
        ServerChannel(
            context, "tcp://0.0.0.0:*", ApiToScheduler, security=LinkSecurity(allow_insecure_bind=True)
        ).close()
    assert "no key is configured" in caplog.text


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://localhost:*", True),
        ("tcp://[::1]:1", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://eth0:1", False),
        ("tcp://10.0.0.1:1", False),
    ],
)
def test_only_loopback_addresses_are_local(address: str, local: bool) -> None:
    assert is_loopback(address) is local


def test_keygen_writes_a_file_for_its_owner_alone_and_never_overwrites_one(runtime_dir: Path) -> None:
    path = runtime_dir / "key"
    with running_command("keygen", str(path)) as made:
        assert made.wait() == 0
        keys = LinkKeys.load(str(path))
        assert keys.public.decode() in made.log() and keys.secret.decode() not in made.log()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with running_command("keygen", str(path)) as again:
        assert again.wait() == 1 and "File exists" in again.log()
    assert LinkKeys.load(str(path)) == keys


def test_a_key_file_that_cannot_be_used_says_why(runtime_dir: Path) -> None:
    path = runtime_dir / "key"
    with pytest.raises(SecurityError, match="No such file"):
        LinkKeys.load(str(path))
    write_keys(str(path))
    os.chmod(path, 0o644)
    with pytest.raises(SecurityError, match="chmod 600"):
        LinkKeys.load(str(path))
    for content, why in ((b"one-line", "two lines"), (b"a\nb\n", "belong together")):
        path.write_bytes(content)
        os.chmod(path, 0o600)
        with pytest.raises(SecurityError, match=why):
            LinkKeys.load(str(path))
