"""What strangers say to the sockets: bytes that are no frames, frames that are no messages, messages out of place.

All of it has to change nothing for anybody else; whether it is counted is shown by the tests of `protocol`.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import zmq

from protocol import wire
from protocol.messages import Abort, Control, Goodbye, Heartbeat, Hello, StepResult

LINKS = ("scheduler.sock", "runner.sock")
PATIENCE_MS = 200
LARGE = 4 << 20

Frames = Callable[[random.Random], list[list[bytes]]]


def throw(runtime_dir: Path, http_port: int, rng: random.Random) -> str:
    """Throw one kind of garbage at one socket; what it was. A socket that is away just now is not an error."""
    target = rng.choice((*LINKS, "http"))
    if target == "http":
        _raw(("127.0.0.1", http_port), rng.choice((rng.randbytes(300), b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/")))
        return "bytes to http"
    path = str(runtime_dir / target)
    if rng.random() < 0.3:
        _raw(path, rng.randbytes(rng.choice((1, 64, 5000))))
        return f"bytes to {target}"
    name = rng.choice(list(KINDS))
    _frames(path, KINDS[name](rng))
    return f"{name} to {target}"


def _raw(address: str | tuple[str, int], data: bytes) -> None:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(PATIENCE_MS / 1000)
        try:
            stranger.connect(address)
            stranger.sendall(data)
        except OSError:
            pass  # nobody listens just now, or it has hung up already


def _frames(path: str, messages: list[list[bytes]]) -> None:
    """Send from a DEALER of our own, and read until it has been silent for a while."""
    if not os.path.exists(path):
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, PATIENCE_MS)
        stranger.connect(f"ipc://{path}")
        for parts in messages:
            if stranger.poll(PATIENCE_MS, zmq.POLLOUT):
                stranger.send_multipart(parts, zmq.NOBLOCK)
        while stranger.poll(PATIENCE_MS):
            stranger.recv_multipart(zmq.NOBLOCK)
        stranger.close()
    finally:
        context.term()


def _encoded(message: object, session: int = 7, sequence: int = 0) -> bytes:
    codec: wire.Codec[object] = wire.Codec(Hello)
    return codec.encode(message, session, sequence)  # type: ignore[arg-type]


def _hello(**changes: object) -> bytes:
    fields = {"role": "api", "version": wire.PROTOCOL_VERSION, "schema_digest": wire.SCHEMA_DIGEST}
    return _encoded(Hello(**{**fields, "instance": secrets.token_hex(8), **changes}))  # type: ignore[arg-type]


def _of_a_session(rng: random.Random) -> list[list[bytes]]:
    """Well-formed messages from someone who never shook hands."""
    messages = (Abort(rng.randbytes(80)), Heartbeat(1), Goodbye("fenced", "go away"), Control(5, "pause", {}))
    return [[_encoded(message, session, 3)] for message in messages for session in (0, rng.getrandbits(31))]


def _twice(rng: random.Random) -> list[list[bytes]]:
    """A question asked once and sent again as it is, with the sequence number that it had."""
    hello = _hello(role="ctl")
    question = _encoded(Control(rng.getrandbits(60), "status", {}), 7, 0)
    return [[hello], [question], [question], [hello]]


KINDS: dict[str, Frames] = {
    "random frames": lambda rng: [[rng.randbytes(rng.choice((0, 1, 7, 8, 9, 200)))] for _ in range(5)],
    "many parts": lambda rng: [[rng.randbytes(20) for _ in range(50)]],
    "a large frame": lambda rng: [[bytes(LARGE)]],
    "a truncated hello": lambda rng: [[_hello()[: rng.randint(9, 30)]]],
    "an old version": lambda rng: [[_hello(version=0)], [_hello(version=0, role="scheduler")]],
    "another schema": lambda rng: [[_hello(schema_digest="0" * 16)], [_hello(schema_digest="", role="scheduler")]],
    "a wrong role": lambda rng: [[_hello(role="runner")], [_hello(role="")]],
    "messages without a session": _of_a_session,
    "a replayed message": _twice,
    "results from nobody": lambda rng: [[_encoded(StepResult(1, rng.getrandbits(40)), 9, 1)]],
}
