"""An HTTP server for tests of the load generator: it answers whatever raw bytes a test sends. Not a test module."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[["Exchange"], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Exchange:
    """One request as the fake server got it, and raw bytes as its answer."""

    def __init__(self, head: str, body: bytes, connection: int, writer: asyncio.StreamWriter) -> None:
        self.head, self.body, self.connection, self._writer = head, body, connection, writer
        self.path = head.split(" ", 2)[1]

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """A keep-alive HTTP server whose answers are the handler's raw bytes. Yields its base URL."""
    connections = 0

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        mine = connections
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                await handler(Exchange(head, body, mine, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve_connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


def run(handler: Handler, use: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        async with server(handler) as url, asyncio.timeout(60):
            await use(url)

    asyncio.run(main())


def sse(*events: dict[str, object] | str) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, str) else json.dumps(e)).encode() + b"\n\n" for e in events)


def usage(body: dict[str, object]) -> dict[str, object]:
    """A usage chunk that agrees with what a request asked for."""
    prompt = body.get("prompt") or body["messages"][0]["content"].split()
    return {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}}


async def openai_like(exchange: Exchange) -> None:
    """A well-behaved server: a model list, and streams of one chunk per token."""
    if exchange.path == "/v1/models":
        body = b'{"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}'
        await exchange.send(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return
    body = json.loads(exchange.body)
    await exchange.send(CHUNKED)
    chat = exchange.path == "/v1/chat/completions"
    if chat:
        await exchange.chunk(sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    for index in range(body["max_tokens"]):
        finish = "length" if index == body["max_tokens"] - 1 else None
        choice = {"delta": {"content": " x"}} if chat else {"text": " x"}
        await exchange.chunk(sse({"choices": [choice | {"finish_reason": finish}]}))
    await exchange.chunk(sse(usage(body), "[DONE]"))
    await exchange.send(b"0\r\n\r\n")
