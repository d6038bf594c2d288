"""Who may join a link over TCP: a CURVE key pair that all processes of one deployment share, or an explicit consent.

Unix sockets need none of this: they lie in a directory that only their user can enter.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
import threading
from dataclasses import dataclass, field
from typing import Any, Self

import zmq
import zmq.utils.z85

log = logging.getLogger("triptych.link")

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_KEY_CHARS = 40


class SecurityError(ValueError):
    """A key file that can't be used, or an address that would be open to strangers; says what to do."""


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """A CURVE key pair (Z85 texts of 40 characters). Whoever has the same pair is let in, nobody else."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, path: str) -> Self:
        """Read a file that `triptych keygen` wrote. SecurityError if it is no such file, or if others may read it."""
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                public, secret = file.read(4096).split()
        except OSError as error:
            raise SecurityError(f"key file {path}: {error.strerror}") from error
        except ValueError:
            raise SecurityError(f"key file {path}: expected two lines, as `triptych keygen` writes them") from None
        if stat.S_IMODE(mode) & 0o077:
            raise SecurityError(f"key file {path} has mode {stat.S_IMODE(mode):04o}, expected 0600 (chmod 600 {path})")
        if len(secret) != _KEY_CHARS or zmq.curve_public(secret) != public:
            raise SecurityError(f"key file {path}: the two keys don't belong together")
        return cls(public, secret)


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """What a process's links ask of their peers over TCP."""

    keys: LinkKeys | None = None
    allow_insecure_bind: bool = False

    @classmethod
    def of(cls, curve_key_file: str, allow_insecure_bind: bool = False) -> Self:
        """From the settings. SecurityError if the key file can't be used."""
        return cls(LinkKeys.load(curve_key_file) if curve_key_file else None, allow_insecure_bind)

    def guard_server(self, context: zmq.Context[Any], socket: zmq.Socket[bytes], address: str) -> None:
        """Before a bind: let in only peers with the same keys. SecurityError for an open door that nobody asked for."""
        if not address.startswith("tcp://"):
            return
        if self.keys is not None:
            _serve_zap(context, self.keys.public)
            socket.curve_server = True
            socket.curve_secretkey = self.keys.secret
            return
        if is_loopback(address):
            return
        if not self.allow_insecure_bind:
            raise SecurityError(
                f"{address}: whoever reaches this port could command this process; give both sides a key "
                "(triptych keygen FILE; --curve-key-file FILE), or say --allow-insecure-bind on a private network"
            )
        log.warning("%s: open to everyone who reaches it: no key is configured", address)

    def guard_client(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Before a connect: show the keys, and speak only to who has the same."""
        if self.keys is not None and address.startswith("tcp://"):
            socket.curve_serverkey = self.keys.public
            socket.curve_publickey = self.keys.public
            socket.curve_secretkey = self.keys.secret


OPEN = LinkSecurity()


def is_loopback(address: str) -> bool:
    """Whether a tcp address can be reached from this machine only."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a wildcard, an interface or a name


def write_keys(path: str) -> LinkKeys:
    """Make a key pair and write it to a new file that only its owner can read. OSError if the file exists."""
    public, secret = zmq.curve_keypair()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(public + b"\n" + secret + b"\n")
    return LinkKeys(public, secret)


def _serve_zap(context: zmq.Context[Any], public: bytes) -> None:
    """Answer ZeroMQ's question, asked once for each new connection in this context, whether its key is ours."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(_ZAP_ADDRESS)
    except zmq.ZMQError:
        socket.close()
        return  # another server of this context has begun to
    threading.Thread(target=_answer_zap, args=(socket, public), name="link-keys", daemon=True).start()


def _answer_zap(socket: zmq.Socket[bytes], public: bytes) -> None:
    expected = zmq.utils.z85.decode(public)
    try:
        while True:
            # version, request id, domain, address, identity, mechanism, credentials
            version, number, _, address, _, mechanism, *credentials = socket.recv_multipart()
            known = mechanism == b"CURVE" and credentials == [expected]
            if not known:
                log.warning("a peer at %s has no key of ours: turned away", address.decode("ascii", "replace"))
            status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
            socket.send_multipart([version, number, *status, b"", b""])
    except zmq.ContextTerminated:
        pass
    except zmq.ZMQError as error:
        log.error("keys can't be checked any more; nobody new is let in: %s", error)
    finally:
        socket.close()
