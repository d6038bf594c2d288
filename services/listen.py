"""The listening socket of the HTTP server: bound here, or inherited from a parent that shares it among processes."""

from __future__ import annotations

import errno
import socket

from protocol.places import Place
from services.config import ApiConfig

BACKLOG = 4096
"""Connections that may wait to be accepted; the kernel cuts it to net.core.somaxconn."""

UNSENT_BYTES = 64 * 1024
"""What the kernel takes of one connection's data beyond what is on its way."""


class BindError(OSError):
    """The HTTP address can't be listened on; says which and why."""


def listen(config: ApiConfig) -> socket.socket:
    """The listening socket that `config` asks for. Raises BindError."""
    if config.listen_fd >= 0:
        return _inherited(config.listen_fd)
    if config.uds:
        return _listen_unix(config.uds)
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            where = f"port {config.port} on {config.host} is in use by another process"
            raise BindError(f"{where}; end that one or choose another --port") from None
        raise BindError(f"can't listen on {config.host}:{config.port}: {error.strerror or error}") from error
    # Accepted connections inherit these: the kernel drops a peer that is gone, or that takes no data for too long, and
    # keeps little for one that doesn't read, instead of the megabytes that its send buffer may grow to.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT") and config.write_timeout_s:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.write_timeout_s * 1000) + 1000)
    return listener


def _inherited(descriptor: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=descriptor)
        listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise BindError(f"can't listen on descriptor {descriptor}: {error.strerror or error}") from error
    if not listening:
        listener.close()
        raise BindError(f"can't listen on descriptor {descriptor}: it is not a listening socket")
    return listener


def _listen_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place = Place.claim(path)  # until it listens: then whoever comes sees that it does
        try:
            listener.bind(path)
            listener.listen(BACKLOG)
        finally:
            place.release()
    except OSError as error:
        listener.close()
        raise BindError(f"can't listen on {path}: {error}") from error
    return listener
