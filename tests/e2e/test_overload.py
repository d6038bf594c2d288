"""Far more clients at once than may wait: whoever is above the limit hears so, everyone else gets everything."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Server, running_server, wait_until

from ops.bench.overload import Burst, allow_connections, burst, peak_bytes
from tests.e2e.kit import samples_of, wait_until_idle
from tests.e2e.operate import ctl

CLIENTS, QUEUE, RUNNING, TOKENS = 500, 64, 8, 24
TURNED_AWAY = "triptych_api_turned_away_total"
REJECTED = "triptych_scheduler_requests_rejected_total{reason=queue_full}"
GENERATED = "triptych_scheduler_generated_tokens_total"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--sim-step-ms", "5", "--max-num-seqs", str(RUNNING), "--max-num-queued-reqs", str(QUEUE))
    with running_server("--backend", "sim", *flags) as started:
        yield started


def asking(server: Server, **fields: Any) -> socket.socket:
    """A connection on which a completion of `TOKENS` tokens was asked for."""
    content = json.dumps({"prompt": "x", "max_tokens": TOKENS, "ignore_eos": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(head.encode() + content)
    return client


def answer_on(client: socket.socket) -> bytes:
    """A whole answer with a length, however it was cut on its way."""
    answer = b""
    while more := client.recv(65536):
        answer += more
        head, end, body = answer.partition(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        if end and len(body) >= int(length.partition(b":")[2]):
            break
    return answer


def a_burst(server: Server, clients: int = CLIENTS) -> Burst:
    assert allow_connections(clients) == clients, "this machine lets a process open too few files"
    return asyncio.run(burst("127.0.0.1", server.port, clients, TOKENS))


def test_above_the_limit_clients_get_503_with_retry_after_and_all_others_a_whole_answer(server: Server) -> None:
    before = wait_until_idle(server)
    seen = a_burst(server)
    assert seen.faults(TOKENS) == []
    served, refused = len(seen.of(200)), len(seen.of(503))
    assert served + refused == CLIENTS and served >= QUEUE and refused > 0
    after = wait_until_idle(server)
    assert after[GENERATED] - before[GENERATED] == served * TOKENS, "no token that nobody got"
    here, there = (after.get(name, 0.0) - before.get(name, 0.0) for name in (TURNED_AWAY, REJECTED))
    assert here > 0 and here + there == refused, "the API refuses what it knows the scheduler would refuse"


def test_overload_leaves_no_memory_behind(server: Server) -> None:
    api = server.children()["api"].pid
    for _ in range(2):
        a_burst(server)
    before = peak_bytes(api)
    for _ in range(6):
        a_burst(server)
    assert peak_bytes(api) - before < 6 * 2**20, "less than 2 KiB for each of 3,000 clients"


def test_no_token_is_made_for_clients_that_left_the_queue(server: Server) -> None:
    before = wait_until_idle(server)
    ctl(server, "pause")
    try:
        clients = [asking(server) for _ in range(QUEUE)]
        wait_until(lambda: ctl(server, "status")["waiting"] == QUEUE, 60, "a full queue")
        refused = server.request("POST", "/v1/completions", {"prompt": "x"})
        assert refused.status == 503 and refused.json()["error"]["code"] == "queue_full"
        for client in clients:
            client.close()
        wait_until(lambda: ctl(server, "status")["waiting"] == 0, 60, "an empty queue")
    finally:
        ctl(server, "resume")
    assert wait_until_idle(server)[GENERATED] == before[GENERATED]
    assert len(a_burst(server, QUEUE // 2).of(200)) == QUEUE // 2, "and there is room again"


def test_only_the_more_urgent_get_through_to_a_full_queue_and_each_displaces_one() -> None:
    flags = ("--queue-policy", "priority", "--max-num-queued-reqs", "2", "--max-num-seqs", "1")
    with running_server("--backend", "sim", "--sim-step-ms", "5", *flags) as server:
        ctl(server, "pause")
        waiting = []
        for count in (1, 2):
            waiting.append(asking(server, priority=5, max_tokens=1))
            wait_until(lambda count=count: ctl(server, "status")["waiting"] == count, 60, "its place in the queue")

        def turned_away() -> bool:
            before = samples_of(server)[TURNED_AWAY]
            answer = server.request("POST", "/v1/completions", {"prompt": "x", "priority": 5})
            assert answer.status == 503 and answer.json()["error"]["code"] == "queue_full"
            return samples_of(server)[TURNED_AWAY] > before

        wait_until(turned_away, 60, "the API to know that the queue is full")
        urgent = asking(server, priority=4, max_tokens=1)
        displaced = answer_on(waiting[1])
        assert displaced.startswith(b"HTTP/1.1 503 ") and b'"displaced"' in displaced
        ctl(server, "resume")
        for client in (waiting[0], urgent):
            assert answer_on(client).startswith(b"HTTP/1.1 200 ")
            client.close()
