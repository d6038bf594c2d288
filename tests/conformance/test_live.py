"""Conformance: a whole server around the scheduler, with the real model, real processes and a real client's stream."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import Command, Server, free_port, wait_until
from openai import OpenAI

from tests.conformance.chain import Chain

MODEL = "smollm2-135m-instruct"
PROMPTS = ["The quick brown fox", "Once upon a time, in a village by the sea,", "Die Hauptstadt von Österreich ist"]


@pytest.fixture
def server(fresh_chain: Chain, runtime_dir: Path) -> Iterator[Server]:
    """The real runner and API around the scheduler under test."""
    env = {"TRIPTYCH_RUNTIME_DIR": str(runtime_dir)}
    flags = ("--dtype", "float32", "--num-threads", "1", "--num-blocks-override", "13", "--max-model-len", "192")
    port = free_port()
    started: list[Command] = []
    try:
        started.append(Command(["runner", *flags], env, runtime_dir / "runner.log", runtime_dir.name))
        fresh_chain.start()
        server = Server(
            ["api", "--port", str(port), "--engine-wait-s", "90"], env, runtime_dir / "api.log", runtime_dir.name
        )
        started.append(server)
        server.port = port
        wait_until(server.is_ready, 90, "a ready server")
        yield server
    finally:
        for command in started:
            command.kill()


def stream_of(server: Server, prompt: str) -> Any:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    return client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=64, stream=True)


def text_of(server: Server, prompt: str) -> str:
    return "".join(chunk.choices[0].text for chunk in stream_of(server, prompt) if chunk.choices)


def test_a_real_chain_answers_and_a_scheduler_that_is_killed_costs_no_text(fresh_chain: Chain, server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"

    alone = [text_of(server, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: text_of(server, prompt), PROMPTS)) == alone

    stream = stream_of(server, PROMPTS[0])
    begun = "".join(next(stream).choices[0].text for _ in range(5))
    killed = fresh_chain.process
    assert killed is not None
    killed.kill()
    killed.wait()
    fresh_chain.start()
    rest = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert begun + rest == alone[0]
