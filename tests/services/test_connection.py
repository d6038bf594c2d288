"""What a connection may do to the server: pipeline, lag behind, never read, never ask."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.services.fake_scheduler import FakeScheduler
from tests.services.service_kit import MODEL, MakeService, Service, connect, stream_lines

WaitUntil = Callable[..., Any]
COMPLETIONS = "/v1/completions"


def request(path: str = COMPLETIONS, **fields: Any) -> bytes:
    """A whole request as it goes over the wire."""
    body = json.dumps({"model": MODEL, "prompt": "x", **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    answer = b""
    while more := client.recv(65536):
        answer += more
    return answer


def scheduler_of(service: Service) -> FakeScheduler:
    assert service.scheduler is not None
    return service.scheduler


# --- pipelining ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_pipelined_request_is_not_read_and_the_connection_closes_after_the_answer(
    service: Service, in_pieces: bool
) -> None:
    scheduler = scheduler_of(service)
    scheduler.held = True
    both = request() + request(max_tokens=2)
    with connect(service) as client:
        if in_pieces:
            client.sendall(request())
            scheduler.wait_for(lambda: len(scheduler.live) == 1, "the first request")
            for start in range(len(request()), len(both), 7):
                client.sendall(both[start : start + 7])
        else:
            client.sendall(both)
            scheduler.wait_for(lambda: len(scheduler.live) == 1, "the first request")
        scheduler.held = False
        answer = read_all(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head.lower()
    assert json.loads(body)["choices"][0]["finish_reason"] == "stop", "one whole answer and nothing after it"
    assert len(scheduler.record.submits) == 1


def test_a_client_that_pipelines_and_leaves_is_noticed(service: Service) -> None:
    scheduler = scheduler_of(service)
    scheduler.held = True
    with connect(service) as client:
        client.sendall(request() * 3)
        scheduler.wait_for(lambda: len(scheduler.live) == 1, "the first request")
    scheduler.wait_for(lambda: len(scheduler.record.aborted) == 1 and not scheduler.live, "the abort")
    assert service.state.engine.num_live() == 0


def test_what_is_pipelined_is_not_kept(service: Service) -> None:
    scheduler = scheduler_of(service)
    scheduler.held = True
    with connect(service) as client:
        client.sendall(request())
        scheduler.wait_for(lambda: len(scheduler.live) == 1, "the first request")
        for _ in range(64):  # more than the sockets between would hold if nobody read
            client.sendall(b"x" * 2**20)
        scheduler.held = False
        client.shutdown(socket.SHUT_WR)
    scheduler.wait_for(lambda: not scheduler.live, "the end")
    assert len(scheduler.record.submits) == 1


def test_requests_one_after_another_share_a_connection(service: Service) -> None:
    with connect(service) as client:
        reader = client.makefile("rb")
        for _ in range(3):
            client.sendall(request())
            assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = dict(line.lower().split(b": ") for line in iter(reader.readline, b"\r\n"))
            assert b"connection" not in headers
            assert json.loads(reader.read(int(headers[b"content-length"])))["choices"]


# --- reading too slowly, or never ---------------------------------------------------------------------------------


def stuck(service: Service, body: bytes, receive_buffer: int = 1) -> socket.socket:
    """A client with a small receive buffer (1: the smallest), which sends a request and reads nothing."""
    unix = bool(service.config.uds)
    client = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # before connecting: it decides the window
    host, _, port = service.address.removeprefix("http://").partition(":")
    client.connect(service.config.uds if unix else (host, int(port)))
    client.settimeout(60)
    client.sendall(body)
    return client


def limited(make_service: MakeService, tmp_path: Path, kind: str, **settings: Any) -> Service:
    """A service that waits half a second for readers and has much to say."""
    service = make_service(write_timeout_s=0.5, uds=str(tmp_path / "http.sock") if kind == "unix" else "", **settings)
    scheduler_of(service).top = [(token, -0.5) for token in range(1000, 1020)]
    return service


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_reader_that_is_stuck_is_cut_off_and_its_request_aborted(
    make_service: MakeService, wait_until: WaitUntil, tmp_path: Path, kind: str
) -> None:
    service = limited(make_service, tmp_path, kind)
    scheduler = scheduler_of(service)
    service.answer = [5] * 10_000_000
    client = stuck(service, request(stream=True, n=8, logprobs=20, max_tokens=2000, ignore_eos=True))
    scheduler.wait_for(lambda: len(scheduler.record.submits) == 8, "the submits")
    scheduler.wait_for(lambda: any(live.count > 20 for live in scheduler.live.values()), "some tokens")
    metrics = service.state.metrics
    wait_until(lambda: metrics.value("write_timeouts_total") == 1, 60, "the client to be cut off")
    wait_until(lambda: not service.state.engine.calls, 60, "the call to be released")
    assert not read_all(client).endswith(b"0\r\n\r\n"), "what was on its way may come, but no proper end"
    client.close()
    service.close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_complete_but_unread_does_not_stay(
    make_service: MakeService, wait_until: WaitUntil, tmp_path: Path, kind: str, stream: bool
) -> None:
    """The handler has long returned: only the connection knows that somebody has to read yet."""
    service = limited(make_service, tmp_path, kind)
    service.answer = [5] * 300
    client = stuck(service, request(stream=stream, n=8, logprobs=20, max_tokens=250))
    metrics = service.state.metrics
    wait_until(lambda: metrics.value("write_timeouts_total") == 1, 60, "the client to be cut off")
    wait_until(lambda: not service.state.engine.calls, 60, "the call to be released")
    client.close()
    service.close()


def test_a_slow_reader_gets_everything_and_slows_nobody(make_service: MakeService, tmp_path: Path) -> None:
    service = limited(make_service, tmp_path, "tcp")
    scheduler = scheduler_of(service)
    service.answer = [5] * 10_000
    client = stuck(service, request(stream=True, logprobs=20, max_tokens=400, ignore_eos=True), 32 * 1024)
    scheduler.wait_for(lambda: len(scheduler.record.submits) == 1, "the submit")
    assert stream_lines(service, COMPLETIONS, {"prompt": "y", "max_tokens": 4})[-1] == "[DONE]", "others go on"
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        answer += client.recv(4096)
    assert answer.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]" in answer
    assert service.state.metrics.value("write_timeouts_total") == 0
    client.close()
    service.close()


def test_while_readers_are_stuck_each_token_of_the_others_comes_as_soon_as_it_is_made(
    service: Service, wait_until: WaitUntil
) -> None:
    scheduler = scheduler_of(service)
    scheduler.top = [(token, -0.5) for token in range(1000, 1020)]
    service.answer = [5] * 10_000
    ask = request(stream=True, n=8, logprobs=20, max_tokens=300, ignore_eos=True)
    lagging = [stuck(service, ask) for _ in range(4)]
    scheduler.wait_for(lambda: len(scheduler.record.submits) == 32 and not scheduler.live, "the end of all choices")
    with connect(service) as client:
        scheduler.tokens_allowed = 0
        client.sendall(request(stream=True, return_token_ids=True, max_tokens=20, ignore_eos=True))
        reader = client.makefile("rb")
        seen = 0
        for allowed in range(1, 21):
            scheduler.call(lambda allowed=allowed: setattr(scheduler, "tokens_allowed", allowed))
            while seen < allowed:
                line = reader.readline()
                if line.startswith(b"data: {"):
                    seen += sum(len(choice["token_ids"] or ()) for choice in json.loads(line[6:])["choices"])
            assert seen == allowed
    assert len(service.state.engine.calls) >= 4, "all that time nobody read the other answers"
    for one in lagging:
        one.close()
    wait_until(lambda: not service.state.engine.calls, 60, "the calls to be released")


def test_tokens_for_a_reader_that_lags_wait_as_tokens_and_not_as_text(service: Service, wait_until: WaitUntil) -> None:
    """While a client doesn't read, the server holds the transport's buffer, one message and up to max_tokens ids."""
    scheduler = scheduler_of(service)
    scheduler.top = [(token, -0.5) for token in range(1000, 1020)]
    service.answer = [5] * 10_000
    client = stuck(service, request(stream=True, n=8, logprobs=20, max_tokens=1000, ignore_eos=True))
    scheduler.wait_for(lambda: len(scheduler.record.submits) == 8 and not scheduler.live, "the end of all choices")
    (call,) = service.state.engine.calls
    wait_until(lambda: all(generation.over for generation in call.generations), 60, "all tokens to be here")
    assert [len(generation.tokens) for generation in call.generations] == [1000] * 8
    client.close()
    wait_until(lambda: not service.state.engine.calls, 60, "the call to be released")


# --- asking nothing -----------------------------------------------------------------------------------------------


def test_a_connection_that_never_asks_is_closed(make_service: MakeService) -> None:
    service = make_service(keep_alive_s=1)
    with connect(service) as client:
        assert client.recv(1) == b""
    service.close()


def test_the_number_of_open_connections_is_exported(service: Service, wait_until: WaitUntil) -> None:
    def connections() -> float:
        return service.state.metrics.value("connections")

    before = connections()
    with connect(service), connect(service):
        wait_until(lambda: connections() == before + 2, 60, "both connections")
    wait_until(lambda: connections() == before, 60, "their end")


@pytest.mark.parametrize("part", [b"GET /vers", b"GET /version HTTP/1.1\r\nHost"])
def test_a_connection_whose_request_stops_coming_is_closed(make_service: MakeService, part: bytes) -> None:
    service = make_service(keep_alive_s=1)
    with connect(service) as client:
        client.sendall(part)
        assert client.recv(1) == b""
    service.close()


# --- what never becomes a request ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
    ],
)
def test_what_is_no_http_is_answered_like_every_error(service: Service, sent: bytes) -> None:
    with connect(service) as client:
        client.sendall(sent)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"])
def test_headers_without_an_end_are_refused(service: Service, begin: bytes) -> None:
    piece = b"X: y\r\n" * 10_000 if begin.endswith(b"\n") else b"x" * 60_000
    with connect(service) as client, pytest.raises(OSError):
        client.sendall(begin)
        for _ in range(1000):
            client.sendall(piece)
    with connect(service) as client:
        client.sendall(begin + (piece * 5)[: 256 * 1024 + 1 - len(begin)])
        assert client.recv(65536).startswith(b"HTTP/1.1 431 ")
    with connect(service) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: " + b"y" * 200_000 + b"\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 OK")
