"""How victims return without computing all again: by copies to the host, or whichever way has shown to be faster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protocol.columns import i32
from protocol.messages import RequestStatus, Step
from scheduler.policies.recovery import Auto, HostPool, Loss, MeasuredRates
from tests.scheduler.isolated import Isolated, limits, solo_tokens


def swapping(usable: int, host_blocks: int, **config: Any) -> Isolated:
    limit = limits(usable, host_blocks=host_blocks, kv_bytes_per_block=1 << 20)
    return Isolated(usable, limit=limit, **({"recovery_policy": "swap"} | config))


def host_free(isolated: Isolated) -> int:
    return isolated.core.suspension._host.num_free


def last_step(isolated: Isolated) -> Step:
    step = isolated.steps[-1]
    assert step is not None
    return step


# --- swap -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("after", [0, 1, 11, 12, 13, 28, 29])
def test_a_swapped_request_goes_on_exactly_where_it_was(after: int, delay: int) -> None:
    isolated = swapping(64, 16, delay=delay)
    isolated.add(1, 20, max_tokens=40)
    while len(isolated.tokens.get(1, [])) < after:
        isolated.step()
    isolated.preempt(1)
    isolated.step()
    isolated.preempt(1)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 40)
    assert isolated.core.stats.replayed_tokens == 0 and host_free(isolated) == 16


def test_copies_out_go_before_the_next_owner_writes_and_copies_in_before_anybody_reads() -> None:
    """The fake runner keeps contents: a copy at the wrong time shows as a foreign token."""
    isolated = swapping(6, 8, max_num_seqs=2)
    isolated.add(1, 40, max_tokens=40)
    isolated.add(2, 40, max_tokens=40)
    isolated.drain()
    assert isolated.core.stats.preemptions > 0 and isolated.core.suspension.swapped_out_blocks > 0
    assert isolated.tokens == {i: solo_tokens(i, 40, 40) for i in (1, 2)}


def test_a_request_that_is_preempted_can_return_in_the_very_next_step() -> None:
    isolated = swapping(8, 8)
    isolated.add(1, 40, max_tokens=9)
    isolated.step()
    isolated.preempt(1)
    assert isolated.step() == {1: 1}
    assert len(i32(last_step(isolated).swap_out)) == len(i32(last_step(isolated).swap_in)) == 6
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 40, 9)


@pytest.mark.parametrize("host_blocks", [0, 2])
def test_a_host_pool_that_is_too_small_means_recompute(host_blocks: int) -> None:
    isolated = swapping(8, host_blocks)
    for request_id in (1, 2, 3):
        isolated.add(request_id, 48, max_tokens=30)
    isolated.drain()
    assert isolated.core.suspension.swapped_out_blocks == 0 and isolated.core.stats.preemptions > 0
    assert isolated.tokens == {i: solo_tokens(i, 48, 30) for i in (1, 2, 3)}


def test_swapped_requests_return_before_new_ones_enter() -> None:
    isolated = swapping(8, 8, max_num_seqs=2)
    isolated.add(1, 50, max_tokens=30)
    isolated.add(2, 50, max_tokens=30)
    isolated.step()
    isolated.preempt(2)
    isolated.add(3, 10, max_tokens=2)
    isolated.step()
    assert isolated.running() == [1, 2]
    assert isolated.request(3).held == {"slots": 1}
    isolated.drain()
    assert isolated.tokens == {1: solo_tokens(1, 50, 30), 2: solo_tokens(2, 50, 30), 3: solo_tokens(3, 10, 2)}


def test_in_a_queue_by_priority_an_urgent_arrival_goes_before_those_swapped_for_it() -> None:
    isolated = swapping(16, 16, queue_policy="priority", max_num_seqs=2)
    for request_id in (1, 2):
        isolated.add(request_id, 20, max_tokens=60, priority=50)
    isolated.step()
    for request_id in (3, 4):
        isolated.add(request_id, 20, max_tokens=5, priority=0)
    isolated.step()
    isolated.step()
    assert sorted(isolated.running()) == [3, 4] and len(isolated.core.waiting.swapped) == 2
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 60)


def test_a_token_in_flight_at_the_swap_is_kept_and_consumed_after_the_return() -> None:
    isolated = swapping(8, 8, delay=2)
    isolated.add(1, 20, max_tokens=9)
    isolated.step()
    isolated.step()
    isolated.preempt(1)
    assert not isolated.tokens
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 9) and isolated.core.stats.stale_tokens == 0


def test_an_abort_while_swapped_frees_the_host() -> None:
    isolated = swapping(8, 8)
    isolated.add(1, 40, max_tokens=9)
    isolated.add(2, 40, max_tokens=9)
    isolated.step()
    isolated.preempt(2)
    assert host_free(isolated) == 5
    isolated.abort(2)
    isolated.drain()
    assert host_free(isolated) == 8 and isolated.tokens[1] == solo_tokens(1, 40, 9)


@pytest.mark.parametrize("delay", [0, 2])
def test_when_the_step_that_copies_out_fails_the_copy_is_not_trusted(delay: int) -> None:
    isolated = swapping(8, 8, delay=delay)
    isolated.add(1, 40, max_tokens=9)
    isolated.add(2, 40, max_tokens=9)
    for _ in range(delay + 1):
        isolated.step()
    isolated.preempt(2)
    isolated.core.table.limit = 1  # it can't return yet
    isolated.fail_next()
    while isolated.pending:
        isolated.core.update(isolated.pending.popleft())
    isolated.collect()
    isolated.core.table.limit = 8
    assert not isolated.core.waiting.swapped and host_free(isolated) + len(isolated.core.suspension._emptied) == 8
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 40, 9) for i in (1, 2)}


def test_a_lost_runner_takes_the_host_copies_along() -> None:
    isolated = swapping(8, 8)
    isolated.add(1, 40, max_tokens=9)
    isolated.add(2, 40, max_tokens=9)
    isolated.step()
    isolated.preempt(2)
    isolated.core.table.limit = 1
    isolated.step()
    isolated.lose_runner()
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 40, 9) for i in (1, 2)} and host_free(isolated) == 8


def test_an_open_session_is_never_swapped() -> None:
    isolated = swapping(8, 8, max_num_batched_tokens=8)
    isolated.add(1, 20, open=True)
    isolated.step()
    isolated.preempt(1)
    assert isolated.core.suspension.swapped_out_blocks == 0
    isolated.extend(1, [], last=True)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 4)


# --- auto -------------------------------------------------------------------------------------------------------


def rates(prefill: float, copy: float) -> MeasuredRates:
    measured = MeasuredRates()
    measured.prefill_tokens_per_s, measured.copy_bytes_per_s = prefill, copy
    return measured


@pytest.mark.parametrize(
    ("cached", "copy_rate", "swaps"),
    [(0, 1e9, True), (960, 1e9, False), (0, 1e8, False), (512, 1e9, True)],
)
def test_auto_takes_the_cheaper_way_by_what_was_measured(cached: int, copy_rate: float, swaps: bool) -> None:
    """1,024 tokens in 64 blocks of 1 MiB. Both ways at 1 GB/s: 134 ms; prefill of all at 5,000 tokens/s: 205 ms."""
    policy = Auto()
    if cached == 512:
        copy_rate = 2e9  # 67 ms against 102 ms
    loss = Loss(computed=1024, num_blocks=64, cached_tokens=cached, bytes_per_block=1 << 20)
    assert policy.swaps(loss, HostPool(64), rates(5000, copy_rate)) is swaps
    assert ("swap:" if swaps else "recompute:") in policy.last
    assert f"{1024 - cached} of 1024 tokens" in policy.last and "tokens/s" in policy.last and "GB/s" in policy.last


def test_auto_recomputes_when_the_host_is_full_whatever_the_rates() -> None:
    policy = Auto()
    assert not policy.swaps(Loss(1024, 64, 0, 1), HostPool(63), rates(1.0, 1e12))
    assert policy.last == "recompute: 64 blocks wanted on the host, 63 free"


def test_auto_swaps_one_large_victim_to_learn_what_a_copy_costs_and_no_small_one() -> None:
    policy, host = Auto(), HostPool(100)
    assert not policy.swaps(Loss(255, 16, 0, 1), host, rates(5000, 0))
    assert policy.swaps(Loss(256, 16, 0, 1), host, rates(5000, 0))
    assert not policy.swaps(Loss(256, 16, 0, 1), host, rates(0, 0))


def test_rates_come_from_steps_that_are_mostly_prefill_and_from_steps_that_copy() -> None:
    isolated = swapping(64, 64, recovery_policy="auto")
    isolated.add(1, 512, max_tokens=9)
    step = isolated.core.schedule()
    assert step is not None
    result = msgspec.structs.replace(isolated.runner.execute(step), execute_ns=100_000_000)
    isolated.core.update(result)
    measured = isolated.core.suspension.rates
    assert measured.prefill_tokens_per_s == pytest.approx(5120) and measured.copy_bytes_per_s == 0
    isolated.preempt(1)
    step = isolated.core.schedule()
    assert step is not None and len(i32(step.swap_out)) == 64
    result = msgspec.structs.replace(isolated.runner.execute(step), execute_ns=5_000_000, copy_ns=4_000_000)
    isolated.core.update(result)
    assert measured.copy_bytes_per_s == pytest.approx(64 * (1 << 20) / 0.004)
    assert measured.prefill_tokens_per_s == pytest.approx(5120), "a decode step says nothing about prefill"
    isolated.collect()
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 512, 9)


def test_the_age_bound_holds_for_swapped_requests_in_a_queue_by_priority() -> None:
    isolated = Isolated(
        64,
        queue_policy="priority",
        max_num_seqs=1,
        recovery_policy="swap",
        limit=limits(64, host_blocks=64),
        max_queue_age_s=0.05,
    )
    isolated.add(1, 20, max_tokens=20, priority=100)
    for _ in range(5):
        isolated.step()
    isolated.add(2, 8, max_tokens=2, priority=95)
    isolated.preempt(1)
    assert isolated.request(1).host_blocks
    for urgent in range(10, 200, 2):
        isolated.add(urgent, 8, max_tokens=2, priority=95)
        isolated.add(urgent + 1, 8, max_tokens=2, priority=95)
        isolated.step()
        if isolated.request(1).status == RequestStatus.RUNNING:
            break
    assert isolated.request(1).status == RequestStatus.RUNNING
    assert isolated.now - isolated.request(1).queued_ns <= 70_000_000
    isolated.drain()


def test_the_age_of_a_swapped_request_counts_from_its_swap() -> None:
    isolated = Isolated(
        64,
        queue_policy="priority",
        max_num_seqs=1,
        recovery_policy="swap",
        limit=limits(64, host_blocks=64),
        max_queue_age_s=0.05,
    )
    isolated.add(1, 20, max_tokens=200, priority=100)
    for _ in range(80):
        isolated.step()
    isolated.preempt(1)
    isolated.add(2, 8, max_tokens=2, priority=95)
    isolated.step()
    assert isolated.running() == [2]
    isolated.drain()
