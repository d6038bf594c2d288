"""Many streamed chat answers at once over raw sockets, read as fast as they come and only counted, never parsed.

It works with any OpenAI-compatible server whose answer is made of `space_words` alone: then each token is one space,
and each event has one space and one `[` beside it, however the bytes are split among reads.
"""

from __future__ import annotations

import errno
import json
import re
import select
import socket
import time
from collections.abc import Callable

READ_BYTES = 256 * 1024
HEAD_END = b"\r\n\r\n"
WORD = re.compile(rb" [A-Za-z]+\Z")


class StreamFailed(Exception):
    """A server that can't be reached, or a stream that isn't what was asked for; the message says what came."""


def space_words(token_bytes: Callable[[int], bytes], vocab_size: int, most: int = 4096) -> list[int]:
    """Ids of tokens that are a space and then letters: their number in a stream of JSON can be counted."""
    found = [token for token in range(vocab_size) if WORD.match(token_bytes(token))]
    return found[:: max(1, len(found) // most)][:most]


class Stream:
    """What has arrived of one answer."""

    __slots__ = ("ended", "head", "reads", "socket", "spaces", "starts", "tail")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.head: bytes | None = b""  # None once it is complete
        self.spaces = self.starts = self.reads = 0
        self.tail = b""
        self.ended = False

    def take(self, data: bytes) -> None:
        """Count what is new. StreamFailed if the answer is no stream."""
        self.reads += 1
        if self.head is not None:
            self.head += data
            head, end, data = self.head.partition(HEAD_END)
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 200 "):
                raise StreamFailed(f"a stream was refused: {self.head[:500].decode('utf-8', 'replace')}")
            self.head = None
        self.spaces += data.count(b" ")
        self.starts += data.count(b"[")
        self.tail = (self.tail + data)[-32:]
        self.ended = self.tail.endswith(b"\r\n0\r\n\r\n")

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self.spaces - self.starts

    @property
    def events(self) -> int:
        """Events so far, the end marker among them."""
        return self.starts


class Streams:
    """`count` streams to one server, and how many tokens and events all of them have had. `close` closes them."""

    def __init__(self, host: str, port: int, model: str, count: int, max_tokens: int) -> None:
        body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": "Hi"}],
                "stream": True,
                "ignore_eos": True,
                "max_tokens": max_tokens,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
        self._address = (host, port)
        self._epoll = select.epoll()
        self._by_fd: dict[int, Stream] = {}
        self.tokens = self.events = 0
        for _ in range(count):
            self._open()

    def _open(self) -> None:
        connection = socket.create_connection(self._address, timeout=10.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._request)
        connection.setblocking(False)
        self._by_fd[connection.fileno()] = Stream(connection)
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    @property
    def all(self) -> list[Stream]:
        """Every stream."""
        return list(self._by_fd.values())

    def watch(self, descriptor: int) -> None:
        """Let `read` also return when this descriptor is readable."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def read(self, timeout_s: float, arrivals: list[float] | None = None) -> None:
        """Take in what has arrived, once per stream. Times of arrival (perf_counter) are appended to `arrivals`."""
        for descriptor, _ in self._epoll.poll(timeout_s):
            stream = self._by_fd.get(descriptor)
            if stream is None:
                continue
            try:
                data = stream.socket.recv(READ_BYTES)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    continue
                raise StreamFailed(f"a stream broke: {error}") from error
            if arrivals is not None:
                arrivals.append(time.perf_counter())
            if not data:
                raise StreamFailed(f"a stream was closed after {stream.tokens} tokens")
            tokens, events = stream.tokens, stream.events
            stream.take(data)
            self.tokens += stream.tokens - tokens
            self.events += stream.events - events

    def close(self) -> None:
        """Close every connection."""
        for stream in self._by_fd.values():
            stream.socket.close()
        self._epoll.close()
