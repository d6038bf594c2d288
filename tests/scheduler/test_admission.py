"""Who enters a step, and who is refused at the door."""

from __future__ import annotations

import pytest

from protocol.messages import RequestStatus
from tests.scheduler.isolated import Isolated, default_sample, limits, solo_tokens


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers_and_blocks_nobody() -> None:
    isolated = Isolated(8)
    isolated.add(1, 129, max_tokens=1)
    isolated.add(2, 8, max_tokens=4)
    isolated.drain()
    refusal = isolated.rejected[1]
    assert (refusal.status, refusal.code) == (400, "kv_capacity_exceeded")
    assert "129" in refusal.message and "128" in refusal.message
    assert isolated.tokens[2] == solo_tokens(2, 8, 4)


def test_a_prompt_that_fills_the_pool_exactly_yields_its_one_token() -> None:
    isolated = Isolated(8)
    isolated.add(1, 128, max_tokens=1)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 128, 1)
    assert isolated.status(1) == RequestStatus.LENGTH


def test_a_request_that_outgrows_the_whole_pool_ends_with_length_and_the_others_run() -> None:
    isolated = Isolated(8)
    isolated.add(1, 128, max_tokens=2)
    isolated.add(2, 8, max_tokens=4)
    isolated.drain()
    assert isolated.status(1) == RequestStatus.LENGTH
    assert isolated.tokens[1] == solo_tokens(1, 128, 1)
    assert isolated.tokens[2] == solo_tokens(2, 8, 4)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_last_running_request_never_computes_past_the_pool(delay: int) -> None:
    isolated = Isolated(4, delay=delay)
    isolated.add(1, 40, max_tokens=100)
    isolated.add(2, 8, max_tokens=4)
    isolated.add(3, 8, max_tokens=4)
    isolated.drain()
    assert len(isolated.tokens[1]) == 64 - 40 + 1, "64 positions hold KV; the last output needs none"
    assert isolated.tokens[2] == solo_tokens(2, 8, 4) and isolated.tokens[3] == solo_tokens(3, 8, 4)


def test_the_context_limit_ends_a_request_with_length() -> None:
    isolated = Isolated(64, limit=limits(64, max_model_len=50))
    isolated.add(1, 40, max_tokens=100)
    isolated.drain()
    assert len(isolated.tokens[1]) == 10 and isolated.status(1) == RequestStatus.LENGTH


def test_a_prompt_that_leaves_no_room_for_an_output_is_refused() -> None:
    isolated = Isolated(64, limit=limits(64, max_model_len=50))
    isolated.add(1, 50, max_tokens=1)
    assert isolated.rejected[1].code == "context_length_exceeded" and "50" in isolated.rejected[1].message


@pytest.mark.parametrize(("prompt", "index"), [([5, 50_000], 1), ([-1], 0), ([1, 2, 2**31 - 1], 2)])
def test_a_token_id_outside_the_vocabulary_is_refused_with_its_index(prompt: list[int], index: int) -> None:
    isolated = Isolated(8)
    isolated.add(1, prompt)
    assert isolated.rejected[1].code == "invalid_token_id" and f"prompt[{index}]" in isolated.rejected[1].message
    assert not isolated.core.has_requests


def test_an_empty_prompt_is_refused() -> None:
    isolated = Isolated(8)
    isolated.add(1, [])
    assert isolated.rejected[1].code == "empty_prompt"


def test_a_duplicate_id_is_refused_and_the_first_request_is_not_disturbed() -> None:
    isolated = Isolated(8)
    isolated.add(1, 20, max_tokens=6)
    isolated.step()
    isolated.add(1, 30, max_tokens=6)
    assert isolated.rejected[1].status == 409
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 6)


def test_the_queue_limit_refuses_new_requests_with_503_but_not_resumed_ones() -> None:
    isolated = Isolated(64, max_num_seqs=1, max_num_queued_reqs=2)
    for request_id in (1, 2, 3):
        isolated.add(request_id, 10, max_tokens=2)
    assert isolated.rejected[3].status == 503 and isolated.rejected[3].retry_after_s > 0
    isolated.add(4, 10, max_tokens=2, resumed=True)
    isolated.drain()
    assert sorted(isolated.finished) == [1, 2, 4]


def test_the_token_budget_binds_and_is_named() -> None:
    isolated = Isolated(64, max_num_batched_tokens=32)
    isolated.add(1, 32, max_tokens=2)
    isolated.add(2, 8, max_tokens=2)
    assert isolated.step() == {1: 32}
    assert isolated.core.requests[2].held_by == "tokens"


def test_the_slot_budget_binds_and_is_named() -> None:
    isolated = Isolated(64, max_num_seqs=1)
    isolated.add(1, 8, max_tokens=4)
    isolated.add(2, 8, max_tokens=4)
    assert isolated.step() == {1: 8}
    assert isolated.core.requests[2].held_by == "slots"


def test_the_block_budget_binds_is_named_and_blocks_those_behind() -> None:
    isolated = Isolated(8, max_bypasses=0)
    isolated.add(1, 80, max_tokens=4)
    isolated.add(2, 64, max_tokens=4)
    isolated.add(3, 4, max_tokens=4)
    assert isolated.step() == {1: 80}
    assert isolated.core.requests[2].held_by == "blocks"
    assert not isolated.core.requests[3].held_by


def test_the_watermark_binds_only_while_something_else_is_scheduled() -> None:
    isolated = Isolated(10, watermark=0.5)
    isolated.add(1, 150, max_tokens=2)
    assert isolated.step() == {1: 150}, "a lone request may use the whole pool"
    isolated.drain()
    isolated = Isolated(10, watermark=0.5)
    isolated.add(1, 32, max_tokens=2)
    isolated.add(2, 64, max_tokens=2)
    assert isolated.step() == {1: 32}
    assert isolated.core.requests[2].held_by == "watermark"


def test_prefill_is_chunked_and_shares_steps_with_decodes() -> None:
    isolated = Isolated(64, max_num_batched_tokens=16)
    isolated.add(1, 4, max_tokens=6)
    isolated.step()
    isolated.add(2, 40, max_tokens=2)
    seen = [isolated.step() for _ in range(3)]
    assert seen == [{1: 1, 2: 15}, {1: 1, 2: 15}, {1: 1, 2: 10}]


def test_decodes_are_served_before_a_prefill_admitted_earlier() -> None:
    isolated = Isolated(64, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    isolated.add(1, 100, max_tokens=2)
    isolated.add(2, 1, max_tokens=9)
    assert isolated.step() == {1: 8, 2: 1}
    isolated.core.token_budget = 8
    assert isolated.step() == {2: 1, 1: 7}


def test_the_long_prefill_cap_applies_only_beside_others() -> None:
    isolated = Isolated(64, max_num_batched_tokens=64, long_prefill_token_threshold=10)
    isolated.add(1, 40, max_tokens=2)
    assert isolated.step() == {1: 40}
    isolated.add(2, 40, max_tokens=2)
    assert isolated.step() == {1: 1, 2: 10}


def test_an_unfinished_prefill_emits_nothing() -> None:
    isolated = Isolated(64, max_num_batched_tokens=4)
    isolated.add(1, 10, max_tokens=3)
    for expected in (0, 0, 1):
        isolated.step()
        assert len(isolated.tokens.get(1, [])) == expected
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 10, 3)


def test_max_tokens_is_never_overrun_and_nothing_is_computed_in_vain() -> None:
    for max_tokens in (1, 2, 3, 5):
        isolated = Isolated(64, delay=1)
        isolated.add(1, 10, max_tokens=max_tokens)
        isolated.drain()
        assert len(isolated.tokens[1]) == max_tokens
        assert isolated.core.stats.scheduled_tokens == 10 + max_tokens - 1


def test_an_end_token_stops_and_is_counted() -> None:
    isolated = Isolated(64, sample=lambda i, p: 2 if p == 12 else default_sample(i, p))
    isolated.add(1, 10, max_tokens=9, ignore_eos=False)
    isolated.add(2, 10, max_tokens=9, ignore_eos=True)
    isolated.drain()
    assert isolated.status(1) == RequestStatus.STOPPED and isolated.finished[1].stop_token == 2
    assert len(isolated.tokens[1]) == 3 == isolated.finished[1].num_output_tokens
    assert isolated.status(2) == RequestStatus.LENGTH and len(isolated.tokens[2]) == 9


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    isolated = Isolated(64, sample=lambda i, p: 2 if p == 12 else default_sample(i, p))
    isolated.add(1, 10, max_tokens=3, ignore_eos=False)
    isolated.drain()
    assert isolated.status(1) == RequestStatus.STOPPED


def test_stop_token_ids_stop_under_ignore_eos_and_not_before_min_tokens() -> None:
    isolated = Isolated(64, sample=lambda i, p: 77 if p in (11, 14) else default_sample(i, p))
    isolated.add(1, 10, max_tokens=9, stop_token_ids=(77,))
    isolated.add(2, 10, max_tokens=9, stop_token_ids=(77,), min_tokens=4)
    isolated.drain()
    assert len(isolated.tokens[1]) == 2 and isolated.finished[1].stop_token == 77
    assert len(isolated.tokens[2]) == 5 and isolated.status(2) == RequestStatus.STOPPED


def test_a_requests_own_end_set_replaces_the_models() -> None:
    isolated = Isolated(64, sample=lambda i, p: {11: 2, 13: 7}.get(p, default_sample(i, p)))
    isolated.add(1, 10, max_tokens=9, ignore_eos=False, eos_token_ids=(7,))
    isolated.drain()
    assert len(isolated.tokens[1]) == 4 and isolated.finished[1].stop_token == 7


def test_priority_orders_the_queue_by_priority_then_arrival() -> None:
    isolated = Isolated(64, queue_policy="priority", max_num_seqs=1)
    for request_id, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        isolated.add(request_id, 8, max_tokens=1, priority=priority)
    isolated.drain()
    assert list(isolated.finished) == [4, 2, 1, 3]
