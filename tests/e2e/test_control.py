"""Operating a running chain: pause, drain, live changes, timelines, waiting deadlines and swap, by real processes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from harness import Response, Server, running_server, wait_until

from tests.e2e.kit import samples_of, wait_until_idle
from tests.e2e.operate import ctl, said

MODEL = "smollm2-135m-instruct"
PROMPTS = [f"{word} and so on" for word in ("red", "green", "blue", "black", "white", "grey", "pink", "brown")]


@pytest.fixture(scope="module")
def tight() -> Iterator[Server]:
    """A simulated model whose 22 blocks hold two of the tests' three long requests."""
    flags = ("--sim-step-ms", "2", "--sim-num-blocks", "23", "--sim-host-blocks", "32", "--sim-copy-gb-s", "1")
    with running_server("--backend", "sim", *flags) as server:
        yield server


@pytest.fixture(autouse=True)
def resumed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test orders, the next one finds the chain as it was started."""
    yield
    for name in {"tight", "simulated"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        ctl(server, "resume")
        ctl(server, "set", "queue_policy=fcfs", "max_num_seqs=256", "recovery_policy=recompute")
        wait_until_idle(server)


def complete(server: Server, prompt: str, name: str = "", **fields: Any) -> Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "seed": 7} | fields
    return server.request("POST", "/v1/completions", body, {"X-Request-Id": name} if name else None)


def text_of(answer: Response) -> str:
    assert answer.status == 200, answer.body
    text: str = answer.json()["choices"][0]["text"]
    return text


class Stream:
    """A streamed completion that is read chunk by chunk."""

    def __init__(self, server: Server, prompt: str, max_tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": 7}
        data = json.dumps(body | {"stream": True})
        self._connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        self.text = ""

    def read(self, chunks: int = 1 << 30) -> str:
        """Read that many chunks, or to the end; all text so far."""
        while chunks and (line := self._response.readline()):
            if line.startswith(b"data: {"):
                chunks -= 1
                self.text += json.loads(line[6:])["choices"][0]["text"]
        return self.text

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def test_pausing_new_lets_running_requests_go_on_and_holds_new_ones(simulated: Server) -> None:
    running = Stream(simulated, "first", 40_000)
    running.read(2)
    assert ctl(simulated, "pause", "new")["paused"] == "new"
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(complete, simulated, "second")
        wait_until(lambda: ctl(simulated, "status")["waiting"] == 1, 60, "a request that is held")
        running.read(100)
        assert not held.done()
        ctl(simulated, "resume")
        assert text_of(held.result())
    running.close()


def test_pausing_all_stops_the_steps_and_resuming_goes_on_with_the_next_token(simulated: Server) -> None:
    undisturbed = text_of(complete(simulated, "tell me", max_tokens=400))
    stream = Stream(simulated, "tell me", 400)
    stream.read(10)
    assert ctl(simulated, "pause", "all")["paused"] == "all"

    def steps() -> float:
        return samples_of(simulated)["triptych_runner_steps_total"]

    seen: list[float] = []

    def still() -> bool:
        seen.append(steps())
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    wait_until(still, 60, "the steps to stop")
    assert ctl(simulated, "status")["running"] == 1
    ctl(simulated, "resume")
    assert stream.read() == undisturbed and steps() > seen[-1]


def test_draining_refuses_new_requests_and_lets_the_others_end(simulated: Server) -> None:
    undisturbed = text_of(complete(simulated, "to the end", max_tokens=500))
    stream = Stream(simulated, "to the end", 500)
    stream.read(2)
    assert ctl(simulated, "drain")["draining"]
    refused = complete(simulated, "too late")
    assert refused.status == 503 and int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "draining"
    wait_until(lambda: simulated.request("GET", "/ready").status == 503, 60, "/ready to say so")
    assert stream.read() == undisturbed
    ctl(simulated, "resume")
    assert text_of(complete(simulated, "again"))


def test_policies_and_limits_change_under_load_without_losing_a_request_or_a_token(simulated: Server) -> None:
    undisturbed = [text_of(complete(simulated, prompt, max_tokens=300)) for prompt in PROMPTS]
    changes = [f"queue_policy={name}" for name in ("priority", "hrrn", "shortest-prefill", "random", "lof", "fair")]
    with ThreadPoolExecutor(16) as pool:
        answers: list[Future[Response]] = [
            pool.submit(complete, simulated, prompt, max_tokens=300) for prompt in PROMPTS * 2
        ]
        for number, change in enumerate(changes):
            found = ctl(simulated, "set", change, f"max_num_seqs={1 + number % 3}")
            assert found["strategies"]["queue"] == change.partition("=")[2]
        assert ctl(simulated, "set", "max_num_seqs=2")["settings"]["max_num_seqs"] == 2
        assert [text_of(answer.result()) for answer in answers] == undisturbed * 2


def test_a_change_that_is_wrong_in_one_point_changes_nothing(simulated: Server) -> None:
    before = ctl(simulated, "status")["settings"]
    with pytest.raises(AssertionError, match="invalid_argument"):
        ctl(simulated, "set", "max_bypasses=3", "queue_policy=astrology")
    assert ctl(simulated, "status")["settings"] == before


def crowd(server: Server, tag: str, **fields: Any) -> list[str]:
    """Three requests at once that don't fit together; the texts."""

    def one(number: int) -> str:
        return text_of(complete(server, PROMPTS[number], f"{tag}-{number}", max_tokens=150, **fields))

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, range(3)))


def assert_swapped(server: Server, tag: str) -> None:
    """Some of the crowd was preempted, and all that was came back from the host: nothing was computed again."""
    records = [ctl(server, "timeline", f"{tag}-{number}")["requests"][0] for number in range(3)]
    ways = {event["recovery"] for record in records for event in record["events"] if event["event"] == "preempted"}
    assert ways == {"swap"}, "the pool was too large for this test to say anything"
    assert [record["replayed_tokens"] for record in records] == [0, 0, 0]


def test_a_timeline_and_its_explanation_name_who_took_the_blocks_and_what_held_the_victim(tight: Server) -> None:
    crowd(tight, "a")
    found = {name: tight.request("GET", f"/v1/requests/{name}/timeline").json() for name in ("a-0", "a-1", "a-2")}
    numbers = {record["id"] for record in found.values()}
    victim = next(record for record in found.values() if record["preemptions"])
    (event,) = [event for event in victim["events"] if event["event"] == "preempted"][:1]
    assert event["by"] in numbers - {victim["id"]}
    assert found[event["by_label"]]["id"] == event["by"]
    assert victim["held_passes"]["blocks"] > 0 and victim["replayed_tokens"] > 0
    explanation = said(tight, "explain", f"cmpl-{victim['label']}")
    assert f"preempted for request {event['by']} ({event['by_label']})" in explanation
    assert "KV blocks were not free" in explanation
    assert f"{victim['replayed_tokens']} tokens had to be computed again" in explanation
    assert said(tight, "explain", victim["id"]) == explanation
    assert "preempted" in said(tight, "timeline", victim["label"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_is_a_503_streamed_or_not(tight: Server, stream: bool) -> None:
    ctl(tight, "pause", "all")
    late = complete(tight, "hello", timeout=0.3, stream=stream)
    assert late.status == 503 and int(late.headers["retry-after"]) > 0
    assert late.json()["error"]["code"] == "waiting_timeout"


def test_swapped_requests_go_on_as_if_nothing_had_happened(tight: Server) -> None:
    alone = [text_of(complete(tight, prompt, max_tokens=150)) for prompt in PROMPTS[:3]]
    ctl(tight, "set", "recovery_policy=swap")
    assert crowd(tight, "b") == alone
    assert_swapped(tight, "b")
    after = wait_until_idle(tight)
    assert not [name for name in after if name.startswith("triptych_runner_failed_steps_total{") and after[name]]


def test_resetting_the_prefix_cache_under_load_costs_time_and_no_token(simulated: Server) -> None:
    prompt = "word " * 200
    undisturbed = text_of(complete(simulated, prompt, max_tokens=300))
    stream = Stream(simulated, prompt, 300)
    stream.read(3)
    assert ctl(simulated, "reset-prefix-cache", "running=true")["forgotten"] > 0
    assert stream.read() == undisturbed


def test_the_real_model_says_the_same_when_it_is_swapped() -> None:
    flags = ("--dtype", "float32", "--num-blocks-override", "20", "--max-model-len", "300", "--num-threads", "1")
    with running_server(*flags, "--swap-space-bytes", str(256 << 20), "--recovery-policy", "swap") as server:
        alone = [text_of(complete(server, prompt, max_tokens=150, temperature=0)) for prompt in PROMPTS[:3]]
        assert crowd(server, "real", temperature=0) == alone
        assert_swapped(server, "real")
