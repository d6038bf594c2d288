"""The three processes together: disconnects, bad requests, deaths and the metrics that tell of them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import stat
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from harness import Server, running_server, wait_until

from tests.e2e.kit import client_of, samples_of, wait_until_idle

MODEL = "smollm2-135m-instruct"


def open_stream(server: Server, **body: object) -> http.client.HTTPConnection:
    """A request whose response is being streamed (or awaited); nothing has been read of it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sent = {"model": MODEL, "prompt": "x", "max_tokens": 40_000, "ignore_eos": True, "stream": True} | body
    connection.request("POST", "/v1/completions", json.dumps(sent), {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted_long_before_its_answer_would_end(simulated: Server, stream: bool) -> None:
    connections = [open_stream(simulated, stream=stream) for _ in range(5)]
    wait_until(lambda: samples_of(simulated)["triptych_scheduler_requests_running"] == 5, 60, "five running requests")
    for connection in connections:
        connection.close()
    wait_until(lambda: samples_of(simulated)["triptych_scheduler_requests_running"] == 0, 20, "their end")
    wait_until_idle(simulated)


def test_two_hundred_clients_that_leave_at_once_leak_nothing(simulated: Server) -> None:
    aborted = "triptych_scheduler_requests_finished_total{reason=aborted}"
    before = wait_until_idle(simulated).get(aborted, 0)
    connections = [open_stream(simulated, n=2) for _ in range(200)]
    wait_until(lambda: samples_of(simulated)["triptych_scheduler_requests_running"] > 100, 60, "a crowd")
    for connection in connections:
        connection.close()
    after = wait_until_idle(simulated)
    assert after[aborted] - before == 400


BAD_BODIES: list[dict[str, object]] = [
    {"temperature": "hot"},
    {"max_tokens": 0},
    {"prompt": [1, 2, 49_152]},
    {"stop_token_ids": [999_999], "min_tokens": 1},
    {"logit_bias": {"-1": 1}},
    {"top_p": 0},
    {"n": 0},
    {"prompt": "\ud83d"},
    {"model": "nope"},
]


def test_bad_requests_disturb_no_stream(simulated: Server) -> None:
    def whole() -> str:
        params = {"model": MODEL, "prompt": "steady", "max_tokens": 400, "seed": 5}
        return client_of(simulated).completions.create(**params).choices[0].text  # type: ignore[call-overload,no-any-return]

    undisturbed = whole()
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(whole) for _ in range(3)]
        for body in BAD_BODIES:
            reply = simulated.request("POST", "/v1/completions", {"model": MODEL, "prompt": "x"} | body)
            assert reply.status in (400, 404), body
            assert reply.json()["error"]["message"]
        assert {stream.result() for stream in streams} == {undisturbed}
    wait_until_idle(simulated)


def test_metrics_are_one_series_each_and_counters_only_grow(simulated: Server) -> None:
    first = samples_of(simulated)
    client_of(simulated).completions.create(model=MODEL, prompt="count", max_tokens=20)
    second = wait_until_idle(simulated)
    for name, value in first.items():
        if name.split("{")[0].endswith(("_total", "_count", "_bucket")):
            assert second[name] >= value, name
    roles = {name.split("_")[1] for name in second if name.startswith("triptych_")}
    assert roles == {"api", "scheduler", "runner"}
    made = "triptych_scheduler_generated_tokens_total"
    wait_until(lambda: samples_of(simulated)[made] >= first[made] + 20, 60, "the tokens to be counted")


def test_only_the_http_port_listens_and_sockets_are_private(simulated: Server) -> None:
    for role, child in (*simulated.children().items(), ("supervisor", psutil.Process(simulated.pid))):
        ports = {c.laddr.port for c in child.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        assert ports == ({simulated.port} if role in ("api", "supervisor") else set()), role
        for connection in child.net_connections("unix"):
            path = str(connection.laddr)
            if path.startswith("/"):
                assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, path


@pytest.mark.parametrize("role", ["scheduler", "runner"])
def test_health_tells_of_a_dead_process_and_streams_survive_its_return(simulated: Server, role: str) -> None:
    params = {"model": MODEL, "prompt": "survive", "max_tokens": 1000, "seed": 3}
    completions = client_of(simulated).completions
    undisturbed = completions.create(**params).choices[0].text
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(lambda: "".join(c.choices[0].text for c in completions.create(**params, stream=True)))
        whole = pool.submit(lambda: completions.create(**params).choices[0].text)
        wait_until(lambda: samples_of(simulated)["triptych_scheduler_requests_running"] == 2, 60, "both to run")
        simulated.children()[role].send_signal(signal.SIGKILL)
        assert stream.result(90) == undisturbed
        assert whole.result(90) == undisturbed
    wait_until(lambda: simulated.request("GET", "/health").status == 200, 60, "health")
    wait_until_idle(simulated)


def test_health_is_503_while_a_process_hangs_and_200_afterwards() -> None:
    with running_server("--backend", "sim", "--sim-step-ms", "2", "--runner-silence-s", "2") as server:
        for role in ("scheduler", "runner"):
            child = server.children()[role]
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: server.request("GET", "/health").status == 503, 60, "the hang to be seen")
            assert server.request("GET", "/health").json()["reason"]
            child.send_signal(signal.SIGCONT)
            wait_until(lambda: server.request("GET", "/health").status == 200, 60, "the recovery to be seen")
