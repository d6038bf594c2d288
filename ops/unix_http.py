"""An HTTP connection over a unix socket, for the standard library's client."""

from __future__ import annotations

import http.client
import socket


class UnixConnection(http.client.HTTPConnection):
    """Connects to the socket at `path`; otherwise an HTTPConnection. Raises OSError where nobody answers."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
