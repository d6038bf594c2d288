"""Several runners under one scheduler process, over real sockets: placement, losses, orders, and all or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Goodbye
from protocol.process import EXIT_REPLACED
from protocol.runner_links import EXIT_REFUSED
from scheduler.config import SchedulerConfig
from tests.scheduler.isolated import limits, solo_tokens
from tests.scheduler.replica_kit import MakeReplicas, replicas_in, words


@pytest.fixture
def make(runtime_dir: Path) -> Iterator[MakeReplicas]:
    with replicas_in(runtime_dir) as making:
        yield making


@pytest.mark.parametrize("cls", ["scheduler.core:CoreScheduler", "tests.scheduler.replica_kit:Staying"])
def test_streams_run_on_all_replicas_and_each_gets_its_own_tokens(make: MakeReplicas, cls: str) -> None:
    chain = make(scheduler_cls=cls)
    api = chain.all_up()
    for request_id in range(8):
        api.submit(request_id, 20, 30)
    chain.until(lambda: len(api.finished) == 8, "all ends")
    assert api.tokens == {request_id: solo_tokens(request_id, 20, 30) for request_id in range(8)}
    assert len(chain.rows(0)) == len(chain.rows(1)) == 4 and not chain.rows(0) & chain.rows(1)


def test_prompts_with_a_prefix_in_common_land_on_one_replica(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    shared = {0: words(77, 200), 1: words(88, 200)}
    for request_id in range(8):
        api.submit_prompt(request_id, shared[request_id % 2] + words(request_id, 20), 10)
        chain.until(lambda: len(api.finished) == request_id + 1, "its end")  # noqa: B023
    assert {frozenset(chain.rows(0)), frozenset(chain.rows(1))} == {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}
    hits = sum(chain.metric("prefix_cache_hit_tokens_total", replica=str(number)) for number in (0, 1))
    chain.until(lambda: chain.metric("requests_accepted_total", replica="0") == 4, "the metrics")
    hits = sum(chain.metric("prefix_cache_hit_tokens_total", replica=str(number)) for number in (0, 1))
    assert hits == 6 * 192


def test_choices_of_one_prompt_stay_together(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    for request_id in range(12):
        api.submit_prompt(request_id, words(request_id // 4, 9), 20, choice=request_id % 4)
    chain.until(lambda: len(api.finished) == 12, "all ends")
    for first in (0, 4, 8):
        choices = {first, first + 1, first + 2, first + 3}
        assert choices <= chain.rows(0) or choices <= chain.rows(1)


def test_serving_starts_with_the_first_runner_and_says_how_many_are_up(make: MakeReplicas) -> None:
    chain = make(3)
    chain.start()
    chain.start_replica(1)
    api = chain.api()
    chain.until(lambda: api.status is not None and api.status.runner == "ready", "ready")
    assert (api.status.replicas, api.status.replicas_up) == (3, 1)  # type: ignore[union-attr]
    for request_id in range(4):
        api.submit(request_id, 20, 5)
    chain.until(lambda: len(api.finished) == 4, "all ends on the one that is there")
    chain.until(lambda: chain.metric("runner_up", replica="1") == 1, "its gauge")
    assert chain.metric("runner_up", replica="0") == 0
    chain.start_replica(0)
    chain.up(2, api)
    api.submit(9, 20, 5)
    chain.until(lambda: 9 in api.finished, "an end")
    assert chain.rows(0) == {9}, "the late one has the lighter load and the emptier cache"


def test_a_runner_that_is_back_in_time_gets_its_requests_again(make: MakeReplicas) -> None:
    chain = make(replica_patience_s=30.0)
    api = chain.all_up()
    for request_id in range(4):
        api.submit(request_id, 20, 400)
    chain.until(lambda: len(api.tokens) == 4 and min(map(len, api.tokens.values())) > 10, "some tokens")
    on_first = chain.rows(0)
    chain.stop_replica(0)
    chain.up(1, api)
    chain.start_replica(0, epoch=2)
    chain.until(lambda: len(api.finished) == 4, "all ends")
    assert api.tokens == {request_id: solo_tokens(request_id, 20, 400) for request_id in range(4)}
    assert chain.rows(0) == on_first


def test_requests_of_a_runner_that_stays_away_go_on_elsewhere(make: MakeReplicas) -> None:
    chain = make(max_num_seqs=2)
    api = chain.all_up()
    for request_id in range(8):
        api.submit(request_id, 20, 300)
    chain.until(lambda: len(api.tokens) >= 4 and min(map(len, api.tokens.values())) > 10, "some tokens on both")
    chain.stop_replica(0)
    chain.until(lambda: len(api.finished) == 8, "all ends")
    assert api.tokens == {request_id: solo_tokens(request_id, 20, 300) for request_id in range(8)}
    assert chain.rows(1) == set(range(8)), "those that waited and those that ran"
    chain.until(lambda: chain.metric("requests_finished_total", reason="moved", replica="0") == 4, "the metrics")


def test_aborts_and_sessions_reach_the_replica_that_a_request_has_moved_to(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    api.submit(1, 20, 3000)
    api.submit(2, 20, 3000)
    chain.until(lambda: len(api.tokens) == 2, "both streams")
    chain.stop_replica(0)
    chain.until(lambda: chain.rows(1) == {1, 2}, "both on one")
    api.abort(1, 2)
    chain.until(lambda: len(api.finished) == 2, "both ends")
    chain.until(lambda: chain.metric("requests_running", replica="1") == 0, "an empty scheduler")
    assert chain.live() == 0 and chain.load(1) == 0


def test_a_class_that_hands_nothing_over_keeps_its_requests_until_its_runner_is_back(make: MakeReplicas) -> None:
    chain = make(scheduler_cls="tests.scheduler.replica_kit:Staying")
    api = chain.all_up()
    for request_id in range(4):
        api.submit(request_id, 20, 300)
    chain.until(lambda: len(api.tokens) == 4, "the streams")
    mine = chain.rows(0)
    chain.stop_replica(0)
    chain.until(lambda: len(api.finished) == 2, "the ends on the other")
    chain.start_replica(0, epoch=2)
    chain.until(lambda: len(api.finished) == 4, "all ends")
    assert chain.rows(0) == mine
    assert api.tokens == {request_id: solo_tokens(request_id, 20, 300) for request_id in range(4)}


def test_as_many_may_wait_as_the_queues_of_those_that_are_up_hold(make: MakeReplicas) -> None:
    chain = make(max_num_queued_reqs=10)
    api = chain.all_up()
    assert api.status is not None
    chain.until(lambda: api.status.queue_limit == 20, "both queues")  # type: ignore[union-attr]
    chain.stop_replica(0)
    chain.until(lambda: api.status.queue_limit == 10, "one queue")  # type: ignore[union-attr]


def test_nothing_moves_while_no_other_runner_is_there(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    for request_id in range(4):
        api.submit(request_id, 20, 300)
    chain.until(lambda: len(api.tokens) == 4, "the streams")
    chain.stop_replica(0)
    chain.stop_replica(1)
    chain.until(lambda: api.status.runner == "absent", "the loss to be seen")  # type: ignore[union-attr]
    api.submit(9, 20, 5)
    chain.start_replica(1, epoch=2)
    chain.until(lambda: len(api.finished) == 5, "all ends")
    assert api.tokens == {n: solo_tokens(n, 20, 300) for n in range(4)} | {9: solo_tokens(9, 20, 5)}


def test_an_api_that_leaves_takes_its_requests_on_all_replicas_with_it(make: MakeReplicas) -> None:
    chain = make()
    api, other = chain.all_up(), chain.api()
    chain.until(lambda: other.channel.connected, "the second session")
    for request_id in range(4):
        api.submit(request_id, 20, 3000)
    chain.until(lambda: len(api.tokens) == 4, "the streams")
    api.channel.leave(Goodbye("shutdown"))
    chain.until(lambda: chain.live() == 0, "nothing to be live")
    chain.until(lambda: chain.metric("requests_finished_total", reason="aborted", replica="0") == 2, "the metrics")
    assert chain.metric("requests_finished_total", reason="aborted", replica="1") == 2


def test_one_id_twice_is_refused_wherever_the_second_would_have_gone(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    api.submit(1, 20, 400)
    chain.until(lambda: 1 in api.tokens, "its stream")
    api.submit_prompt(1, words(5, 30), 5)
    chain.until(lambda: 1 in api.rejected, "the refusal")
    assert api.rejected[1].code == "duplicate_id"
    api.abort(1)
    chain.until(lambda: 1 in api.finished, "the first one's end")


def test_pools_of_different_sizes_take_what_fits_them_and_the_largest_names_the_numbers(make: MakeReplicas) -> None:
    chain = make()
    chain.start_replica(0, limit=limits(8))
    chain.start_replica(1, limit=limits(32))
    chain.start()
    api = chain.api()
    chain.up(2, api)
    assert api.status is not None and api.status.limits is not None and api.status.limits.num_blocks == 33
    api.submit(1, 300, 20)
    api.submit(2, 100, 200)
    chain.until(lambda: len(api.finished) == 2, "both ends")
    assert chain.rows(1) == {1, 2}, "the prompt of one, the outputs of the other don't fit the smaller one"
    assert api.tokens[2] == solo_tokens(2, 100, 200)
    api.submit(3, 600, 20)
    chain.until(lambda: 3 in api.rejected, "the refusal")
    assert "holds 512 (32 blocks of 16)" in api.rejected[3].message


def test_what_only_fits_a_runner_that_is_away_waits_for_it(make: MakeReplicas) -> None:
    chain = make()
    chain.start_replica(0, limit=limits(32))
    chain.start_replica(1, limit=limits(8))
    chain.start()
    api = chain.api()
    chain.up(2, api)
    chain.stop_replica(0)
    chain.up(1, api)
    api.submit(1, 300, 20)
    api.submit(2, 100, 20)
    chain.until(lambda: 2 in api.finished, "the end of the one that fits")
    chain.start_replica(0, epoch=2, limit=limits(32))
    chain.until(lambda: 1 in api.finished, "the end of the other")
    assert api.tokens[1] == solo_tokens(1, 300, 20)


@pytest.mark.parametrize("odd", [{"model": "other"}, {"vocab_size": 40_000}, {"max_model_len": 2048}])
def test_a_runner_with_another_model_is_not_used(
    make: MakeReplicas, caplog: pytest.LogCaptureFixture, odd: dict[str, Any]
) -> None:
    chain = make()
    api = None
    chain.start_replica(0)
    chain.start()
    api = chain.api()
    chain.up(1, api)
    stranger = chain.start_replica(1, limit=limits(64, **odd))
    chain.until(lambda: stranger.goodbyes, "its dismissal")
    for request_id in range(4):
        api.submit(request_id, 20, 5)
    chain.until(lambda: len(api.finished) == 4, "all ends on the other")
    assert not stranger.steps and api.status is not None and api.status.replicas_up == 1
    name, value = next(iter(odd.items()))
    assert f"the runner of replica 1 is not used: its {name} is {value!r}" in caplog.text


def test_a_scheduler_that_one_runner_refuses_keeps_none(make: MakeReplicas) -> None:
    chain = make(lease_s=0.5)
    free, held = chain.start_replica(0), chain.start_replica(1)
    held.occupied_by = "scheduler abc"
    chain.start()
    api = chain.api()
    chain.until(lambda: free.goodbyes and api.channel.connected, "the free one to be let go")
    api.submit(1, 20, 5)
    chain.until(lambda: chain.code is not None, "its end")
    assert chain.code == EXIT_REFUSED
    assert not free.steps and not held.steps and not any(hello.takeover for hello in free.hellos + held.hellos)


def test_a_scheduler_waits_for_the_lease_of_the_one_that_holds_a_runner(make: MakeReplicas) -> None:
    chain = make()
    free, held = chain.start_replica(0), chain.start_replica(1)
    held.occupied_by = "scheduler abc"
    chain.start()
    api = chain.api()
    chain.until(lambda: free.goodbyes, "the free one to be let go")
    held.occupied_by = ""
    chain.up(2, api)


def test_a_takeover_asks_all_runners_before_it_takes_any(make: MakeReplicas) -> None:
    chain = make(takeover=True)
    held, free = chain.start_replica(0), chain.start_replica(1)
    held.occupied_by = "scheduler abc"
    chain.start()
    api = chain.api()
    chain.up(2, api)
    assert [hello.takeover for hello in held.hellos] == [False, True]
    assert not any(hello.takeover for hello in free.hellos)


def test_a_takeover_takes_none_if_one_runner_can_not_be_used(make: MakeReplicas) -> None:
    chain = make(takeover=True)
    held, older = chain.start_replica(0), chain.start_replica(1)
    held.occupied_by, older.refuses = "scheduler abc", "bad_version"
    chain.start()
    chain.until(lambda: chain.code is not None, "its end")
    assert chain.code == EXIT_REFUSED and not any(hello.takeover for hello in held.hellos)


def test_who_is_fenced_by_one_runner_leaves_all(make: MakeReplicas) -> None:
    chain = make()
    chain.all_up()
    other = chain.runners[1]
    [identity] = chain.runners[0].channel.peers
    chain.runners[0].channel.drop(identity, Goodbye("fenced", "another took over"))
    chain.until(lambda: chain.code is not None and other.goodbyes, "its end")
    assert chain.code == EXIT_REPLACED


def test_a_runner_that_a_rival_has_got_hold_of_is_served_without_until_it_lets_go(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    chain.stop_replica(0)
    chain.up(1, api)
    chain.start_replica(0, epoch=2).occupied_by = "a rival"
    chain.until(lambda: chain.runners[0].hellos, "its refusal")
    api.submit(1, 20, 5)
    chain.until(lambda: 1 in api.finished, "an end on the other")
    chain.runners[0].occupied_by = ""
    chain.up(2, api)
    assert chain.code is None


def test_as_many_addresses_as_replicas_are_asked_for() -> None:
    config = SchedulerConfig(runtime_dir="/r", data_parallel_size=2)
    assert config.runner_addresses == ("ipc:///r/runner-0.sock", "ipc:///r/runner-1.sock")
    assert SchedulerConfig(runtime_dir="/r").runner_addresses == ("ipc:///r/runner.sock",)
    assert len(SchedulerConfig(runner_address="tcp://a:1, tcp://b:1").runner_addresses) == 2
    with pytest.raises(ValueError, match="3 replicas .* 2 addresses"):
        _ = SchedulerConfig(runner_address="tcp://a:1,tcp://b:1", data_parallel_size=3).runner_addresses
    with pytest.raises(ValueError, match="twice"):
        _ = SchedulerConfig(runner_address="tcp://a:1,tcp://a:1").runner_addresses
