"""Everything accepted ends: measured passes beside the bound of docs/guarantees.md, for every policy.

The bound is arithmetic over what was asked and how often each was preempted; nothing in it looks at the scheduler.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.config import (
    ADMISSION_NAMES,
    BATCH_NAMES,
    PRESET_NAMES,
    QUEUE_NAMES,
    RECOVERY_NAMES,
    VICTIM_NAMES,
)
from tests.scheduler.isolated import Isolated, limits, solo_tokens

IDLE = 9
"""Passes without work for each residency: a static batch waits 8 for company, and one is lost when a victim leaves."""

Load = list[tuple[int, int]]


def passes_within(load: Load, preemptions: dict[int, int], delay: int) -> int:
    """Σ (1 + p)·(P + N + 2d + 9) + d: each residency computes each position once, and little else takes a pass."""
    return delay + sum(
        (1 + preemptions[request_id]) * (prompt + outputs + 2 * delay + IDLE)
        for request_id, (prompt, outputs) in enumerate(load, start=1)
    )


def run(load: Load, usable: int, delay: int, host_blocks: int, **config: Any) -> tuple[Isolated, int]:
    """All of the load at once, then no more. Returns the scheduler and the passes it took."""
    isolated = Isolated(
        usable, delay=delay, limit=limits(usable, host_blocks=host_blocks, kv_bytes_per_block=1024), **config
    )
    for request_id, (prompt, outputs) in enumerate(load, start=1):
        shared = [300 + j for j in range(min(prompt, 32))] if request_id % 3 == 0 else []
        own = [(request_id * 131 + j) % 40_000 for j in range(prompt - len(shared))]
        isolated.add(
            request_id,
            shared + own,
            max_tokens=outputs,
            priority=request_id % 3,
            tenant=str(request_id % 2),
            routing_key=str(request_id % 4),
            deadline_ms=prompt,
        )
    return isolated, isolated.drain(50_000)


LOADS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=2, max_size=8)


@pytest.mark.parametrize("admission", ADMISSION_NAMES)
@pytest.mark.parametrize("queue", QUEUE_NAMES)
@settings(max_examples=examples(3), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    load=LOADS,
    usable=st.integers(6, 10),
    delay=st.integers(0, 3),
    host_blocks=st.sampled_from([0, 3, 20]),
    budget=st.sampled_from([3, 16, 64]),
    batch=st.sampled_from(BATCH_NAMES),
    victim=st.sampled_from(VICTIM_NAMES),
    recovery=st.sampled_from(RECOVERY_NAMES),
    preset=st.sampled_from(PRESET_NAMES),
)
def test_a_load_that_has_come_ends_within_the_stated_bound(
    queue: str,
    admission: str,
    load: Load,
    usable: int,
    delay: int,
    host_blocks: int,
    budget: int,
    batch: str,
    victim: str,
    recovery: str,
    preset: str,
) -> None:
    isolated, passes = run(
        load,
        usable,
        delay,
        host_blocks,
        queue_policy=queue,
        admission_policy=admission,
        max_num_batched_tokens=budget,
        batch_policy=batch,
        victim_policy=victim,
        recovery_policy=recovery,
        preset=preset,
        max_num_seqs=4,
    )
    assert isolated.tokens == {i: solo_tokens(i, prompt, n) for i, (prompt, n) in enumerate(load, start=1)}
    preemptions = {request_id: end.num_preemptions for request_id, end in isolated.finished.items()}
    assert passes <= passes_within(load, preemptions, delay)
    if admission == "credit":
        assert not any(preemptions.values())


@pytest.mark.parametrize("queue", QUEUE_NAMES)
@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    load=LOADS,
    usable=st.integers(5, 10),
    delay=st.integers(0, 3),
    host_blocks=st.sampled_from([0, 3, 20]),
    budget=st.sampled_from([2, 7, 16, 64]),
    slots=st.integers(2, 8),
    admission=st.sampled_from(ADMISSION_NAMES),
    batch=st.sampled_from(BATCH_NAMES),
    victim=st.sampled_from(VICTIM_NAMES),
    recovery=st.sampled_from(RECOVERY_NAMES),
    most=st.integers(1, 3),
    caching=st.booleans(),
    objectives=st.sampled_from([{}, {"slo_ttft_s": 0.03, "slo_tpot_s": 0.002}]),
)
def test_a_guarded_preset_preempts_nobody_more_often_than_its_bound_whatever_the_policies(
    queue: str, load: Load, usable: int, delay: int, host_blocks: int, budget: int, slots: int, admission: str,
    batch: str, victim: str, recovery: str, most: int, caching: bool, objectives: dict[str, float],
) -> None:  # fmt: skip
    isolated, passes = run(
        load,
        usable,
        delay,
        host_blocks,
        queue_policy=queue,
        admission_policy=admission,
        max_num_batched_tokens=budget,
        batch_policy=batch,
        victim_policy=victim,
        recovery_policy=recovery,
        max_num_seqs=slots,
        max_preemptions=most,
        **objectives,
        enable_prefix_caching=caching or queue in ("lpm", "dfs-weight", "hrrn", "shortest-prefill"),
    )
    assert max(end.num_preemptions for end in isolated.finished.values()) <= most
    assert passes <= passes_within(load, dict.fromkeys(range(1, len(load) + 1), most), delay)


@pytest.mark.parametrize(
    ("load", "usable", "delay", "config"),
    [
        (
            [(53, 43), (16, 27), (34, 36), (49, 50), (39, 13), (54, 43), (49, 17), (54, 9)], 7, 3,
            {"queue_policy": "lof", "victim_policy": "least-progress", "max_preemptions": 1, "max_num_seqs": 2,
             "max_num_batched_tokens": 2, "batch_policy": "prefill-first", "long_prefill_token_threshold": 4,
             "enable_prefix_caching": False},
        ),
        (
            [(3, 12), (11, 15), (35, 24), (5, 35), (47, 45), (15, 38)], 5, 2,
            {"queue_policy": "priority", "victim_policy": "last-admitted", "max_preemptions": 3, "max_num_seqs": 8,
             "max_num_batched_tokens": 16, "batch_policy": "prefill-first", "long_prefill_token_threshold": 4,
             "priority_preemption_threshold": -1},
        ),
    ],
)  # fmt: skip
def test_two_that_keep_pushing_each_other_out_stop_at_the_bound(
    load: Load, usable: int, delay: int, config: dict[str, object]
) -> None:
    isolated, _ = run(load, usable, delay, 0, **config)
    assert max(end.num_preemptions for end in isolated.finished.values()) <= isolated.config.max_preemptions
