"""The running servers as an outside client sees them: two addresses from the environment. Standard library only.

The clients live in environments of their own, where nothing of this project is installed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
PARIS = "The capital of France is Paris."
QUESTION = "What is the capital of France?"
USER: list[Any] = [{"role": "user", "content": QUESTION}]
KEY = "right-key"
ENVIRONMENTS = Path(os.environ.get("CONFORMANCE_ENVIRONMENTS", ".venv-conformance"))
# An unreachable proxy and hub: what a client would fetch from elsewhere fails at once, and is seen.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_REFUSALS = re.compile(r"triptych_api_turned_away_total|triptych_scheduler_requests_rejected_total")


@dataclass(frozen=True)
class Place:
    """A server: `port` of 127.0.0.1, and the key that it wants."""

    port: int
    key: str = "none"

    @property
    def root(self) -> str:
        """Where Anthropic's clients begin."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base(self) -> str:
        """Where OpenAI's clients begin."""
        return f"{self.root}/v1"

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.key}"})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def refused(self) -> float:
        """How many requests found the queue full so far."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {self.key}"})
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if _REFUSALS.match(line))

    def live(self) -> tuple[int, int]:
        """How many requests run and how many wait."""
        load = self.get("/load")
        return load["running"], load["waiting"]


def wait_until(predicate: Callable[[], Any], what: str, deadline_s: float = 30) -> None:
    """Returns when the predicate holds; AssertionError naming `what` if that takes longer than `deadline_s`."""
    pause, end = threading.Event(), time.monotonic() + deadline_s
    while not predicate():
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        pause.wait(0.02)


@contextlib.contextmanager
def full(narrow: Place) -> Iterator[Callable[[], None]]:
    """The narrow server with its one place and its one waiting place taken; yields what frees both.

    They are free, too, when the block has ended.
    """
    holds: list[http.client.HTTPConnection] = []

    def release() -> None:
        while holds:
            holds.pop().close()

    try:
        for number in (1, 2):
            connection = http.client.HTTPConnection("127.0.0.1", narrow.port, timeout=30)
            holds.append(connection)
            body = {"prompt": "hold", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            head = {"Authorization": f"Bearer {narrow.key}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            wait_until(lambda number=number: sum(narrow.live()) == number, "the narrow server to be full")
        yield release
    finally:
        release()
        wait_until(lambda: narrow.live() == (0, 0), "the narrow server to be idle")


@contextlib.contextmanager
def full_until_refused(narrow: Place) -> Iterator[None]:
    """The narrow server is full until it has refused somebody, and then it is free: who comes back is served."""
    with full(narrow) as release:
        before = narrow.refused()

        def watch() -> None:
            wait_until(lambda: narrow.refused() > before, "a refusal")
            release()

        watching = threading.Thread(target=watch)
        watching.start()
        yield
        watching.join()


def tool(environment: str, name: str) -> Path | None:
    """The program `name` in an environment of its own; None if that isn't installed."""
    program = ENVIRONMENTS.absolute() / environment / "bin" / name
    return program if program.exists() else None


def version_of(environment: str, package: str) -> str:
    """A package's version in an environment of its own."""
    command = [str(tool(environment, "python")), "-c"]
    return run([*command, f"import importlib.metadata as m; print(m.version({package!r}))"], 60).strip()


def run(command: list[str], deadline_s: float, **env: str) -> str:
    """What a program prints; AssertionError with it if the program fails."""
    done = subprocess.run(
        command, env={**os.environ, **OFFLINE, **env}, timeout=deadline_s, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-8000:]}"
    return done.stdout
