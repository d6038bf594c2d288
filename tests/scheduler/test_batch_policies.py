"""What fills a step: mixed, prefill first, one at a time, or batches that nobody joins."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.config import BATCH_NAMES
from tests.scheduler.isolated import Isolated, solo_tokens


def scheduled(isolated: Isolated, passes: int) -> list[dict[int, int]]:
    return [isolated.step() for _ in range(passes)]


def test_mixed_serves_decodes_first_and_fills_up_with_prefill_chunks() -> None:
    isolated = Isolated(64, max_num_batched_tokens=32)
    isolated.add(1, 10, max_tokens=9)
    isolated.step()
    isolated.add(2, 60, max_tokens=9)
    isolated.add(3, 60, max_tokens=9)
    assert scheduled(isolated, 4) == [{1: 1, 2: 31}, {1: 1, 2: 29, 3: 2}, {1: 1, 2: 1, 3: 30}, {1: 1, 2: 1, 3: 28}]
    isolated.drain()


def test_running_order_serves_the_older_prefill_before_the_younger_decode() -> None:
    isolated = Isolated(64, preset="vllm", max_num_batched_tokens=32)
    isolated.add(1, 60, max_tokens=9)
    isolated.step()
    isolated.add(2, 3, max_tokens=9)
    assert scheduled(isolated, 2) == [{1: 28, 2: 3}, {1: 1, 2: 1}]
    isolated.drain()


def test_prefill_first_lets_no_decode_ride_while_there_is_prefill_to_do() -> None:
    isolated = Isolated(64, batch_policy="prefill-first", max_num_batched_tokens=32)
    isolated.add(1, 10, max_tokens=9)
    isolated.step()
    isolated.add(2, 60, max_tokens=9)
    assert scheduled(isolated, 3) == [{2: 32}, {2: 28}, {1: 1, 2: 1}]
    isolated.drain()


def test_prefill_first_decodes_when_the_head_can_not_enter() -> None:
    isolated = Isolated(5, batch_policy="prefill-first", max_bypasses=0)
    isolated.add(1, 60, max_tokens=9)
    isolated.step()
    isolated.add(2, 60, max_tokens=2)
    assert isolated.step() == {1: 1}
    isolated.drain()


def test_serial_runs_one_request_to_its_end_at_a_time() -> None:
    isolated = Isolated(64, batch_policy="serial")
    for request_id in (1, 2, 3):
        isolated.add(request_id, 10, max_tokens=3)
    assert scheduled(isolated, 6) == [{1: 10}, {1: 1}, {1: 1}, {2: 10}, {2: 1}, {2: 1}]
    isolated.drain()


def test_dynamic_forms_a_batch_of_whoever_waits_and_nobody_joins_it() -> None:
    isolated = Isolated(64, batch_policy="dynamic", max_num_seqs=2)
    for request_id, outputs in ((1, 3), (2, 5), (3, 2)):
        isolated.add(request_id, 10, max_tokens=outputs)
    assert scheduled(isolated, 6) == [{1: 10, 2: 10}, {1: 1, 2: 1}, {1: 1, 2: 1}, {2: 1}, {2: 1}, {3: 10}]
    isolated.drain()


def test_static_waits_for_a_full_batch_and_after_some_passes_starts_a_smaller_one() -> None:
    isolated = Isolated(64, batch_policy="static", max_num_seqs=2)
    isolated.add(1, 10, max_tokens=2)
    assert scheduled(isolated, 3) == [{}, {}, {}]
    isolated.add(2, 10, max_tokens=2)
    assert isolated.step() == {1: 10, 2: 10}
    isolated.drain()
    isolated.add(3, 10, max_tokens=2)
    assert scheduled(isolated, 9) == [{}] * 8 + [{3: 10}]
    isolated.drain()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # three prompts of 800 tokens against a budget of 1,024 and a cap of 400
        ({}, [[400, 400, 224], [400, 400, 224], [1, 1, 352]]),
        ({"long_prefill_token_threshold_adaptive": True}, [[400, 400, 224], [400, 400, 224], [1, 1, 352]]),
        ({"long_prefill_token_threshold": 0}, [[800, 224], [1, 576, 447], [1, 1, 353]]),
    ],
)
def test_the_long_prefill_cap_splits_the_budget_among_prompts(
    config: dict[str, Any], expected: list[list[int]]
) -> None:
    isolated = Isolated(256, **({"long_prefill_token_threshold": 400, "max_num_batched_tokens": 1024} | config))
    for request_id in (1, 2, 3):
        isolated.add(request_id, 800, max_tokens=9)
    assert [[count for _, count in sorted(step.items())] for step in scheduled(isolated, 3)] == expected
    isolated.drain()


def test_the_adaptive_cap_gives_few_requests_an_even_share_of_the_budget() -> None:
    isolated = Isolated(
        256, long_prefill_token_threshold=100, long_prefill_token_threshold_adaptive=True, max_num_batched_tokens=1024
    )
    isolated.add(1, 800, max_tokens=9)
    isolated.add(2, 800, max_tokens=9)
    assert isolated.step() == {1: 512, 2: 512}
    isolated.drain()


@pytest.mark.parametrize("policy", BATCH_NAMES)
@pytest.mark.parametrize("delay", [0, 2])
def test_what_fills_a_step_changes_no_output(policy: str, delay: int) -> None:
    isolated = Isolated(12, batch_policy=policy, delay=delay, max_num_seqs=3, max_num_batched_tokens=24)
    load = [(20, 30), (33, 17), (5, 60), (48, 9), (16, 16)]
    for request_id, (prompt, outputs) in enumerate(load, start=1):
        isolated.add(request_id, prompt, max_tokens=outputs)
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, *each) for i, each in enumerate(load, start=1)}
