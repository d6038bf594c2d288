"""What a burst of requests leaves behind in the API process: nothing for each request, beyond what is bounded.

It counts objects, those of any kind that Python's allocator holds, and not bytes: how much of the memory goes back to
the system depends on where the last objects happen to lie.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from protocol.messages import Rejected
from services.journal import RecentCalls
from services.trim import FEW, MANY, Trimmer, malloc_trim
from tests.services.fake_scheduler import FakeScheduler, Record
from tests.services.service_kit import MODEL, MakeService, Service, connect

WaitUntil = Callable[..., Any]
CLIENTS, BURSTS = 200, 4
KINDS = ("served", "refused here", "refused by the scheduler", "gone")
KEPT = 50
"""Calls whose names are remembered."""


@pytest.fixture(scope="module")
def service(make_service: MakeService) -> Iterator[Service]:
    service = make_service()
    service.state.engine.recent = RecentCalls(KEPT)
    yield service
    service.close()


def scheduler_of(service: Service) -> FakeScheduler:
    assert service.scheduler is not None
    return service.scheduler


def prepare(service: Service, wait_until: WaitUntil, kind: str) -> None:
    """Let all requests end that way."""
    service.reset()
    scheduler = scheduler_of(service)
    if kind == "refused here":
        scheduler.report(queue_limit=1, queued=1)
        door = service.state.engine.door
        wait_until(lambda: door.refusal() is not None, 60, "the report")
    elif kind == "refused by the scheduler":
        scheduler.refuse = lambda s: Rejected(s.id, "queue_full", "full", 503, 1)
    elif kind == "gone":
        scheduler.call(lambda: setattr(scheduler, "held", True))


def burst(service: Service, number: int, kind: str) -> None:
    """Requests on as many connections at once, every second one streamed, until all have ended."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(service)) for _ in range(CLIENTS)]
        for index, client in enumerate(clients):
            asked = {"model": MODEL, "prompt": f"{number} {index}", "max_tokens": 3, "stream": bool(index % 2)}
            body = json.dumps(asked)
            lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", f"X-Request-Id: {number}-{index}"]
            head = "\r\n".join([*lines, f"Content-Length: {len(body)}"])
            client.sendall(f"{head}\r\n\r\n{body}".encode())
        engine, scheduler = service.state.engine, scheduler_of(service)
        if kind == "gone":
            scheduler.wait_for(lambda: len(scheduler.live) == CLIENTS, "all submits")
        else:
            for client in clients:
                answer = b""
                while more := client.recv(65536):
                    answer += more
                assert answer.split()[1] == (b"200" if kind == "served" else b"503")
    wait_until_over(service)
    assert not engine.calls and not engine.num_live() and engine.door.waiting == 0
    scheduler.call(lambda: setattr(scheduler, "record", Record()))


def wait_until_over(service: Service) -> None:
    scheduler, engine = scheduler_of(service), service.state.engine
    scheduler.wait_for(lambda: not scheduler.live and not engine.calls, "the end of all requests")
    scheduler.wait_for(lambda: service.server.num_connections == 0, "the end of all connections")


@pytest.mark.parametrize("kind", KINDS)
def test_no_object_stays_for_each_request_or_waits_for_a_collection(
    service: Service, wait_until: WaitUntil, kind: str
) -> None:
    """Cycles would wait: in a burst they add up, and the most memory that was ever needed is what stays."""
    prepare(service, wait_until, kind)
    counts, waited = [], 0
    for number in range(BURSTS):
        gc.collect()
        gc.disable()
        try:
            burst(service, number, kind)
            waited = gc.collect()
        finally:
            gc.enable()
        counts.append(sys.getallocatedblocks())
    assert waited < CLIENTS / 4
    assert counts[-1] - counts[1] < CLIENTS * (BURSTS - 2) / 2, f"objects after each burst: {counts}"


def test_memory_is_given_back_once_most_of_very_many_connections_are_gone() -> None:
    trimmed: list[int] = []
    trimmer = Trimmer(lambda: trimmed.append(1))
    for connections in (MANY - 1, 0, MANY, MANY // FEW + 1):
        trimmer.look(connections)
    assert not trimmed
    trimmer.look(MANY // FEW)
    assert len(trimmed) == 1
    for connections in (0, MANY - 1, 0):
        trimmer.look(connections)
    assert len(trimmed) == 1, "once for each time that there were very many"


def test_a_c_library_that_can_not_give_memory_back_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    malloc_trim()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    malloc_trim()
