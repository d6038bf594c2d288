"""Conformance: a request may be given up in every state, ends once, and takes nobody along."""

from __future__ import annotations

from protocol.messages import RequestStatus, Step
from tests.conformance.chain import Chain
from tests.conformance.ends import ApiEnd, RunnerEnd, limits


def assert_aborted(chain: Chain, api: ApiEnd, request_id: int) -> None:
    chain.until(lambda: api.has(request_id), "the end of the aborted request")
    assert api.finished[request_id].status == RequestStatus.ABORTED
    assert api.finished[request_id].num_output_tokens >= len(api.tokens[request_id])


def go_on(chain: Chain, runner: RunnerEnd, api: ApiEnd, *ids: int) -> None:
    """Let these finish, undisturbed."""
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(*ids), "the other ends")
    api.assert_complete(*ids)


def test_while_it_waits_for_a_slot(chain: Chain) -> None:
    runner, api = chain.begin(limits(max_num_seqs=1))
    runner.holding = True
    api.submit(1, 5, 8)
    chain.until(lambda: runner.held, "a step")
    api.submit(2, 5, 8)
    api.submit(3, 5, 8)
    api.abort(2)
    assert_aborted(chain, api, 2)
    go_on(chain, runner, api, 1, 3)
    assert not any(2 in seen.counts for seen in runner.judge.steps), "it was never computed"


def test_while_there_is_no_runner(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    runner.welcoming = False
    runner.leave()
    chain.until(lambda: api.status and api.status.runner == "absent", "the loss to be reported")
    api.submit(1, 5, 8)
    api.submit(2, 5, 8)
    api.abort(1)
    assert_aborted(chain, api, 1)
    runner.welcoming = True
    go_on(chain, runner, api, 2)


def test_before_there_ever_was_a_runner(fresh_chain: Chain) -> None:
    fresh_chain.start()
    api = fresh_chain.connected()
    api.submit(1, 5, 8)
    api.submit(2, 5, 8)
    api.abort(1)
    runner = fresh_chain.start_runner()
    fresh_chain.until(lambda: api.has(2), "the other end")
    api.assert_complete(2)
    assert_aborted(fresh_chain, api, 1)
    assert not any(1 in seen.counts for seen in runner.judge.steps), "it was never computed"


def test_between_the_parts_of_its_prompt(chain: Chain) -> None:
    runner, api = chain.begin(limits(max_num_batched_tokens=200 if "chunked-prefill" in chain.subject.lacks else 16))
    runner.holding = True
    api.submit(1, 100, 8)
    api.submit(2, 5, 8)
    chain.until(lambda: runner.held, "a step")
    api.abort(1)
    assert_aborted(chain, api, 1)
    go_on(chain, runner, api, 2)


def test_while_it_decodes_with_steps_in_flight(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 5, 60)
    api.submit(2, 5, 60)
    chain.until(lambda: len(api.tokens[1]) > 5, "some tokens")
    runner.holding = True
    chain.until(lambda: runner.held and 1 in runner.judge.steps[-1].counts, "a step in flight")
    api.abort(1)
    assert_aborted(chain, api, 1)
    go_on(chain, runner, api, 2)


def test_with_its_pages_given_to_another_while_its_step_is_in_flight(chain: Chain) -> None:
    """The pool holds one of them at a time: the second gets exactly the pages that the first's last step writes."""
    runner, api = chain.begin(limits(4))
    api.submit(1, 8, 8)
    chain.until(lambda: len(api.tokens[1]) > 2, "some tokens")
    runner.holding = True
    chain.until(lambda: runner.held and 1 in runner.judge.steps[-1].counts, "a step in flight")
    api.submit(2, 12, 4)
    api.abort(1)
    assert_aborted(chain, api, 1)
    go_on(chain, runner, api, 2)


def test_while_it_is_preempted(chain: Chain) -> None:
    runner, api = chain.begin(limits(8))

    def hold_once_preempted(step: Step) -> None:
        runner.holding = runner.holding or bool(runner.judge.preempted() - api.finished.keys())

    runner.after_step = hold_once_preempted
    api.submit(1, 8, 20)
    api.submit(2, 8, 20)
    chain.until(lambda: runner.holding, "a preemption")
    victim = min(runner.judge.preempted())
    api.abort(victim)
    assert_aborted(chain, api, victim)
    assert api.finished[victim].num_preemptions >= 1
    runner.after_step = lambda step: None
    go_on(chain, runner, api, 3 - victim)


def test_twice_and_after_its_end_it_changes_nothing(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 5, 60)
    api.submit(2, 5, 4)
    chain.until(lambda: api.has(2), "the first end")
    api.abort(1, 1)
    api.abort(1)
    api.abort(2)
    assert_aborted(chain, api, 1)
    api.submit(3, 5, 4)
    go_on(chain, runner, api, 3)
    api.assert_complete(2)


def test_of_an_unknown_request_or_somebody_elses_is_ignored(chain: Chain) -> None:
    runner, one = chain.begin(limits())
    two = chain.connected()
    one.submit(1, 5, 30)
    two.abort(1, 999)
    one.abort(998)
    go_on(chain, runner, one, 1)


def test_of_many_at_once_while_others_run(chain: Chain) -> None:
    _, api = chain.begin(limits(64, max_num_seqs=4))
    everyone = range(1, 31)
    for request_id in everyone:
        api.submit(request_id, 3 + request_id % 9, 30)
    chain.until(lambda: sum(len(tokens) for tokens in api.tokens.values()) > 20, "some tokens")
    gone = [request_id for request_id in everyone if request_id % 3]
    api.abort(*gone)
    chain.until(lambda: api.has(*everyone), "all ends")
    for request_id in gone:
        assert api.finished[request_id].status == RequestStatus.ABORTED
    api.assert_complete(*(request_id for request_id in everyone if request_id % 3 == 0))
