"""Conformance: a pool smaller than the demand slows requests down, and neither stops nor changes them."""

from __future__ import annotations

import random

import pytest

from protocol.messages import RequestStatus
from tests.conformance.chain import Chain
from tests.conformance.ends import limits


def test_requests_that_do_not_fit_together_all_finish(chain: Chain) -> None:
    runner, api = chain.begin(limits(10))
    everyone = range(1, 7)
    for request_id in everyone:
        api.submit(request_id, 4 + request_id, 12)
    chain.until(lambda: api.has(*everyone), "all ends")
    api.assert_complete(*everyone)
    arrivals = sum(len(seen.arrived) for seen in runner.judge.steps)
    preemptions = sum(end.num_preemptions for end in api.finished.values())
    assert arrivals > len(everyone), "the pool is too small for all of them"
    assert preemptions >= arrivals - len(everyone), "whoever returns was preempted, and knows"


def test_the_pool_is_used_to_its_last_page(chain: Chain) -> None:
    """16 tokens of KV for a request that needs exactly 16: the token sampled last is never computed."""
    _, api = chain.begin(limits(4))
    api.submit(1, 10, 7)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_a_prompt_that_fills_the_pool_gets_its_one_token(chain: Chain) -> None:
    _, api = chain.begin(limits(4))
    api.submit(1, 16, 1)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_a_request_that_outgrows_the_whole_pool_ends_and_the_others_do_not_notice(chain: Chain) -> None:
    _, api = chain.begin(limits(4))
    api.submit(1, 6, 200)
    api.submit(2, 5, 3)
    api.submit(3, 7, 3)
    chain.until(lambda: api.has(1, 2, 3), "all ends")
    assert api.finished[1].status in (RequestStatus.LENGTH, RequestStatus.IGNORED, RequestStatus.ERROR)
    assert 6 + len(api.tokens[1]) <= 17
    api.assert_complete(2, 3)


@pytest.mark.parametrize(
    ("prompt", "changes", "number"),
    [(17, {}, "16"), (500, {}, "16"), (20, {"max_model_len": 12}, "12")],
    ids=["one-token-over-the-pool", "far-over-the-pool", "over-the-context"],
)
def test_what_can_never_run_is_refused_at_once_with_the_numbers(
    chain: Chain, prompt: int, changes: dict[str, int], number: str
) -> None:
    runner, api = chain.begin(limits(4, **changes))
    runner.holding = True
    api.submit(1, 4, 4)
    chain.until(lambda: runner.held, "a step")
    api.submit(2, prompt, 4)
    rejected = chain.until(lambda: api.rejected.get(2), "the refusal, while another runs")[0]
    assert rejected.status == 400
    assert rejected.code
    assert str(prompt) in rejected.message
    assert number in rejected.message or str(int(number) - 1) in rejected.message
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1), "the other's end")
    api.assert_complete(1)


def test_a_request_that_has_waited_as_long_as_it_may_ends(chain: Chain) -> None:
    runner, api = chain.begin(limits(max_num_seqs=1))
    runner.holding = True
    api.submit(1, 4, 4, timeout_ms=60_000)
    chain.until(lambda: runner.held, "a step")
    api.submit(2, 4, 4, timeout_ms=50)
    api.submit(3, 4, 4)
    chain.until(lambda: api.has(2), "the end of the wait")
    assert (api.finished[2].status, api.finished[2].code) == (RequestStatus.ERROR, "waiting_timeout")
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1, 3), "the other ends")
    api.assert_complete(1, 3)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_of_requests_aborts_and_late_results_breaks_nothing(chain: Chain, seed: int) -> None:
    """Every step, page and token of it is judged as it happens; this only makes the weather."""
    dice = random.Random(seed)
    runner, api = chain.begin(limits(24, max_num_seqs=5, max_num_batched_tokens=24))
    base = [dice.randrange(3, 40_000) for _ in range(24)]
    aborted: set[int] = set()
    next_id = 1
    while next_id <= 60 or not api.has(*range(1, next_id)):
        if next_id <= 60 and dice.random() < 0.5:
            shared = dice.choice([0, 0, 4, 9, 16, 24])
            prompt = base[:shared] + [dice.randrange(3, 40_000) for _ in range(dice.randrange(1, 24 - shared // 2))]
            salt = dice.choice(["", "", "a"])
            if "chunked-prefill" in chain.subject.lacks:
                prompt = prompt[:24]
            api.submit(next_id, prompt, dice.randrange(1, 25), cache_salt=salt)
            next_id += 1
        if dice.random() < 0.1 and next_id > 1:
            victim = dice.randrange(1, next_id)
            if not api.has(victim):
                aborted.add(victim)
            api.abort(victim)
        runner.holding = next_id <= 60 and dice.random() < 0.7
        if not runner.holding or dice.random() < 0.5:
            runner.release(dice.randrange(1, 3))
        everyone, before = range(1, next_id), len(runner.judge.steps)
        chain.until(
            lambda ids=everyone, n=before: len(runner.judge.steps) > n or runner.held or api.has(*ids), "a move"
        )
    for request_id in set(range(1, next_id)) - aborted:
        api.assert_complete(request_id)
