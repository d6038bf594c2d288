"""Steps in flight: late, stale, repeated and reordered results change nothing for anyone else."""

from __future__ import annotations

import msgspec
import pytest

from protocol.columns import i32, pack_i32, u64
from protocol.messages import RequestStatus, RowError, StepResult
from tests.scheduler.isolated import Isolated, default_sample, solo_tokens


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_outputs_do_not_depend_on_how_late_results_are(delay: int) -> None:
    isolated = Isolated(9, delay=delay, max_num_batched_tokens=24)
    for request_id, (prompt, outputs) in enumerate([(20, 30), (33, 17), (5, 60), (48, 9), (16, 16)], start=1):
        isolated.add(request_id, prompt, max_tokens=outputs)
    isolated.drain()
    for request_id, (prompt, outputs) in enumerate([(20, 30), (33, 17), (5, 60), (48, 9), (16, 16)], start=1):
        assert isolated.tokens[request_id] == solo_tokens(request_id, prompt, outputs)


def test_a_stop_in_flight_costs_one_row_whose_token_is_dropped() -> None:
    isolated = Isolated(16, delay=1, sample=lambda i, p: 2 if p == 12 else default_sample(i, p))
    isolated.add(1, 10, max_tokens=50, ignore_eos=False)
    isolated.drain()
    assert len(isolated.tokens[1]) == 3
    assert isolated.core.stats.stale_tokens == 1


def test_blocks_freed_with_a_step_in_flight_are_safe_for_their_next_owner() -> None:
    stop_at = {1: 31}
    isolated = Isolated(
        3, delay=1, sample=lambda i, p: 2 if p == stop_at.get(i) else default_sample(i, p), max_num_seqs=1
    )
    isolated.add(1, 20, max_tokens=60, ignore_eos=False)
    isolated.add(2, 40, max_tokens=9)
    isolated.drain()
    assert isolated.tokens[2] == solo_tokens(2, 40, 9)


def test_a_token_of_a_request_preempted_in_flight_is_kept() -> None:
    isolated = Isolated(16, delay=1)
    isolated.add(1, 10, max_tokens=8)
    isolated.step()
    isolated.core.preempt(isolated.core.requests[1])
    assert not isolated.tokens
    isolated.core.update(isolated.pending.popleft())
    isolated.collect()
    assert isolated.tokens[1] == solo_tokens(1, 10, 1)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 10, 8)


def test_a_late_token_of_an_earlier_incarnation_is_dropped() -> None:
    isolated = Isolated(16, delay=3)
    isolated.add(1, 10, max_tokens=8)
    isolated.step()
    isolated.core.preempt(isolated.core.requests[1])
    isolated.step()
    assert isolated.core.requests[1].incarnation == 2
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 10, 8)
    assert isolated.core.stats.stale_tokens == 1


def test_an_abort_between_dispatch_and_result_leaves_nothing_behind() -> None:
    isolated = Isolated(16, delay=2)
    isolated.add(1, 10, max_tokens=8)
    isolated.add(2, 10, max_tokens=8)
    isolated.step()
    isolated.step()
    isolated.abort(1)
    isolated.drain()
    assert isolated.tokens[2] == solo_tokens(2, 10, 8)
    assert isolated.status(1) == RequestStatus.ABORTED


def test_a_repeated_result_changes_nothing() -> None:
    isolated = Isolated(16)
    isolated.add(1, 10, max_tokens=4)
    step = isolated.core.schedule()
    assert step is not None
    result = isolated.runner.execute(step)
    for _ in range(3):
        isolated.core.update(result)
    isolated.collect()
    assert isolated.tokens[1] == solo_tokens(1, 10, 1)
    isolated.drain()


def test_a_result_that_comes_too_early_waits_for_its_turn() -> None:
    isolated = Isolated(16, delay=1)
    isolated.add(1, 10, max_tokens=4)
    isolated.add(2, 10, max_tokens=4)
    isolated.step()
    second = isolated.core.schedule()
    assert second is not None
    late = isolated.runner.execute(second)
    isolated.core.update(late)
    isolated.collect()
    assert not isolated.tokens, "position 11 can't be applied before position 10"
    isolated.core.update(isolated.pending.popleft())
    isolated.collect()
    assert {i: len(t) for i, t in isolated.tokens.items()} == {1: 2, 2: 2}
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 10, 4) for i in (1, 2)}


@pytest.mark.parametrize("change", ["epoch", "incarnations", "positions", "ids"])
def test_a_result_that_names_something_else_is_ignored(change: str) -> None:
    isolated = Isolated(16)
    isolated.add(1, 10, max_tokens=4)
    step = isolated.core.schedule()
    assert step is not None
    good = isolated.runner.execute(step)
    changes = {
        "epoch": {"epoch": good.epoch - 1},
        "incarnations": {"incarnations": pack_i32([7])},
        "positions": {"positions": pack_i32([3])},
        "ids": {"ids": b"\xff" * 8},
    }
    isolated.core.update(msgspec.structs.replace(good, **changes[change]))
    isolated.collect()
    assert not isolated.tokens and not isolated.finished
    assert not isolated.core.check()


def test_one_row_that_fails_ends_alone() -> None:
    isolated = Isolated(16)
    for request_id in (1, 2, 3):
        isolated.add(request_id, 10, max_tokens=4)
    step = isolated.core.schedule()
    assert step is not None
    good = isolated.runner.execute(step)
    keep = [index for index, request_id in enumerate(u64(good.ids).tolist()) if request_id != 2]
    bad = StepResult(
        good.epoch,
        good.step_id,
        u64(good.ids)[keep].tobytes(),
        i32(good.incarnations)[keep].tobytes(),
        i32(good.positions)[keep].tobytes(),
        i32(good.tokens)[keep].tobytes(),
        errors=[RowError(2, isolated.request(2).incarnation, "non_finite_logits", "row 1 has NaN")],
    )
    isolated.core.update(bad)
    isolated.collect()
    assert isolated.status(2) == RequestStatus.ERROR and isolated.finished[2].code == "non_finite_logits"
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 10, 4) and isolated.tokens[3] == solo_tokens(3, 10, 4)


def test_a_failed_step_is_computed_again_and_emits_nothing_twice() -> None:
    isolated = Isolated(16)
    isolated.add(1, 20, max_tokens=12)
    isolated.step()
    isolated.step()
    isolated.fail_next()
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 12)


def test_a_request_whose_steps_keep_failing_ends_with_the_cause() -> None:
    isolated = Isolated(16, max_step_failures=3)
    isolated.add(1, 20, max_tokens=12)
    for _ in range(3):
        isolated.fail_next("out_of_memory")
    assert isolated.status(1) == RequestStatus.ERROR and isolated.finished[1].code == "out_of_memory"
    isolated.add(2, 20, max_tokens=3)
    isolated.drain()
    assert isolated.tokens[2] == solo_tokens(2, 20, 3)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_lost_runner_costs_a_recompute_and_nothing_else(delay: int) -> None:
    isolated = Isolated(16, delay=delay)
    isolated.add(1, 20, max_tokens=12)
    isolated.add(2, 30, max_tokens=12, cache_salt="s")
    for _ in range(4):
        isolated.step()
    isolated.pending.clear()
    isolated.core.reset_runner(isolated.limits, b"n" * 16)
    isolated.core.epoch = 2
    isolated.runner = type(isolated.runner)(isolated.limits)
    isolated.drain()
    assert isolated.tokens == {1: solo_tokens(1, 20, 12), 2: solo_tokens(2, 30, 12)}


def test_a_request_submitted_with_what_it_has_emitted_goes_on_from_there() -> None:
    isolated = Isolated(16)
    whole = solo_tokens(1, 20, 12)
    isolated.tokens[1] = whole[:5]
    isolated.add(1, 20, max_tokens=12, emitted=whole[:5])
    isolated.drain()
    assert isolated.tokens[1] == whole


@pytest.mark.parametrize(("emitted", "status"), [(12, RequestStatus.LENGTH), (3, RequestStatus.STOPPED)])
def test_a_request_submitted_with_its_end_already_emitted_just_ends(emitted: int, status: RequestStatus) -> None:
    isolated = Isolated(16)
    tokens = solo_tokens(1, 20, emitted)
    if status == RequestStatus.STOPPED:
        tokens[-1] = 2
    isolated.tokens[1] = list(tokens)
    isolated.add(1, 20, max_tokens=12, emitted=tokens, ignore_eos=False)
    assert isolated.status(1) == status
    isolated.drain()
