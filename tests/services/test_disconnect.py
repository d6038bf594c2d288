"""A client that goes away frees what it asked for: in every state, streamed or not."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.services.fake_scheduler import FakeScheduler
from tests.services.service_kit import MODEL, MakeService, Service, connect, stream_lines

MESSAGES = [{"role": "user", "content": "x"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": "x", "max_tokens": None, "max_output_tokens": 500},
}


def send(service: Service, path: str, **fields: Any) -> socket.socket:
    """Send a request and return its connection without reading."""
    body = json.dumps({"model": MODEL, "max_tokens": 500, "ignore_eos": True, **PATHS[path], **fields}).encode()
    client = connect(service)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def aborted(scheduler: FakeScheduler, count: int = 1) -> Callable[[], bool]:
    return lambda: (
        len(scheduler.record.submits) == count
        and {s.id for s in scheduler.record.submits} == set(scheduler.record.aborted)
        and not scheduler.live
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["not accepted", "queued", "running"])
@pytest.mark.parametrize("half", [False, True])
def test_a_disconnect_aborts_the_request(service: Service, path: str, stream: bool, state: str, half: bool) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.accept = state != "not accepted"
    scheduler.tokens_allowed = 3 if state == "running" else 0
    before = service.state.metrics.value("client_disconnects_total")
    client = send(service, path, stream=stream)
    scheduler.wait_for(lambda: len(scheduler.live) == 1, "the submit")
    if state == "running":
        scheduler.wait_for(lambda: all(live.count == 3 for live in scheduler.live.values()), "three tokens")
        if stream:
            assert b"200 OK" in client.recv(65536)
    if half:
        client.shutdown(socket.SHUT_WR)
    else:
        client.close()
    scheduler.wait_for(aborted(scheduler), "the abort")
    client.close()
    assert service.state.engine.num_live() == 0
    assert service.state.metrics.value("client_disconnects_total") >= before
    assert scheduler.record.aborted == [scheduler.record.submits[0].id]


def test_all_choices_of_a_request_are_aborted(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.held = True
    client = send(service, "/v1/completions", prompt=["a", "b"], n=4)
    scheduler.wait_for(lambda: len(scheduler.live) == 8, "the submits")
    client.close()
    scheduler.wait_for(aborted(scheduler, 8), "the aborts")


def test_many_disconnects_at_once_leave_nothing_behind(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 2
    clients = [send(service, "/v1/completions", stream=bool(i % 2)) for i in range(50)]
    scheduler.wait_for(lambda: len(scheduler.live) == 50, "the submits")
    for client in clients:
        client.close()
    scheduler.wait_for(aborted(scheduler, 50), "the aborts")
    assert service.state.engine.num_live() == 0
    scheduler.call(lambda: setattr(scheduler, "tokens_allowed", 1000))
    assert stream_lines(service, "/v1/completions", {"prompt": "x"})[-1] == "[DONE]"


def test_a_request_is_not_submitted_later_if_its_client_left_while_the_scheduler_was_away(
    make_service: MakeService, wait_until: Callable[..., Any]
) -> None:
    service = make_service()
    assert service.scheduler is not None
    service.scheduler.stop()
    client = send(service, "/v1/completions")
    wait_until(lambda: service.state.engine.num_live() == 1, 60, "the request to wait")
    client.close()
    wait_until(lambda: service.state.engine.num_live() == 0, 60, "the request to be dropped")
    service.scheduler = scheduler = service.new_scheduler(epoch=2)
    assert stream_lines(service, "/v1/completions", {"prompt": "y"})[-1] == "[DONE]"
    assert len(scheduler.record.submits) == 1
    service.close()
