"""The recovery contract: what is committed and what is pending, what a return restores, who frees what and when."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.columns import i32
from protocol.messages import FetchKv, KvStatus, RequestStatus
from tests.scheduler.isolated import Isolated, limits, solo_tokens

S = RequestStatus


def said(position: int) -> int:
    """Outputs 20, 21, 22, … to the prompt [10, 11, 12]."""
    return 17 + position


def emitted_two(**config: Any) -> Isolated:
    """Request 1 has said 20 and 21: the KV of 10, 11, 12 and 20 exists; 21 is known and not computed."""
    isolated = Isolated(8, sample=lambda _, position: said(position), **config)
    isolated.add(1, [10, 11, 12], max_tokens=5)
    while len(isolated.tokens.get(1, [])) < 2:
        isolated.step()
    assert isolated.tokens[1] == [20, 21]
    return isolated


def kv_of(isolated: Isolated, request_id: int) -> list[int | None]:
    """The tokens whose KV the runner has for a request, read from its pages."""
    row, size = isolated.runner.rows[request_id], isolated.limits.block_size
    return [isolated.runner.content[row["blocks"][p // size]][p % size] for p in range(row["computed"])]


# --- committed and pending --------------------------------------------------------------------------------------


def test_the_newest_token_is_known_and_has_no_kv() -> None:
    isolated = emitted_two()
    assert kv_of(isolated, 1) == [10, 11, 12, 20]
    isolated.preempt(1)
    assert list(i32(bytes(isolated.request(1).data))) == [10, 11, 12, 20, 21]
    assert isolated.request(1).high_water == 4


def test_recompute_restores_the_committed_rows_emits_nothing_and_then_consumes_the_pending_token_once() -> None:
    isolated = emitted_two(max_num_batched_tokens=4)
    isolated.preempt(1)
    assert isolated.step() == {1: 4} and isolated.tokens[1] == [20, 21], "four rows come back and nothing is said"
    assert kv_of(isolated, 1) == [10, 11, 12, 20]
    assert isolated.step() == {1: 1} and isolated.tokens[1] == [20, 21, 22], "21 is consumed, once"
    assert kv_of(isolated, 1) == [10, 11, 12, 20, 21]
    isolated.drain()
    assert isolated.tokens[1] == [20, 21, 22, 23, 24]


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 64])
def test_replayed_rows_are_counted_apart_whatever_the_chunks(budget: int) -> None:
    isolated = emitted_two(max_num_batched_tokens=budget)
    isolated.preempt(1)
    isolated.drain()
    stats = isolated.core.stats
    assert isolated.tokens[1] == [20, 21, 22, 23, 24]
    assert (stats.replayed_tokens, stats.scheduled_tokens) == (4, 3 + 4 + 4), "3 + 5 - 1 of use, and 4 again"
    assert stats.prompt_tokens == 3 and stats.generated_tokens == 5, "neither counts twice"


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_token_in_flight_at_the_preemption_is_heard_and_consumed_once(delay: int) -> None:
    isolated = Isolated(8, delay=delay, sample=lambda _, position: said(position))
    isolated.add(1, [10, 11, 12], max_tokens=5)
    for _ in range(delay + 1):
        isolated.step()
    isolated.preempt(1)
    isolated.drain()
    assert isolated.tokens[1] == [20, 21, 22, 23, 24]


# --- a reconstruction that fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["triptych", "vllm", "sglang", "credit"])
@pytest.mark.parametrize("chunks_before", [0, 1, 2])
def test_a_failed_reconstruction_gives_back_all_it_took(preset: str, chunks_before: int) -> None:
    """Also what earlier chunks of it had restored: pages, slot, reservation, and what the cache was told of them."""
    isolated = Isolated(8, preset=preset, max_num_batched_tokens=16)
    isolated.add(1, 40, max_tokens=9)
    while 1 not in isolated.tokens:
        isolated.step()
    isolated.preempt(1)
    isolated.control("reset_prefix_cache")
    for _ in range(chunks_before):
        isolated.step()
    isolated.fail_next()
    request, core = isolated.request(1), isolated.core
    assert request.status == S.PREEMPTED and request.blocks == [] and request.slot == -1
    assert core.pool.num_free == 8 and not any(core.pool.refs) and len(core.table) == 0
    assert core.refresh_stats().reserved_blocks == 0
    assert len(isolated.tokens[1]) == 1, "nothing was said"
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 40, 9)


def test_rows_of_a_failed_reconstruction_count_as_replayed_again() -> None:
    isolated = Isolated(8, enable_prefix_caching=False)
    isolated.add(1, 40, max_tokens=9)
    isolated.step()
    isolated.preempt(1)
    isolated.fail_next()
    assert isolated.core.stats.replayed_tokens == 40
    isolated.drain()
    assert isolated.core.stats.replayed_tokens == 40 + 41, "the failed step was to compute the pending token too"


@pytest.mark.parametrize("leaves", ["preempted", "cancelled"])
def test_rows_that_a_second_victim_had_not_come_to_do_not_count_as_replayed(leaves: str) -> None:
    isolated = Isolated(8, max_num_batched_tokens=16, enable_prefix_caching=False)
    isolated.add(1, 40, max_tokens=9)
    while 1 not in isolated.tokens:
        isolated.step()
    isolated.preempt(1)
    isolated.step()
    assert isolated.core.stats.replayed_tokens == 40, "as many as it is to compute again"
    if leaves == "preempted":
        isolated.preempt(1)
    else:
        isolated.abort(1)
    assert isolated.core.stats.replayed_tokens == 16, "as many as it has"
    isolated.drain()
    assert isolated.core.stats.replayed_tokens == (16 + 40 if leaves == "preempted" else 16)


def test_a_reconstruction_that_finds_no_room_takes_nothing() -> None:
    isolated = Isolated(4, enable_prefix_caching=False)
    isolated.add(1, 33, max_tokens=9)
    isolated.step()
    isolated.preempt(1)
    isolated.core.pool.hold(taken := [1, 2])
    free = isolated.core.pool.num_free
    assert isolated.core.schedule() is None
    assert isolated.core.pool.num_free == free and isolated.request(1).blocks == []
    assert isolated.request(1).held == {"blocks": 1}
    isolated.core.pool.release(taken)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 33, 9)


def test_when_the_step_that_copies_back_fails_host_and_device_are_free_again() -> None:
    limit = limits(8, host_blocks=8, kv_bytes_per_block=1 << 20)
    isolated = Isolated(8, limit=limit, recovery_policy="swap")
    isolated.add(1, 40, max_tokens=9)
    isolated.step()
    isolated.preempt(1)
    isolated.fail_next()
    request = isolated.request(1)
    assert request.status == S.PREEMPTED and request.blocks == [] and request.host_blocks == []
    assert isolated.core.pool.num_free == 8
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 40, 9)
    assert not isolated.core.suspension.check()


# --- cancelled --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recovery", ["recompute", "swap"])
def test_a_cancelled_request_never_resumes_and_cancelling_again_is_harmless(recovery: str) -> None:
    limit = limits(8, host_blocks=8, kv_bytes_per_block=1 << 20)
    isolated = Isolated(8, limit=limit, recovery_policy=recovery)
    isolated.add(1, 40, max_tokens=9)
    isolated.step()
    isolated.preempt(1)
    isolated.abort(1)
    isolated.abort(1)
    isolated.abort(1, 1, peer=3)
    assert isolated.step() == {}
    isolated.drain()
    assert isolated.status(1) == S.ABORTED and len(isolated.tokens[1]) == 1
    assert isolated.core.stats.finished == {"ABORTED": 1}


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_request_cancelled_while_it_is_reconstructed_says_nothing_more(delay: int) -> None:
    isolated = Isolated(8, delay=delay)
    isolated.add(1, 40, max_tokens=9)
    while 1 not in isolated.tokens:
        isolated.step()
    isolated.preempt(1)
    isolated.now += 1_000_000
    step = isolated.core.schedule()
    assert step is not None and step.new[0].id == 1
    isolated.pending.append(isolated.runner.execute(step))
    before = len(isolated.tokens[1])
    isolated.abort(1)
    assert isolated.core.pool.num_free == 8
    isolated.drain()
    assert len(isolated.tokens[1]) == before and isolated.core.stats.stale_tokens > 0


# --- a victim may free nothing ----------------------------------------------------------------------------------


def test_a_victim_frees_only_what_nobody_else_holds() -> None:
    isolated = Isolated(8)
    shared = list(range(100, 132))
    isolated.add(1, [*shared, 1], max_tokens=20)
    isolated.step()
    isolated.add(2, [*shared, 2], max_tokens=20)
    isolated.step()
    free = isolated.core.pool.num_free
    isolated.preempt(2)
    assert isolated.core.pool.num_free == free + 1, "only its own third block"
    isolated.drain()


def fetching() -> tuple[Isolated, FetchKv]:
    """Request 2 waits for a transfer into four of five pages; request 1 runs in the fifth."""
    isolated = Isolated(5)
    isolated.add(2, 66, max_tokens=2, kv_source="elsewhere")
    isolated.step()
    (order,) = isolated.orders()
    isolated.add(1, 10, max_tokens=3)
    isolated.step()
    assert len(i32(order.block_ids)) == 4 and isolated.core.pool.num_free == 0
    return isolated, order


@pytest.mark.parametrize("arrived", [0, 64])
def test_pages_of_an_aborted_transfer_stay_pinned_until_it_is_acknowledged(arrived: int) -> None:
    isolated, order = fetching()
    isolated.abort(2)
    assert isolated.status(2) == S.ABORTED and isolated.core.pool.num_free == 0, "four pages, none of them free"
    assert not isolated.core.check()
    isolated.core.on_kv_status(KvStatus(order.id, order.incarnation + 1, 0, "another transfer"))
    assert isolated.core.pool.num_free == 0, "an acknowledgement of something else frees nothing"
    isolated.core.on_kv_status(KvStatus(order.id, order.incarnation, arrived, "" if arrived else "aborted"))
    assert isolated.core.pool.num_free == 4
    isolated.core.on_kv_status(KvStatus(order.id, order.incarnation, arrived, ""))
    assert isolated.core.pool.num_free == 4 and not isolated.core.check(), "once is enough"


def test_a_transfer_that_takes_too_long_pins_its_pages_beyond_its_request() -> None:
    isolated, order = fetching()
    isolated.now += int(31e9)
    isolated.core.expire()
    assert isolated.request(2).status == S.WAITING and isolated.request(2).blocks == []
    assert isolated.core.pool.num_free == 0
    isolated.core.on_kv_status(KvStatus(order.id, order.incarnation, 0, "late"))
    assert isolated.core.pool.num_free == 4


def test_preempting_who_shares_pages_with_a_reader_frees_none_until_the_reader_lets_go() -> None:
    """A page that is read holds its reader's reference: four pages, their producer preempted, nothing is free."""
    isolated = Isolated(4)
    isolated.add(1, 60, max_tokens=3)
    isolated.step()
    pool, source = isolated.core.pool, list(isolated.request(1).blocks)
    pool.hold(source)
    isolated.preempt(1)
    assert pool.num_free == 0 and isolated.request(1).blocks == []
    assert pool.release(source) == 4
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 60, 3)


def test_the_host_side_of_a_copy_is_pinned_until_the_step_that_makes_it_is_sent() -> None:
    limit = limits(8, host_blocks=3, kv_bytes_per_block=1 << 20)
    isolated = Isolated(8, limit=limit, recovery_policy="swap")
    isolated.add(1, 40, max_tokens=9)
    isolated.step()
    isolated.preempt(1)
    isolated.abort(1)
    isolated.add(2, 40, max_tokens=9)
    assert isolated.core.suspension._host.num_free == 0, "the copy out is ordered and not sent"
    isolated.step()
    assert isolated.core.suspension._host.num_free == 3
    isolated.drain()
