"""Several API processes behind one port: one dies and the others notice nothing; every one of them speaks for all."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import Server, running_server, wait_until
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.operate import ctl, runtime_dir_of

SIM = ("--backend", "sim", "--sim-step-ms", "5", "--sim-max-model-len", "50000", "--sim-num-blocks", "20000")
COMPLETION = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
TOKENS = 600


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Three API processes; a dead one's lease ends soon. Those who kill some come last."""
    with running_server(*SIM, "--api-processes", "3", "--lease-s", "3", "--restart-backoff-s", "0.1") as started:
        wait_until(lambda: len(apis(started)) == 3, 60, "three API processes")
        yield started


def apis(server: Server) -> dict[int, psutil.Process]:
    """The live API processes by number."""
    found = {}
    for child in psutil.Process(server.pid).children():
        try:
            number = int(child.environ().get("TRIPTYCH_PROCESS_NUMBER", "0"))
        except psutil.Error:
            continue  # it has just ended
        if number and child.status() != psutil.STATUS_ZOMBIE:
            found[number] = child
    return found


def record(server: Server, label: str) -> dict[str, Any]:
    """What the scheduler knows of the one request with this label."""
    (found,) = ctl(server, "timeline", label)["requests"]
    assert isinstance(found, dict)
    return found


class Stream:
    """A streamed completion, read in a thread."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps({**COMPLETION, "max_tokens": TOKENS, "stream": True, "return_token_ids": True})
        self._connection.request("POST", "/v1/completions", body, {"X-Request-Id": name})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.text = b""
        self.broken = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while more := self._answer.read1(65536):
                self.text += more
        except (OSError, http.client.HTTPException):
            self.broken = True

    def join(self) -> None:
        """Wait for its end, good or bad."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def whole(self) -> bool:
        """Whether every token and one `[DONE]` has come."""
        lines = [line[6:] for line in self.text.split(b"\n") if line.startswith(b"data: {")]
        count = sum(len(choice["token_ids"] or ()) for line in lines for choice in json.loads(line)["choices"])
        return count == TOKENS and self.text.count(b"data: [DONE]") == 1


def load_of(server: Server) -> dict[str, int]:
    found: dict[str, int] = server.request("GET", "/load").json()["by_process"]
    return found


def streams_on_several(server: Server) -> list[Stream]:
    """Streams until at least two processes have some."""
    streams: list[Stream] = []

    def spread() -> bool:
        streams.extend([Stream(server, f"stream-{len(streams) + n}") for n in range(4)])
        assert len(streams) < 200, load_of(server)
        return sum(count > 0 for count in load_of(server).values()) >= 2

    wait_until(spread, 60, "streams on two processes")
    return streams


def test_a_stopped_process_is_killed_and_started_again_and_the_others_streams_go_on() -> None:
    with running_server(*SIM, "--api-processes", "2", "--hang-timeout-s", "2", "--lease-s", "3") as server:
        wait_until(lambda: len(apis(server)) == 2 and len(load_of(server)) == 2, 60, "two API processes")
        streams = streams_on_several(server)
        stopped = apis(server)[1]
        stopped.suspend()
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda _: server.request("POST", "/v1/completions", COMPLETION).status, range(16))
            assert list(answers) == [200] * 16, "the other one accepts"
        wait_until(lambda: "api-1 hangs (no sign of life for 2 s), killing it" in server.log(), 60, "the hang's end")
        for stream in streams:
            stream.join()
        broken = [stream for stream in streams if stream.broken]
        assert all(stream.broken or stream.whole for stream in streams) and 0 < len(broken) < len(streams)
        wait_until(lambda: apis(server).get(1) not in (None, stopped), 60, "the process's return")
        wait_until(lambda: set(load_of(server)) == {"1", "2"}, 60, "its answer")
        for stream in broken:
            assert record(server, stream.name)["status"] == "ABORTED"


def totals(server: Server) -> dict[str, float]:
    """Completions answered, by process, as one scrape of whichever process says."""
    text = server.request("GET", "/metrics").body.decode()
    return {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "triptych_api_generation_tokens_total"
    }


def test_every_scrape_counts_what_all_processes_did(server: Server) -> None:
    wait_until(lambda: set(load_of(server)) == {"1", "2", "3"}, 60, "all three to answer")
    before = sum(totals(server).values())
    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda _: server.request("POST", "/v1/completions", COMPLETION).status, range(60)))
    assert statuses == [200] * 60
    for _ in range(12):
        found = totals(server)
        assert set(found) == {"1", "2", "3"}
        assert sum(found.values()) - before == 60 * COMPLETION["max_tokens"]  # type: ignore[operator]


def test_a_timeline_is_found_whichever_process_is_asked(server: Server) -> None:
    answer = server.request("POST", "/v1/completions", COMPLETION, {"X-Request-Id": "mine"})
    name = answer.json()["id"]
    asked: set[Any] = set()
    for _ in range(12):
        for known_as in (name, "mine"):
            found = server.request("GET", f"/v1/requests/{known_as}/timeline")
            assert found.status == 200
            asked.add(found.json()["id"])
    assert len(asked) == 1


def test_request_ids_tell_their_process(server: Server) -> None:
    for number in range(40):
        assert server.request("POST", "/v1/completions", COMPLETION, {"X-Request-Id": f"id-{number}"}).status == 200
    ids = [int(record(server, f"id-{number}")["id"]) for number in range(40)]
    assert len(set(ids)) == 40 and {one >> 56 for one in ids} <= {1, 2, 3}


def test_a_killed_process_takes_only_its_own_streams_with_it_and_comes_back(server: Server) -> None:
    streams = streams_on_several(server)
    victim, held = max(load_of(server).items(), key=lambda item: item[1])
    apis(server)[int(victim)].send_signal(signal.SIGKILL)
    for stream in streams:
        stream.join()
    broken = [stream for stream in streams if not stream.whole]
    assert len(broken) == held and all(stream.broken for stream in broken)
    for stream in broken:
        wait_until(lambda name=stream.name: record(server, name)["status"] == "ABORTED", 60, "its requests' abort")
    wait_until(lambda: set(apis(server)) == {1, 2, 3}, 60, "the process's return")
    wait_until(lambda: set(load_of(server)) == {"1", "2", "3"}, 60, "its answer")
    assert server.request("POST", "/v1/completions", COMPLETION).status == 200


def test_clients_wait_while_all_api_processes_are_dead(server: Server) -> None:
    dead = apis(server)
    for process in dead.values():
        process.send_signal(signal.SIGKILL)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.request("POST", "/v1/completions", COMPLETION).status, range(8)))
    assert answers == [200] * 8, "none was refused a connection"
    assert not {process.pid for process in dead.values()} & {process.pid for process in apis(server).values()}


def test_stopping_lets_streams_of_all_processes_end_and_leaves_nothing(server: Server) -> None:
    wait_until(lambda: set(load_of(server)) == {"1", "2", "3"}, 60, "all three to answer")
    streams = [Stream(server, f"last-{number}") for number in range(6)]
    place = runtime_dir_of(server)
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        stream.join()
    assert server.wait() == 0
    assert all(stream.text.count(b"data: [DONE]") == 1 for stream in streams), "whole, or ended with an error event"
    server.assert_no_orphans()
    assert not os.path.exists(place)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port))


def test_several_processes_share_a_unix_socket_too(runtime_dir: Path) -> None:
    path = str(runtime_dir / "http.sock")
    with running_server(*SIM, "--api-processes", "2", "--uds", path, ready=False) as server:
        server.wait_for_log("Ctrl-C ends it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(path)
            client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        assert server.stop() == 0
    assert not os.path.exists(path)
