"""How much work a request is expected to be, from those that have ended."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.policies.work import BUCKETS, ExpectedWork, bucket_of

COSTS = 100.0, 0.5


def of(work: ExpectedWork, prompt: int) -> float:
    return float(work.of(np.array([float(prompt)]), COSTS)[0])


def test_before_any_end_a_request_is_its_prompt() -> None:
    assert of(ExpectedWork(), 1000) == 1000 * 100


def test_the_outputs_to_expect_are_those_of_prompts_of_about_the_same_length() -> None:
    work = ExpectedWork()
    for _ in range(400):
        work.learn(1000, 0, 40)
        work.learn(8000, 0, 400)
    expected = 1000 * 100 + 40 * (100 + 0.5 * (1000 + 20))
    assert of(work, 1000) == pytest.approx(expected, rel=0.02)
    assert of(work, 8000) > 8000 * 100 + 390 * (100 + 0.5 * 8000)


def test_lengths_that_have_not_been_seen_are_like_all_on_average() -> None:
    work = ExpectedWork()
    for _ in range(400):
        work.learn(1000, 0, 40)
        work.learn(8000, 0, 400)
    assert 200 < work.expected()[1, bucket_of(100)] < 240


def test_what_the_prefix_cache_had_of_such_prompts_is_not_expected_to_be_work() -> None:
    work = ExpectedWork()
    for _ in range(400):
        work.learn(1000, 900, 1)
    assert work.computed(np.array([1000.0]))[0] == pytest.approx(100, rel=0.05)
    known = work.of(np.array([1000.0]), COSTS, np.array([1000.0]))[0]
    assert known > 5 * of(work, 1000), "of one whose cached tokens are known, these count"


def test_old_ends_fade() -> None:
    work = ExpectedWork()
    for outputs in [10] * 3000 + [500] * 5000:
        work.learn(1000, 0, outputs)
    assert work.expected()[1, bucket_of(1000)] > 490


def test_the_work_of_many_is_told_from_their_number_and_their_tokens() -> None:
    work = ExpectedWork()
    for _ in range(100):
        work.learn(1000, 0, 40)
    counts, tokens = np.zeros(BUCKETS), np.zeros(BUCKETS)
    for prompt in (1000, 1010, 5000):
        counts[bucket_of(prompt)] += 1
        tokens[bucket_of(prompt)] += prompt
    alone = sum(of(work, prompt) for prompt in (1000, 1010, 5000))
    assert work.of_buckets(counts, tokens, COSTS) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("prompt", [1, 2, 7, 1000, 10**9])
def test_every_length_has_a_bucket(prompt: int) -> None:
    assert 0 <= bucket_of(prompt) < BUCKETS
    assert of(ExpectedWork(), prompt) == prompt * 100
