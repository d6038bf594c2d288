"""Conformance: results may come late, twice, or not at all as hoped; only the right one counts."""

from __future__ import annotations

import pytest

from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import RequestStatus, StepResult
from tests.conformance.chain import Chain
from tests.conformance.ends import limits


def test_results_that_come_late_come_in_order_and_lose_nothing(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    runner.holding = True
    for request_id in (1, 2, 3):
        api.submit(request_id, 5 * request_id, 9)
    chain.until(lambda: runner.held, "a step")
    chain.until_steps_stop(api)
    depth = len(runner.held)
    while not api.has(1, 2, 3):
        waited = len(api.statuses) + 2  # towards the end there is less to compute than may be in flight
        chain.until(
            lambda enough=waited: len(runner.held) == depth or len(api.statuses) >= enough or api.has(1, 2, 3),
            "a full pipeline",
        )
        runner.release(1)
    api.assert_complete(1, 2, 3)


def test_a_result_that_comes_twice_counts_once(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    runner.holding = True
    api.submit(1, 6, 12)
    api.submit(2, 6, 12)
    while not api.has(1, 2):
        chain.until(lambda: runner.held or api.has(1, 2), "a step")
        if runner.held:
            runner.send(runner.held[0])
            runner.release(1)
    api.assert_complete(1, 2)


@pytest.mark.parametrize("wrong", ["incarnation", "position", "id", "step", "epoch"])
def test_a_result_that_is_about_something_else_changes_nothing(chain: Chain, wrong: str) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 6, 30)
    chain.until(lambda: len(api.tokens[1]) > 4, "some tokens")
    runner.holding = True
    chain.until(lambda: runner.held and len(runner.held[0].ids), "a step in flight")
    due = runner.held[0]
    changes: dict[str, StepResult] = {
        "incarnation": forge(due, incarnations=pack_i32(i32(due.incarnations) - 1)),
        "position": forge(due, positions=pack_i32(i32(due.positions) + 1)),
        "id": forge(due, ids=pack_u64(u64(due.ids) + 5)),
        "step": forge(due, step_id=due.step_id + 1000),
        "epoch": forge(due, epoch=due.epoch + 1),
    }
    if wrong in ("incarnation", "position", "id"):
        # It takes the place of the true result: nothing of it may count, and the next epoch goes on from before it.
        runner.send(changes[wrong])
        runner.held.popleft()
        chain.until_statuses(api, 1)
        runner.leave()
    else:
        runner.send(changes[wrong])
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def forge(due: StepResult, **changes: object) -> StepResult:
    """A copy of a result with a wrong token and these changes."""
    values = {name: getattr(due, name) for name in due.__struct_fields__}
    return StepResult(**{**values, "tokens": pack_i32([999] * (len(due.ids) // 8)), **changes})


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_step_that_fails_is_computed_again_under_a_larger_incarnation(chain: Chain, after: int) -> None:
    runner, api = chain.begin(limits())
    runner.failures = int(after == 0)
    api.submit(1, 20, 15)
    api.submit(2, 6, 15)
    chain.until(lambda: len(api.tokens[1]) >= after, "some tokens")
    runner.failures = runner.failures or int(after > 0)
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(1, 2)
    assert runner.failures == 0


def test_a_failure_with_other_steps_in_flight_behind_it_costs_no_token(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 20, 30)
    api.submit(2, 20, 30)
    chain.until(lambda: len(api.tokens[1]) > 3, "some tokens")
    runner.holding = True
    runner.failures = 1
    chain.until(lambda: any(result.failure for result in runner.held), "a failed step")
    chain.until_steps_stop(api)
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(1, 2)


def test_a_request_whose_steps_keep_failing_ends_with_the_error_and_the_next_one_runs(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    runner.failures = 50
    api.submit(1, 6, 15)
    chain.until(lambda: api.has(1), "the end")
    assert api.finished[1].status == RequestStatus.ERROR
    assert api.finished[1].code == "device_error"
    assert api.finished[1].message
    runner.failures = 0
    api.submit(2, 6, 15)
    chain.until(lambda: api.has(2), "the next one's end")
    api.assert_complete(2)


def test_a_row_that_fails_ends_alone_with_its_error(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    for request_id in (1, 2, 3):
        api.submit(request_id, 6, 20)
    chain.until(lambda: len(api.tokens[2]) > 4, "some tokens")
    runner.row_errors[2] = ("non_finite", "logits of request 2 are not finite")
    chain.until(lambda: api.has(1, 2, 3), "all ends")
    api.assert_complete(1, 3)
    end = api.finished[2]
    assert (end.status, end.code) == (RequestStatus.ERROR, "non_finite")
    assert "not finite" in end.message


def test_a_row_that_fails_at_its_first_token_does_not_spoil_its_prompt_for_others(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    prompt = list(range(100, 120))
    runner.row_errors[1] = ("non_finite", "made to fail")
    api.submit(1, prompt, 5)
    chain.until(lambda: api.has(1), "the error")
    assert (api.finished[1].status, api.tokens[1]) == (RequestStatus.ERROR, [])
    api.submit(2, prompt, 5)
    chain.until(lambda: api.has(2), "the end")
    api.assert_complete(2)
