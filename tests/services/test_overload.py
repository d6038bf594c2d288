"""More requests than the scheduler's queue takes: what this process knows will be refused there is refused here."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from protocol.messages import Rejected
from services.bodies import may_answer_unread
from tests.services.fake_scheduler import FakeScheduler
from tests.services.service_kit import MODEL, MakeService, Service, connect, stream_lines

WaitUntil = Callable[..., Any]
PATHS = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}}
COMPLETIONS = "/v1/completions"


def scheduler_of(service: Service) -> FakeScheduler:
    assert service.scheduler is not None
    return service.scheduler


def post(service: Service, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    return service.http.post(path, json={"model": MODEL, **PATHS[path], **fields})


def report(service: Service, wait_until: WaitUntil, **levels: int) -> None:
    """Let the scheduler say how full its queue is, and wait until the API has heard it."""
    scheduler_of(service).report(**levels)
    chain = service.state.engine.chain

    def heard() -> bool:
        return all(getattr(chain.status, name) == value for name, value in levels.items())

    wait_until(heard, 60, f"the API to hear {levels}")


def is_refused(response: httpx.Response) -> bool:
    if response.status_code == 200:
        return False
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "queue_full"
    return True


def read_answer(reader: Any) -> tuple[int, dict[bytes, bytes], bytes]:
    """One answer from a connection that stays open."""
    status = int(reader.readline().split()[1])
    headers = dict(line.rstrip().lower().split(b": ") for line in iter(reader.readline, b"\r\n"))
    return status, headers, reader.read(int(headers[b"content-length"]))


@pytest.fixture
def busy(service: Service, wait_until: WaitUntil) -> Service:
    """A service whose scheduler says that its queue is full: two requests, of other APIs, wait."""
    report(service, wait_until, queue_limit=2, queued=2)
    return service


# --- early ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_refuses_without_the_scheduler_and_without_tokenizing(
    busy: Service, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    def tokenize(*_: Any) -> Any:
        raise AssertionError("nothing is to be tokenized")

    monkeypatch.setattr(busy.tokenizer, "encode_many", tokenize)
    assert is_refused(post(busy, path, stream=stream))
    assert scheduler_of(busy).record.submits == []


def test_the_refusal_does_not_wait_for_the_body_and_the_connection_goes_on(busy: Service) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    with connect(busy) as client:
        reader = client.makefile("rb")
        client.sendall(head.encode() + b"{")
        status, headers, _ = read_answer(reader)
        assert status == 503 and b"retry-after" in headers
        client.sendall(b" " * 99999 + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(reader)[0] == 200


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked_so_that_the_connection_stays_in_step(
    busy: Service,
) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    with connect(busy) as client:
        reader = client.makefile("rb")
        for _ in range(2):
            client.sendall(head.encode())
            assert reader.readline() + reader.readline() == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(b"x" * 9)
            assert read_answer(reader)[0] == 503


@pytest.mark.parametrize(
    ("version", "header", "early"),
    [
        ("1.1", (b"host", b"x"), True),
        ("1.1", (b"connection", b"keep-alive"), True),
        ("1.1", (b"connection", b"Close"), False),
        ("1.1", (b"connection", b"x, close"), False),
        ("1.1", (b"expect", b"100-continue"), False),
        ("1.0", (b"host", b"x"), False),
    ],
)
def test_who_closes_after_sending_is_answered_after_the_body(
    version: str, header: tuple[bytes, bytes], early: bool
) -> None:
    """A close with unread data resets the connection, and the answer is lost."""
    assert may_answer_unread({"type": "http", "http_version": version, "headers": [header]}) is early


def test_a_body_that_was_answered_unread_and_never_ends_does_not_keep_its_connection(
    make_service: MakeService, wait_until: WaitUntil
) -> None:
    service = make_service(keep_alive_s=1)
    report(service, wait_until, queue_limit=2, queued=2)
    with connect(service) as client:
        client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n".encode())
        reader = client.makefile("rb")
        assert read_answer(reader)[0] == 503
        client.sendall(b"x")
        assert reader.read() == b"", "closed after the keep-alive time"
    service.close()


def test_what_is_not_generated_is_never_refused(busy: Service) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL}", "/version", "/load"):
        assert busy.http.get(path).status_code == 200
    assert busy.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert busy.http.post("/detokenize", json={"tokens": [5]}).status_code == 200


def test_a_refusal_here_is_counted_like_one_by_the_scheduler(service: Service, wait_until: WaitUntil) -> None:
    def counts() -> tuple[float, float]:
        registry, labels = service.state.metrics.registry, {"model_name": MODEL}
        answered = registry.get_sample_value(
            "triptych_api_requests_total", {**labels, "endpoint": COMPLETIONS, "status": "503"}
        )
        ended = registry.get_sample_value("triptych_api_requests_finished_total", {**labels, "finish_reason": "error"})
        return answered or 0.0, ended or 0.0

    before = counts()
    scheduler_of(service).refuse = lambda s: Rejected(s.id, "queue_full", "full", 503, 1)
    assert is_refused(post(service))
    there = counts()
    report(service, wait_until, queue_limit=2, queued=2)
    away = service.state.metrics.value("turned_away_total")
    assert is_refused(post(service))
    assert [b - a for a, b in zip(there, counts(), strict=True)] == [b - a for a, b in zip(before, there, strict=True)]
    assert service.state.metrics.value("turned_away_total") == away + 1


# --- not too much -----------------------------------------------------------------------------------------------------


def test_there_is_no_early_refusal_without_a_limit_or_with_room(service: Service, wait_until: WaitUntil) -> None:
    for levels in ({"queue_limit": 0, "queued": 999}, {"queue_limit": 2, "queued": 1}):
        report(service, wait_until, **levels)
        assert post(service).status_code == 200


def test_the_scheduler_says_itself_that_it_drains(busy: Service, wait_until: WaitUntil) -> None:
    report(busy, wait_until, draining=True)
    scheduler_of(busy).refuse = lambda s: Rejected(s.id, "draining", "draining", 503, 5)
    assert post(busy).json()["error"]["code"] == "draining"


@pytest.mark.parametrize("path", PATHS)
def test_only_who_is_more_urgent_than_all_that_wait_may_try_to_displace_one(
    busy: Service, wait_until: WaitUntil, path: str
) -> None:
    report(busy, wait_until, displaces=True, least_urgent=5)
    scheduler = scheduler_of(busy)
    assert is_refused(post(busy, path, priority=5)) and is_refused(post(busy, path, priority=6))
    assert scheduler.record.submits == []
    for fields in ({"priority": 4}, {"priority": -1}, {}):
        assert post(busy, path, **fields).status_code == 200
    report(busy, wait_until, displaces=True, least_urgent=-5)
    assert is_refused(post(busy, path))


def test_the_least_urgent_may_be_one_of_this_process_that_the_report_does_not_know_yet(
    busy: Service, wait_until: WaitUntil
) -> None:
    scheduler = scheduler_of(busy)
    scheduler.call(lambda: setattr(scheduler, "held", True))
    report(busy, wait_until, queued=1)
    waiting = send(busy, priority=9)
    scheduler.wait_for(lambda: len(scheduler.live) == 1, "the submit")
    report(busy, wait_until, queued=2, displaces=True, least_urgent=5)
    assert is_refused(post(busy, priority=9))
    answer = send(busy, priority=8)
    scheduler.wait_for(lambda: len(scheduler.live) == 2, "the more urgent one")
    waiting.close()
    answer.close()
    scheduler.wait_for(lambda: not scheduler.live, "the aborts")


# --- what this process counts itself ----------------------------------------------------------------------------------


def send(service: Service, **fields: Any) -> socket.socket:
    """Send a completion request and return its connection without reading."""
    body = json.dumps({"model": MODEL, "prompt": "x", **fields}).encode()
    client = connect(service)
    client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


@pytest.fixture
def unreported(service: Service, wait_until: WaitUntil) -> Iterator[Service]:
    """A scheduler that gives nobody a token and, from now on, doesn't say how full it is."""
    report(service, wait_until, queue_limit=3, queued=0)
    scheduler = scheduler_of(service)
    scheduler.call(lambda: setattr(scheduler, "reports", False))
    scheduler.call(lambda: setattr(scheduler, "held", True))
    yield service


def fill(service: Service) -> socket.socket:
    """Submit as many as the batch and the queue hold, before the scheduler reports any."""
    client = send(service, n=service.limits.max_num_seqs + 3)
    scheduler = scheduler_of(service)
    scheduler.wait_for(lambda: len(scheduler.live) == service.limits.max_num_seqs + 3, "all choices")
    return client


def test_what_is_submitted_fills_the_queue_before_the_scheduler_says_so(
    unreported: Service, wait_until: WaitUntil
) -> None:
    client = fill(unreported)
    submitted = len(scheduler_of(unreported).record.submits)
    assert is_refused(post(unreported))
    assert len(scheduler_of(unreported).record.submits) == submitted
    client.close()
    wait_until(lambda: unreported.state.engine.door.waiting == 0, 60, "the client to be gone")
    scheduler = scheduler_of(unreported)
    scheduler.call(lambda: setattr(scheduler, "held", False))
    assert post(unreported).status_code == 200, "and there is room again"


def test_a_first_token_makes_room(unreported: Service, wait_until: WaitUntil) -> None:
    client = fill(unreported)
    assert is_refused(post(unreported))
    scheduler = scheduler_of(unreported)
    scheduler.tokens_allowed = 1
    scheduler.call(lambda: setattr(scheduler, "held", False))
    wait_until(lambda: unreported.state.engine.door.waiting == 0, 60, "the first tokens")
    other = send(unreported)
    scheduler.wait_for(lambda: len(scheduler.live) == unreported.limits.max_num_seqs + 4, "one more")
    client.close()
    other.close()
    scheduler.wait_for(lambda: not scheduler.live, "the aborts")


def test_after_one_refusal_by_the_scheduler_the_next_is_refused_here_until_something_changes(
    unreported: Service, wait_until: WaitUntil
) -> None:
    scheduler = scheduler_of(unreported)
    running = send(unreported, stream=True, max_tokens=500, ignore_eos=True)
    scheduler.wait_for(lambda: len(scheduler.live) == 1, "the submit")
    scheduler.refuse = lambda s: Rejected(s.id, "queue_full", "full", 503, 1)
    assert is_refused(post(unreported)) and len(scheduler.record.submits) == 2
    assert is_refused(post(unreported)) and len(scheduler.record.submits) == 2
    scheduler.refuse = lambda s: None
    running.close()
    scheduler.wait_for(lambda: not scheduler.live, "the abort")
    scheduler.call(lambda: setattr(scheduler, "held", False))
    assert post(unreported).status_code == 200


# --- when the scheduler goes ------------------------------------------------------------------------------------------


def test_a_full_queue_that_is_gone_refuses_nobody_and_resubmissions_pass_a_full_one(
    make_service: MakeService, wait_until: WaitUntil
) -> None:
    service = make_service()
    scheduler = scheduler_of(service)
    scheduler.tokens_allowed = 2
    client = send(service, max_tokens=6, ignore_eos=True)
    scheduler.wait_for(lambda: any(live.count == 2 for live in scheduler.live.values()), "two tokens")
    report(service, wait_until, queue_limit=1, queued=1)
    assert is_refused(post(service))
    scheduler.stop()
    wait_until(lambda: not service.state.engine.chain.connected, 60, "the link to be down")
    second = send(service, max_tokens=6, ignore_eos=True)
    wait_until(lambda: service.state.engine.num_live() == 2, 60, "the second to wait for a scheduler")
    service.scheduler = successor = service.new_scheduler(epoch=2)
    successor.report(queue_limit=1, queued=1)
    for waiting in (client, second):
        status, _, body = read_answer(waiting.makefile("rb"))
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 6
        waiting.close()
    assert sorted(submit.resumed for submit in successor.record.submits) == [False, True]
    wait_until(lambda: is_refused(post(service)), 60, "the next report that it is full")
    successor.report(queued=0)
    assert stream_lines(service, COMPLETIONS, {"prompt": "y"})[-1] == "[DONE]"
    service.close()
