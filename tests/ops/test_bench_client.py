"""The load generator's HTTP client over real sockets: framing, keep-alive, every way an exchange can fail."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ops.bench.http_client import BadResponse, ConnectFailed, ConnectionDropped, HttpClient
from tests.ops.http_kit import CHUNKED, OK, Exchange, run


def test_chunked_bodies_reach_the_sink_whole_whatever_the_segments() -> None:
    payload = b"data: one\n\ndata: two\n\n"

    async def bytewise(exchange: Exchange) -> None:
        for byte in CHUNKED + b"%x;ext=1\r\n%s\r\n0\r\nTrailer: t\r\n\r\n" % (len(payload), payload):
            await exchange.send(bytes([byte]))

    async def use(url: str) -> None:
        got: list[bytes] = []
        client = HttpClient(url)
        for _ in range(2):  # the second one proves that the first left the connection clean
            response = await client.request("POST", "/x", b"{}", sink=lambda body, now: got.append(body))
            assert (response.status, response.body) == (200, b"")
        assert b"".join(got) == payload * 2
        client.close()

    run(bytewise, use)


def test_connections_are_reused_one_after_another_and_doubled_for_parallel_requests() -> None:
    both = asyncio.Barrier(2)
    seen: list[int] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange.connection)
        if exchange.path == "/parallel":
            await both.wait()
        await exchange.send(OK + b"Content-Length: 2\r\n\r\nok")

    async def use(url: str) -> None:
        client = HttpClient(url)
        for _ in range(3):
            assert (await client.request("GET", "/one")).body == b"ok"
        assert seen == [1, 1, 1]
        await asyncio.gather(client.request("GET", "/parallel"), client.request("GET", "/parallel"))
        assert sorted(seen[3:]) == [1, 2]
        client.close()

    run(handler, use)


def test_a_connection_closed_while_idle_is_replaced_without_an_error() -> None:
    seen: list[int] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange.connection)
        if exchange.path == "/dies" and exchange.connection == 1:
            exchange.close()  # gone without an answer, as a server's keep-alive timeout does
            return
        await exchange.send(OK + b"Content-Length: 2\r\n\r\nok")

    async def use(url: str) -> None:
        client = HttpClient(url)
        await client.request("GET", "/")
        assert (await client.request("GET", "/dies")).body == b"ok"
        assert seen == [1, 1, 2]
        client.close()

    run(handler, use)


@pytest.mark.parametrize(
    ("answer", "error", "kind"),
    [
        (b"", ConnectionDropped, "dropped"),
        (OK + b"Content-Length: 10\r\n\r\nabc", ConnectionDropped, "dropped"),
        (CHUNKED + b"5\r\nab", ConnectionDropped, "dropped"),
        (OK + b"Content-Le", ConnectionDropped, "dropped"),
        (b"SSH-2.0-OpenSSH\r\n", BadResponse, "protocol"),
        (CHUNKED + b"zz\r\n", BadResponse, "protocol"),
    ],
)
def test_broken_answers_raise_with_the_kind_that_a_report_counts_by(
    answer: bytes, error: type[Exception], kind: str
) -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.send(answer)
        exchange.close()

    async def use(url: str) -> None:
        with pytest.raises(error) as caught:
            await HttpClient(url).request("GET", "/")
        assert caught.value.kind == kind

    run(handler, use)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.send(OK + b"Connection: close\r\n\r\nall of it")
        exchange.close()

    async def use(url: str) -> None:
        assert (await HttpClient(url).request("GET", "/")).body == b"all of it"

    run(handler, use)


def test_a_refused_connection_and_a_wrong_address_say_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connecting is refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1"):
            asyncio.run(HttpClient(url).request("GET", "/"))
    for wrong in ("ftp://x", "127.0.0.1:8000", ""):
        with pytest.raises(ValueError, match="http"):
            HttpClient(wrong)
