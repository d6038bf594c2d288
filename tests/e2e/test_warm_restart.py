"""A scheduler is killed and the runner is not: what it has computed is taken up again, all but the last block or so."""

from __future__ import annotations

import http.client
import json
import threading

import pytest
from harness import Server, running_server, wait_until

from tests.e2e.kit import samples_of, wait_until_idle
from tests.e2e.operate import ctl

BLOCK = 16
KILLS = 2
SIM = ("--backend", "sim", "--sim-step-ms", "5", "--sim-max-model-len", "4096")
MODEL = ("--dtype", "float32", "--num-threads", "1")
COMPUTED = "triptych_runner_tokens_computed_total"


class Stream:
    """A stream whose prompt no other one shares a block with, read in a thread."""

    def __init__(self, server: Server, number: int, prompt_tokens: int, max_tokens: int) -> None:
        self.name = f"stream-{number}"
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.tokens = 0
        self._port = server.port
        self._body = {
            "prompt": [1000 + number] * prompt_tokens,
            "max_tokens": max_tokens,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(self._body), {"X-Request-Id": self.name})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    self.tokens += len(choice["token_ids"] or ())
        connection.close()


def kill_scheduler(server: Server) -> None:
    former = server.children()["scheduler"]
    former.kill()
    wait_until(lambda: server.children().get("scheduler") not in (None, former), 60, "the next scheduler")


def resumption(server: Server, name: str) -> tuple[int, int]:
    """What a request had when it came to the present scheduler, and how much of it its first pass computed again."""
    (found,) = ctl(server, "timeline", name)["requests"]
    first = {event["event"]: event for event in reversed(found["events"])}
    known = found["prompt_tokens"] + first["arrived"]["emitted"]
    return known, known - first["admitted"]["cached"]


@pytest.mark.parametrize(
    ("flags", "streams", "step", "outputs"),
    [((*SIM, "--sim-num-blocks", "1000"), 24, 13, 500), (MODEL, 5, 23, 80)],
    ids=["sim with a pool that just holds them", "model"],
)
def test_with_an_intact_runner_a_resumed_request_computes_less_than_two_blocks_again(
    flags: tuple[str, ...], streams: int, step: int, outputs: int
) -> None:
    with running_server(*flags) as server:
        before = samples_of(server)[COMPUTED]
        running = [Stream(server, number, 4 + step * number, outputs) for number in range(streams)]
        for _ in range(KILLS):
            told = [stream.tokens for stream in running]
            wait_until(
                lambda told=told: all(s.tokens > n + 8 for s, n in zip(running, told, strict=True)), 60, "tokens"
            )
            kill_scheduler(server)
        for stream in running:
            stream.thread.join(60)
            assert stream.tokens == outputs
        found = [resumption(server, stream.name) for stream in running]
        assert all(known > stream.prompt_tokens for (known, _), stream in zip(found, running, strict=True))
        assert len({known % BLOCK for known, _ in found}) > 2, "resumed at different places in a block"
        assert max(again for _, again in found) < 2 * BLOCK
        # The runner's own count agrees: beyond what undisturbed streams compute, and the last step or two of each.
        needed = sum(stream.prompt_tokens + outputs - 1 for stream in running)
        assert wait_until_idle(server)[COMPUTED] - before - needed < KILLS * streams * 2 * BLOCK
