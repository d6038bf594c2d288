"""Log-probabilities of prompts through all processes, on the real model: what clients compute with, and kills."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import Server, running_server, wait_until

from tests.e2e.kit import client_of, samples_of, wait_until_idle

MODEL = "smollm2-135m-instruct"
LONG = [(1000 + 37 * j) % 40000 for j in range(320)]
COMPUTED = "triptych_runner_tokens_computed_total"


@pytest.fixture(scope="module")
def small_steps() -> Iterator[Server]:
    """The real model in float32, 16 tokens a step: a long prompt takes a while."""
    flags = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "640", "--max-num-batched-tokens", "16")
    with running_server(*flags, "--num-blocks-override", "129", "--max-num-seqs", "8") as server:
        yield server


def echo(server: Server, prompt: Any, **fields: Any) -> Any:
    """As lm-eval asks."""
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, **fields}
    return client_of(server).completions.create(model=MODEL, prompt=prompt, **asked)


def own(server: Server, prompt: list[int], **fields: Any) -> list[float]:
    """The log-probability of each token but the first."""
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, **fields}
    reply = server.request("POST", "/v1/completions", asked)
    assert reply.status == 200, reply.body
    first, *rest = reply.json()["choices"][0]["prompt_logprobs"]
    assert first is None
    return [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], rest, strict=True)]


@pytest.fixture(scope="module")
def undisturbed(small_steps: Server) -> list[float]:
    return own(small_steps, LONG)


def test_a_cached_prompt_is_told_the_same_and_both_shapes_agree(small_steps: Server, undisturbed: list[float]) -> None:
    plain = client_of(small_steps).completions.create(model=MODEL, prompt=LONG, max_tokens=1)
    assert plain.usage.prompt_tokens_details.cached_tokens == 304, "it was written to the cache"
    again = echo(small_steps, LONG, max_tokens=0)
    assert again.usage.prompt_tokens_details.cached_tokens == 0 and again.usage.completion_tokens == 0
    made = again.choices[0].logprobs
    assert made.token_logprobs[0] is None and made.token_logprobs[1:] == pytest.approx(undisturbed, abs=1e-4)
    assert len(made.tokens) == len(made.top_logprobs) == len(made.text_offset) == len(LONG)
    assert all(max(top.values()) >= value for top, value in zip(made.top_logprobs[1:], undisturbed, strict=True))


def test_a_text_that_was_generated_has_the_same_numbers_as_a_prompt(small_steps: Server) -> None:
    asked = {"prompt": LONG[:40], "return_token_ids": True, "logprobs": 2, "max_tokens": 8, "temperature": 0}
    said = small_steps.request("POST", "/v1/completions", {"model": MODEL, **asked}).json()["choices"][0]
    whole = [*LONG[:40], *said["token_ids"]]
    assert own(small_steps, whole)[39:] == pytest.approx(said["logprobs"]["token_logprobs"], abs=1e-4)


def test_the_likelier_continuation_has_the_larger_sum_as_lm_eval_computes_it(small_steps: Server) -> None:
    context, endings = "The capital of France is", [" Paris", " banana"]
    asked = {"prompt": context, "add_special_tokens": False}
    count = len(small_steps.request("POST", "/tokenize", {"model": MODEL, **asked}).json()["tokens"])
    answer = echo(small_steps, [context + ending for ending in endings])
    sums, greedy = [], []
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        values, tops = choice.logprobs.token_logprobs[count:-1], choice.logprobs.top_logprobs[count:-1]
        assert len(values) >= 1
        sums.append(sum(values))
        greedy.append(all(value == max(top.values()) for value, top in zip(values, tops, strict=True)))
    assert sums[0] > sums[1] + 3 and greedy == [True, False]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["scheduler", "runner"])
def test_a_process_that_is_killed_while_a_prompt_is_computed_changes_nothing(
    small_steps: Server, undisturbed: list[float], role: str
) -> None:
    before = wait_until_idle(small_steps)[COMPUTED]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(own, small_steps, LONG, cache_salt=role)
        reached = wait_until(
            lambda: (now := samples_of(small_steps).get(COMPUTED, 0)) > before + 60 and now, 60, "the middle"
        )
        small_steps.children()[role].send_signal(signal.SIGKILL)
        assert reached < before + 290, "too late to say anything"
        assert answer.result(90) == pytest.approx(undisturbed, abs=1e-4)
    wait_until(lambda: small_steps.request("GET", "/ready").status == 200, 60, "the chain to be whole again")
