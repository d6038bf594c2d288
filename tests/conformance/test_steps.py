"""Conformance: what a request's steps compute, what it emits, and how it ends."""

from __future__ import annotations

import pytest

from protocol.messages import RequestStatus
from tests.conformance.chain import Chain
from tests.conformance.ends import EOS, limits


@pytest.mark.parametrize(("prompt", "most"), [(1, 1), (3, 2), (4, 4), (5, 1), (17, 30), (31, 9)])
def test_a_request_emits_exactly_its_tokens_and_ends_once(chain: Chain, prompt: int, most: int) -> None:
    _, api = chain.begin(limits())
    api.submit(1, prompt, most)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)
    end = api.finished[1]
    assert (end.stop_token, end.num_preemptions, end.num_cached_tokens) == (-1, 0, 0)
    assert end.queue_ns >= 0


@pytest.mark.needs("chunked-prefill")
@pytest.mark.parametrize("prompt", [33, 64, 100, 200])
def test_a_prompt_longer_than_the_token_budget_is_computed_in_parts(chain: Chain, prompt: int) -> None:
    runner, api = chain.begin(limits(max_num_batched_tokens=32))
    api.submit(1, prompt, 5)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)
    before = [seen.counts[1] for seen in runner.judge.steps if 1 in seen.counts]
    first = next(index for index, seen in enumerate(runner.judge.steps) if 1 in seen.sampled)
    assert sum(before[: first + 1]) == prompt, "nothing is sampled before the whole prompt is computed"
    assert first >= (prompt - 1) // 32


@pytest.mark.needs("mixed-steps", "chunked-prefill")
def test_a_request_that_decodes_goes_on_while_a_long_prompt_is_computed(chain: Chain) -> None:
    runner, api = chain.begin(limits(128, max_num_batched_tokens=16))
    api.submit(1, 4, 60)
    chain.until(lambda: len(api.tokens[1]) > 2, "the first tokens")
    api.submit(2, 150, 3)
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(1, 2)
    mixed = [seen for seen in runner.judge.steps if {1, 2} <= seen.counts.keys() and 2 not in seen.sampled]
    assert len(mixed) >= 5


def test_more_requests_than_slots_all_finish(chain: Chain) -> None:
    runner, api = chain.begin(limits(256, max_num_seqs=3))
    everyone = range(1, 21)
    for request_id in everyone:
        api.submit(request_id, 1 + request_id % 7, 3 + request_id % 5)
    chain.until(lambda: api.has(*everyone), "all ends")
    api.assert_complete(*everyone)
    assert max(len(seen.counts) for seen in runner.judge.steps) == 3, "slots are used"


def test_a_runner_with_one_slot_and_one_token_a_step_serves_too(chain: Chain) -> None:
    if "chunked-prefill" in chain.subject.lacks:
        pytest.skip(f"chunked-prefill: {chain.subject.lacks['chunked-prefill']}")
    _, api = chain.begin(limits(16, max_num_seqs=1, max_num_batched_tokens=1))
    api.submit(1, 6, 3)
    api.submit(2, 3, 4)
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(1, 2)


def test_each_api_hears_of_its_own_requests_only(chain: Chain) -> None:
    _, one = chain.begin(limits())
    two = chain.connected()
    one.submit(1, 5, 20)
    two.submit(2, 6, 20)
    one.submit(3, 7, 10)
    chain.until(lambda: one.has(1, 3) and two.has(2), "all ends")
    one.assert_complete(1, 3)
    two.assert_complete(2)
    assert (one.accepted, two.accepted) == ({1, 3}, {2})


@pytest.mark.parametrize(
    ("params", "script", "length", "stop"),
    [
        ({"ignore_eos": False}, {3: EOS}, 4, EOS),
        ({"ignore_eos": False, "eos_token_ids": (7,)}, {2: EOS, 5: 7}, 6, 7),
        ({"ignore_eos": True}, {3: EOS}, 12, -1),
        ({"ignore_eos": True, "stop_token_ids": (77, 78)}, {1: EOS, 4: 78}, 5, 78),
        ({"ignore_eos": False, "min_tokens": 6}, {3: EOS, 8: EOS}, 9, EOS),
        ({"ignore_eos": False}, {11: EOS}, 12, EOS),
        ({"ignore_eos": False}, {0: EOS}, 1, EOS),
    ],
    ids=["eos", "own-eos-set", "ignored-eos", "stop-token", "min-tokens", "eos-as-the-last-token", "eos-at-once"],
)
def test_a_token_ends_a_request_as_its_parameters_say(
    chain: Chain, params: dict[str, object], script: dict[int, int], length: int, stop: int
) -> None:
    _, api = chain.begin(limits())
    chain.world.scripted = {(1, 5 + output): token for output, token in script.items()}
    api.submit(1, 5, 12, **params)
    chain.until(lambda: api.has(1), "the end")
    end = api.finished[1]
    assert len(api.tokens[1]) == length == end.num_output_tokens
    assert end.stop_token == stop
    assert end.status == (RequestStatus.LENGTH if stop < 0 else RequestStatus.STOPPED)


def test_a_stop_of_one_request_leaves_the_others_alone(chain: Chain) -> None:
    _, api = chain.begin(limits())
    chain.world.scripted = {(2, 5 + 3): EOS}
    for request_id in (1, 2, 3):
        api.submit(request_id, 5, 20, ignore_eos=False)
    chain.until(lambda: api.has(1, 2, 3), "all ends")
    api.assert_complete(1, 3)
    assert api.finished[2].status == RequestStatus.STOPPED
    assert len(api.tokens[2]) == 4


def test_a_request_that_fills_the_context_ends_by_length(chain: Chain) -> None:
    _, api = chain.begin(limits(max_model_len=40))
    api.submit(1, 30, 500)
    chain.until(lambda: api.has(1), "the end")
    assert api.finished[1].status == RequestStatus.LENGTH
    assert len(api.tokens[1]) == 10 == api.finished[1].num_output_tokens


def test_log_probabilities_arrive_with_the_index_of_their_output(chain: Chain) -> None:
    _, api = chain.begin(limits())
    api.submit(1, 9, 6, logprobs=0)
    api.submit(2, 9, 6)
    chain.until(lambda: api.has(1, 2), "both ends")
    assert [(entry.id, entry.position) for entry in api.logprobs] == [(1, n) for n in range(6)]
    assert {entry.logprob for entry in api.logprobs} == {-0.5}


@pytest.mark.needs("chunked-prefill")
def test_log_probabilities_of_prompts_arrive_complete_also_behind_a_cached_prefix_and_under_pressure(
    chain: Chain,
) -> None:
    """Before the first token, as the API end requires; the judge refuses pages of which nothing could be told."""
    _, api = chain.begin(limits(30, max_num_batched_tokens=16))
    prompt = [7000 + n for n in range(50)]
    api.submit(1, prompt, 3)
    chain.until(lambda: api.has(1), "the end")
    for request_id in (2, 3, 4):
        api.submit(request_id, prompt, 30, prompt_logprobs=0)
    chain.until(lambda: api.has(2, 3, 4), "all ends")
    api.assert_complete(1, 2, 3, 4)
    whole = [-float(position) for position in range(1, 50)]
    assert api.told == {2: whole, 3: whole, 4: whole}


@pytest.mark.needs("priority")
def test_an_urgent_request_overtakes_those_that_wait(chain: Chain) -> None:
    runner, api = chain.begin(limits(max_num_seqs=1))
    runner.holding = True
    api.submit(1, 4, 4)
    chain.until(lambda: runner.held, "a step")
    for request_id, priority in ((2, 5), (3, 0), (4, -7), (5, 5)):
        api.submit(request_id, 4, 4, priority=priority)
    chain.until(lambda: api.accepted >= {2, 3, 4, 5}, "all in the queue")
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(*range(1, 6)), "all ends")
    order = [request_id for seen in runner.judge.steps for request_id in seen.arrived]
    assert order == [1, 4, 3, 2, 5]


def test_an_idle_scheduler_sends_no_steps(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 5, 5)
    chain.until(lambda: api.has(1), "the end")
    chain.until_statuses(api, 1)
    steps = len(runner.judge.steps)
    chain.until_statuses(api, 1)
    assert len(runner.judge.steps) == steps


def test_the_status_counts_what_runs_and_what_waits(chain: Chain) -> None:
    runner, api = chain.begin(limits(max_num_seqs=2))
    runner.holding = True
    for request_id in range(1, 6):
        api.submit(request_id, 4, 4)
    chain.until(lambda: api.status and api.status.running + api.status.waiting == 5, "the counts")
    assert api.status is not None
    assert 1 <= api.status.running <= 2
    assert 0 < api.status.kv_usage <= 1
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(*range(1, 6)), "all ends")
    api.assert_complete(*range(1, 6))
