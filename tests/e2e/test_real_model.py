"""The whole chain on the real model: right answers, and the same ones whatever else is going on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import Server

from tests.e2e.kit import client_of, samples_of, wait_until_idle

MODEL = "smollm2-135m-instruct"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = [
    "The quick brown fox",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,",
    "Question: why is the sky blue? Answer:",
    "Die Hauptstadt von Österreich ist",
    "Roses are red, violets are blue,",
    "The three primary colours are",
]


def complete(server: Server, prompt: Any, **params: Any) -> Any:
    params = {"model": MODEL, "temperature": 0, "max_tokens": 48} | params
    return client_of(server).completions.create(prompt=prompt, **params)


def streamed(server: Server, prompt: Any, **params: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in complete(server, prompt, stream=True, **params) if chunk.choices)


def test_the_capital_of_france_is_paris(served: Server) -> None:
    answer = client_of(served).chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_the_streamed_answer_is_the_whole_answer_with_the_same_usage(served: Server) -> None:
    client = client_of(served)
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_greedy_outputs_are_the_same_alone_together_and_under_preemption(exact: Server) -> None:
    alone = [complete(exact, prompt).choices[0].text for prompt in PROMPTS]
    before = samples_of(exact)["triptych_scheduler_preemptions_total"]
    copies = PROMPTS * 2
    with ThreadPoolExecutor(len(copies)) as pool:
        together = list(pool.map(lambda prompt: streamed(exact, prompt, max_tokens=80), copies))
    for prompt, text, solo in zip(copies, together, alone * 2, strict=True):
        assert text.startswith(solo) and len(text) >= len(solo), prompt
    assert len({(prompt, text) for prompt, text in zip(copies, together, strict=True)}) == len(PROMPTS)
    after = wait_until_idle(exact)
    assert after["triptych_scheduler_preemptions_total"] > before, (
        "the pool was too large for this test to say anything"
    )
    assert after["triptych_scheduler_prefix_cache_hit_tokens_total"] > 0


def test_seeded_outputs_are_the_same_alone_together_and_beside_unseeded_rows(exact: Server) -> None:
    params = {"temperature": 0.8, "seed": 42, "max_tokens": 24}
    alone = complete(exact, PROMPTS[1], **params).choices[0].text
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(complete, exact, prompt, temperature=1.0, max_tokens=24) for prompt in PROMPTS[2:]]
        again = pool.submit(complete, exact, PROMPTS[1], **params).result().choices[0].text
        for other in others:
            other.result()
    assert again == alone


def test_the_choices_of_one_seed_differ_and_repeat(exact: Server) -> None:
    params = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 16}
    first = [choice.text for choice in complete(exact, PROMPTS[0], **params).choices]
    assert len(set(first)) == 3
    assert [choice.text for choice in complete(exact, PROMPTS[0], **params).choices] == first


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_a_prompt_that_is_fully_cached_gives_the_same_answer(exact: Server, length: int) -> None:
    prompt = [(1000 + 37 * j) % 40000 for j in range(length)]
    first, second = (complete(exact, prompt, max_tokens=8, logprobs=1) for _ in range(2))
    assert second.choices[0].text == first.choices[0].text
    assert second.choices[0].logprobs.token_logprobs == pytest.approx(
        first.choices[0].logprobs.token_logprobs, abs=1e-4
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (length - 1) // 16 * 16


def test_a_request_larger_than_the_pool_is_refused_and_others_are_served(exact: Server) -> None:
    reply = exact.request("POST", "/v1/completions", {"model": MODEL, "prompt": [5] * 639, "max_tokens": 600})
    assert reply.status == 400 and "640" in reply.json()["error"]["message"]
    assert complete(exact, PROMPTS[0]).choices[0].text


def test_logprobs_are_finite_sorted_and_belong_to_the_text(served: Server) -> None:
    answer = complete(served, PROMPTS[0], logprobs=3, max_tokens=6)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == answer.usage.completion_tokens == 6
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert -9999 <= value <= 0
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert top[token] == value == max(top.values()), "greedy takes the likeliest"


def test_a_logit_bias_a_stop_id_and_min_tokens_work_together_and_harm_no_neighbour(exact: Server) -> None:
    solo = complete(exact, PROMPTS[0]).choices[0].text
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(complete, exact, PROMPTS[0])
        forced = complete(
            exact,
            "x",
            max_tokens=9,
            logit_bias={"49151": 100},
            extra_body={"stop_token_ids": [49151], "min_tokens": 3, "ignore_eos": True},
        )
    assert forced.usage.completion_tokens == 4 and forced.choices[0].finish_reason == "stop"
    assert neighbour.result().choices[0].text == solo


def test_stop_strings_end_the_text_before_them_across_token_borders(served: Server) -> None:
    whole = complete(served, PROMPTS[3], max_tokens=40).choices[0].text
    cut = whole[9:14]
    stopped = complete(served, PROMPTS[3], max_tokens=40, stop=[cut])
    assert stopped.choices[0].text == whole[: whole.index(cut)]
    assert stopped.choices[0].finish_reason == "stop"
    assert streamed(served, PROMPTS[3], max_tokens=40, stop=[cut]) == stopped.choices[0].text
    wait_until_idle(served)
