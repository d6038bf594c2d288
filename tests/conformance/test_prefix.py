"""Conformance: whatever a scheduler reuses, a request reads its own history and nobody else's."""

from __future__ import annotations

import pytest

from tests.conformance.chain import Chain
from tests.conformance.ends import limits

PROMPT = list(range(500, 524))


@pytest.mark.needs("prefix-cache")
@pytest.mark.parametrize(
    ("second", "cached"),
    [
        (PROMPT, 20),
        (PROMPT[:23], 20),
        (PROMPT[:21], 20),
        (PROMPT[:20], 16),
        ([*PROMPT[:12], 9, 9, 9, 9], 12),
        ([*PROMPT[:14], 9, 9, 9, 9], 12),
        ([9, *PROMPT[1:]], 0),
        (PROMPT[4:], 0),
    ],
    ids=[
        "the-same",
        "one-less",
        "one-past-a-page",
        "whole-pages",
        "forks-at-a-page",
        "forks-in-a-page",
        "head",
        "tail",
    ],
)
def test_whole_pages_of_the_common_head_are_reused_and_one_token_is_left(
    chain: Chain, second: list[int], cached: int
) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, PROMPT, 4)
    chain.until(lambda: api.has(1), "the first end")
    api.submit(2, second, 4)
    chain.until(lambda: api.has(2), "the second end")
    api.assert_complete(1, 2)
    assert api.finished[2].num_cached_tokens == cached
    assert next(seen.arrived[2] for seen in runner.judge.steps if 2 in seen.arrived) == cached


@pytest.mark.needs("prefix-cache")
def test_outputs_are_part_of_a_history_too(chain: Chain) -> None:
    _, api = chain.begin(limits())
    api.submit(1, PROMPT, 13)
    chain.until(lambda: api.has(1), "the first end")
    api.submit(2, [*PROMPT, *api.tokens[1], 5], 4)
    chain.until(lambda: api.has(2), "the second end")
    api.assert_complete(2)
    assert api.finished[2].num_cached_tokens == 36


@pytest.mark.parametrize(("one", "two"), [("", "a"), ("a", ""), ("a", "b"), ("ab", "a")])
def test_requests_with_different_salts_share_nothing(chain: Chain, one: str, two: str) -> None:
    _, api = chain.begin(limits())
    api.submit(1, PROMPT, 4, cache_salt=one)
    chain.until(lambda: api.has(1), "the first end")
    api.submit(2, PROMPT, 4, cache_salt=two)
    chain.until(lambda: api.has(2), "the second end")
    api.assert_complete(1, 2)
    assert api.finished[2].num_cached_tokens == 0


def test_twins_that_arrive_together_are_both_right(chain: Chain) -> None:
    _, api = chain.begin(limits())
    for request_id in range(1, 6):
        api.submit(request_id, PROMPT, 6)
    chain.until(lambda: api.has(*range(1, 6)), "all ends")
    api.assert_complete(*range(1, 6))


def test_a_prefix_whose_step_failed_is_not_read_by_others(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    runner.holding = True
    runner.failures = 1
    api.submit(1, PROMPT, 6)
    chain.until(lambda: runner.held, "the step that fails")
    api.submit(2, PROMPT, 6)
    chain.until_statuses(api, 1)
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(1, 2)


def test_a_prefix_whose_owner_was_aborted_halfway_is_not_read_past_what_it_computed(chain: Chain) -> None:
    runner, api = chain.begin(limits(max_num_batched_tokens=64 if "chunked-prefill" in chain.subject.lacks else 8))
    runner.holding = True
    api.submit(1, PROMPT, 6)
    chain.until(lambda: runner.held, "its first part")
    api.abort(1)
    api.submit(2, PROMPT, 6)
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(2)


def test_pages_that_were_evicted_are_not_taken_for_what_they_held(chain: Chain) -> None:
    _, api = chain.begin(limits(8))
    for request_id in range(1, 13):
        prompt = PROMPT if request_id % 3 == 1 else [request_id * 100 + j for j in range(20)]
        api.submit(request_id, prompt, 5)
        chain.until(lambda n=request_id: api.has(n), "its end")
        api.assert_complete(request_id)
