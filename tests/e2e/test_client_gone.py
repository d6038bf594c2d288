"""A client that leaves ends its request, whatever state that is in: real sockets, a real scheduler, a simulated model.

The API runs in this process, connected to the scheduler of a running server, so that a test can hold it while it
tokenizes and can ask for a grammar, for which the HTTP API has no field.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import Server, running_server, wait_until

from services.config import ApiConfig
from services.journal import Call
from services.routes import endpoint
from services.text.tokenizer import load_tokenizer
from tests.e2e.kit import Samples, samples_of, wait_until_idle
from tests.e2e.operate import ctl, runtime_dir_of
from tests.services.service_kit import Service, connect

names = (f"leaver-{number}" for number in count())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two slots, 1,008 tokens of KV, 20 ms a step of at most 16 tokens, grammars that take 30 s."""
    flags = ("--backend", "sim", "--sim-step-ms", "20", "--sim-num-blocks", "64", "--sim-grammar-ms", "30000")
    limits = ("--preset", "vllm", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")
    with running_server(*flags, *limits) as started:
        yield started


@pytest.fixture(scope="module")
def api(server: Server, real_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An API in this process, connected to the server's scheduler."""
    directory = tmp_path_factory.mktemp("run")
    directory.chmod(0o700)
    config = ApiConfig(
        model=str(real_model_path),
        port=0,
        runtime_dir=str(directory),
        scheduler_address=f"ipc://{runtime_dir_of(server)}/scheduler.sock",
        log_interval_s=0.0,
    )
    service = Service(config, load_tokenizer(real_model_path), [], scheduler=False)
    wait_until(lambda: service.http.get("/ready").status_code == 200, 60, "the API")
    yield service
    service.close()


class Client:
    """A request on a connection of its own, and what the scheduler knows of it."""

    def __init__(self, api: Service, server: Server, *, prompt: int | str = 4, **fields: Any) -> None:
        self.name = next(names)
        self._server = server
        self.socket = connect(api)
        if isinstance(prompt, int):
            fields["prompt"] = [100 + n % 1000 for n in range(prompt)]
        content = {"prompt": prompt, "max_tokens": 500, "ignore_eos": True, **fields}
        body = json.dumps(content).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {self.name}\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def records(self) -> list[dict[str, Any]]:
        """The scheduler's records of its choices; none before they have arrived."""
        try:
            found = ctl(self._server, "timeline", self.name)
        except AssertionError:
            return []
        records: list[dict[str, Any]] = found.get("requests", [found])
        return records

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        """Wait until the scheduler's records are so."""
        wait_until(lambda: (records := self.records()) and condition(records), 60, what)


def has(*statuses: str, tokens: Callable[[int], bool] = lambda _: True) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda records: (
        sorted(record["status"] for record in records) == sorted(statuses)
        and all(tokens(record["output_tokens"]) for record in records)
    )


def waiting(api: Service, server: Server, others: list[Client]) -> Client:
    others += [Client(api, server), Client(api, server)]
    for other in others:
        other.wait_for(has("RUNNING"), "both slots to be taken")
    client = Client(api, server)
    client.wait_for(has("WAITING"), "the queue")
    return client


def waiting_for_grammar(api: Service, server: Server, others: list[Client]) -> Client:
    build = endpoint.build_params

    def with_grammar(*arguments: Any, **named: Any) -> Any:
        return msgspec.structs.replace(build(*arguments, **named), grammar="json_schema:{}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "build_params", with_grammar)
        client = Client(api, server)
        client.wait_for(has("WAITING_FOR_GRAMMAR"), "the compiler")
    return client


def in_prefill(api: Service, server: Server, others: list[Client]) -> Client:
    client = Client(api, server, prompt=900, stream=True, max_tokens=50)
    client.wait_for(has("RUNNING", tokens=lambda n: n == 0), "the prefill")
    return client


def in_decode(api: Service, server: Server, others: list[Client]) -> Client:
    client = Client(api, server, stream=True)
    client.wait_for(has("RUNNING", tokens=lambda n: n > 0), "tokens")
    return client


def whole_answer(api: Service, server: Server, others: list[Client]) -> Client:
    client = Client(api, server)
    client.wait_for(has("RUNNING", tokens=lambda n: n > 0), "tokens")
    return client


def preempted(api: Service, server: Server, others: list[Client]) -> Client:
    others.append(Client(api, server, prompt=470))
    others[0].wait_for(has("RUNNING"), "the first")
    client = Client(api, server, prompt=470, stream=True)
    client.wait_for(has("PREEMPTED"), "the pool to be full")
    return client


def between_choices(api: Service, server: Server, others: list[Client]) -> Client:
    client = Client(api, server, n=4, max_tokens=20, stream=True)
    client.wait_for(has("LENGTH", "LENGTH", "RUNNING", "RUNNING"), "half of the choices")
    return client


STATES = {
    waiting: 1,
    waiting_for_grammar: 1,
    in_prefill: 1,
    in_decode: 1,
    whole_answer: 1,
    preempted: 1,
    between_choices: 2,
}
"""How to bring a client there, and how many requests of its own the scheduler has to end then."""


def aborted(seen: Samples) -> float:
    return seen.get("triptych_scheduler_requests_finished_total{reason=aborted}", 0.0)


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half closed"])
@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_a_client_that_leaves_ends_its_request(
    server: Server, api: Service, reach: Callable[..., Client], half: bool
) -> None:
    before = aborted(wait_until_idle(server))
    others: list[Client] = []
    client = reach(api, server, others)
    if half:
        client.socket.shutdown(socket.SHUT_WR)
    else:
        client.socket.close()
    ended = STATES[reach]
    client.wait_for(lambda all_: sum(one["status"] == "ABORTED" for one in all_) == ended, "the abort")
    wait_until(lambda: aborted(samples_of(server)) >= before + ended, 60, "the scheduler's count")
    assert aborted(samples_of(server)) == before + ended, "and nobody else's"
    for other in [client, *others]:
        other.socket.close()
    assert aborted(wait_until_idle(server)) == before + ended + len(others)
    assert api.state.engine.num_live() == 0


def test_a_client_that_leaves_while_its_prompt_is_tokenized_never_reaches_the_scheduler(
    server: Server, api: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = wait_until_idle(server)
    working, go_on = threading.Event(), threading.Event()
    encode = api.tokenizer.encode_many

    def slowly(*arguments: Any) -> Any:
        working.set()
        assert go_on.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(api.tokenizer, "encode_many", slowly)
    disconnect, noticed = Call.disconnect, threading.Event()

    def noted(call: Call) -> None:
        disconnect(call)
        noticed.set()

    monkeypatch.setattr(Call, "disconnect", noted)
    client = Client(api, server, prompt="word " * 500)
    assert working.wait(60), "a long prompt is tokenized in a thread"
    client.socket.close()
    assert noticed.wait(60)
    gone = api.state.metrics.value("client_disconnects_total")
    go_on.set()
    wait_until(lambda: api.state.metrics.value("client_disconnects_total") > gone, 60, "the disconnect")
    assert (
        samples_of(server)["triptych_scheduler_requests_accepted_total"]
        == (before["triptych_scheduler_requests_accepted_total"])
    )
