"""Far more clients at once than may wait: whoever is above the limit hears so, everyone else gets everything."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest
from harness import Server, running_server, wait_until

from ops.bench.overload import Burst, allow_connections, burst, resident_bytes
from tests.e2e.kit import wait_until_idle
from tests.e2e.operate import ctl

CLIENTS, QUEUE, RUNNING, TOKENS = 500, 64, 8, 24
GENERATED = "triptych_scheduler_generated_tokens_total"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--sim-step-ms", "5", "--max-num-seqs", str(RUNNING), "--max-num-queued-reqs", str(QUEUE))
    with running_server("--backend", "sim", *flags) as started:
        yield started


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


def test_overload_leaves_no_memory_behind(server: Server) -> None:
    api = server.children()["api"].pid
    a_burst(server)
    before = resident_bytes(api)
    for _ in range(3):
        a_burst(server)
    assert resident_bytes(api) - before < 32 * 2**20, "less than 22 KiB for each of 1,500 clients"


def test_no_token_is_made_for_clients_that_left_the_queue(server: Server) -> None:
    before = wait_until_idle(server)
    ctl(server, "pause")
    try:
        content = json.dumps({"prompt": "x", "max_tokens": TOKENS, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(QUEUE)]
        for client in clients:
            client.sendall(head + content)
        wait_until(lambda: ctl(server, "status")["waiting"] == QUEUE, 20, "a full queue")
        refused = server.request("POST", "/v1/completions", json.loads(content))
        assert refused.status == 503 and refused.json()["error"]["code"] == "queue_full"
        for client in clients:
            client.close()
        wait_until(lambda: ctl(server, "status")["waiting"] == 0, 20, "an empty queue")
    finally:
        ctl(server, "resume")
    assert wait_until_idle(server)[GENERATED] == before[GENERATED]
    assert len(a_burst(server, QUEUE // 2).of(200)) == QUEUE // 2, "and there is room again"
