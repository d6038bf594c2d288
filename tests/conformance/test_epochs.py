"""Conformance: a new welcome voids what the runner held; streams go on, with no token lost or told twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.columns import pack_i32, pack_u64
from protocol.messages import RequestStatus, StepResult
from tests.conformance.chain import Chain
from tests.conformance.ends import RunnerEnd, limits

LOSSES: dict[str, Callable[[RunnerEnd], None]] = {
    "goodbye": RunnerEnd.leave,
    "forgotten-session": RunnerEnd.lose,
    "broken-connection": RunnerEnd.rebind,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_runner_that_comes_back_empty_gets_everything_again_under_the_new_epoch(chain: Chain, loss: str) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 20, 40)
    api.submit(2, 6, 30)
    chain.until(lambda: len(api.tokens[1]) > 8, "some tokens")
    epoch = runner.epoch
    LOSSES[loss](runner)
    runner.install(limits())
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(1, 2)
    assert runner.epoch == epoch + 1
    assert runner.hellos[-1].epoch == epoch, "the hello carries the largest epoch it has seen"
    assert {seen.arrived[1] for seen in runner.judge.steps if 1 in seen.arrived} == {0}, "an empty pool has no hits"
    assert api.finished[1].num_preemptions >= 1


def test_three_losses_in_a_row_lose_no_token(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 20, 60)
    for loss in range(3):
        chain.until(lambda least=15 * loss + 5: len(api.tokens[1]) > least, "more tokens")
        runner.lose()
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_a_loss_with_steps_in_flight_and_requests_waiting_loses_neither(chain: Chain) -> None:
    runner, api = chain.begin(limits(max_num_seqs=2))
    runner.holding = True
    for request_id in range(1, 6):
        api.submit(request_id, 10, 10)
    chain.until(lambda: runner.held, "a step in flight")
    runner.leave()
    runner.holding = False
    chain.until(lambda: api.has(*range(1, 6)), "all ends")
    api.assert_complete(*range(1, 6))


def test_a_result_of_an_older_epoch_changes_nothing(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 6, 40)
    chain.until(lambda: len(api.tokens[1]) > 4, "some tokens")
    runner.leave()
    chain.until(lambda: len(api.tokens[1]) > 8, "more tokens")
    runner.holding = True
    chain.until(lambda: runner.held, "a step in flight")
    due = runner.held[0]
    forged = StepResult(
        runner.epoch - 1, due.step_id, due.ids, due.incarnations, due.positions, pack_i32([999] * (len(due.ids) // 8))
    )
    runner.send(forged)
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


@pytest.mark.needs("prefix-cache")
def test_pages_that_a_runner_still_holds_are_a_warm_cache_under_the_new_epoch(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 24, 4)
    chain.until(lambda: api.has(1), "the end")
    runner.leave()
    chain.until_ready(api)
    assert runner.judge.inventory
    api.submit(2, list(chain.world.asked[1].prompt), 4)
    chain.until(lambda: api.has(2), "the end")
    api.assert_complete(2)
    assert runner.judge.steps[-1].step_id
    assert max(seen.arrived.get(2, 0) for seen in runner.judge.steps) == 20
    assert api.finished[2].num_cached_tokens == 20


def test_another_runner_with_empty_pages_is_not_taken_for_the_former_one(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 24, 4)
    chain.until(lambda: api.has(1), "the end")
    runner.leave()
    runner.install(limits())
    chain.until_ready(api)
    api.submit(2, list(chain.world.asked[1].prompt), 4)
    chain.until(lambda: api.has(2), "the end")
    api.assert_complete(2)
    assert api.finished[2].num_cached_tokens == 0


def test_a_runner_that_comes_back_smaller_ends_what_no_longer_fits_and_serves_the_rest(chain: Chain) -> None:
    runner, api = chain.begin(limits(64))
    runner.holding = True
    api.submit(1, 60 if "chunked-prefill" not in chain.subject.lacks else 30, 60)
    api.submit(2, 6, 6)
    chain.until(lambda: runner.held, "a step in flight")
    runner.leave()
    runner.install(limits(5))
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(2)
    assert api.finished[1].status in (RequestStatus.LENGTH, RequestStatus.IGNORED, RequestStatus.ERROR)
    api.submit(3, 30, 2)
    chain.until(lambda: 3 in api.rejected, "a refusal by the new limits")


def test_aborts_between_two_epochs_hold(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 6, 60)
    api.submit(2, 6, 30)
    chain.until(lambda: len(api.tokens[1]) > 4, "some tokens")
    runner.welcoming = False
    runner.leave()
    chain.until(lambda: api.status and api.status.runner == "absent", "the loss to be reported")
    api.abort(1)
    chain.until(lambda: api.has(1), "the aborted one's end")
    runner.welcoming = True
    chain.until(lambda: api.has(2), "the other's end")
    api.assert_complete(2)
    assert not any(1 in seen.arrived for seen in runner.judge.steps if seen.epoch == runner.epoch)


def test_a_result_for_a_step_that_was_never_sent_changes_nothing(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    runner.send(StepResult(runner.epoch, 10**9, pack_u64([1]), pack_i32([1]), pack_i32([6]), pack_i32([999])))
    api.submit(1, 6, 10)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)
