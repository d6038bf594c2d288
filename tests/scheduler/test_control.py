"""Orders from operators: pause, drain, forget, change settings live, and explain what happened to a request."""

from __future__ import annotations

import re
from typing import Any

import pytest

from protocol.messages import RequestStatus
from scheduler.config import BATCH_NAMES, QUEUE_NAMES, SchedulerConfig
from tests.conformance.newest_first import NewestFirst
from tests.scheduler.isolated import Isolated, limits, solo_tokens

S = RequestStatus


# --- pause, resume, drain ---------------------------------------------------------------------------------------


def test_pausing_new_requests_lets_those_that_have_run_go_on_and_come_back() -> None:
    isolated = Isolated(64, queue_policy="priority")
    isolated.add(1, 20, max_tokens=9, priority=9)
    isolated.step()
    assert isolated.control("pause")["paused"] == "new"
    isolated.add(2, 20, max_tokens=3, priority=0)
    isolated.preempt(1)
    while 1 not in isolated.finished:
        isolated.step()
    assert isolated.request(2).status == S.WAITING, "more urgent, but new"
    isolated.control("resume")
    isolated.drain()
    assert isolated.tokens == {1: solo_tokens(1, 20, 9), 2: solo_tokens(2, 20, 3)}


def test_pausing_all_sends_no_step_but_takes_results_requests_and_deadlines() -> None:
    isolated = Isolated(64, delay=1)
    isolated.add(1, 20, max_tokens=9)
    isolated.step()
    isolated.control("pause", what="all")
    isolated.add(2, 20, max_tokens=3, timeout_ms=5)
    assert isolated.step() == {} and isolated.tokens == {1: solo_tokens(1, 20, 1)}
    isolated.now += 50_000_000
    isolated.step()
    assert isolated.finished[2].code == "waiting_timeout"
    isolated.control("resume")
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 9)


def test_draining_refuses_newcomers_finishes_the_rest_and_takes_those_that_another_scheduler_had_accepted() -> None:
    isolated = Isolated(64)
    isolated.add(1, 20, max_tokens=9)
    assert isolated.control("drain")["draining"] is True
    isolated.add(2, 20)
    assert (isolated.rejected[2].status, isolated.rejected[2].code) == (503, "draining")
    assert isolated.rejected[2].retry_after_s > 0
    isolated.add(3, 20, resumed=True)
    isolated.drain()
    assert isolated.tokens == {1: solo_tokens(1, 20, 9), 3: solo_tokens(3, 20, 4)}
    isolated.control("resume")
    isolated.add(4, 20)
    isolated.drain()
    assert 4 in isolated.finished


# --- the prefix cache -------------------------------------------------------------------------------------------


def test_resetting_the_prefix_cache_forgets_all_and_disturbs_nobody() -> None:
    isolated = Isolated(64)
    isolated.add(1, 40, max_tokens=20)
    isolated.step()
    assert isolated.control("reset_prefix_cache") == {"forgotten": 2}
    assert isolated.running() == [1] and isolated.core.stats.preemptions == 0
    isolated.drain()
    isolated.add(2, [*range(100, 140)], max_tokens=1)
    isolated.drain()
    assert isolated.finished[2].num_cached_tokens == 0
    assert isolated.tokens[1] == solo_tokens(1, 40, 20)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("recovery", ["recompute", "swap"])
def test_resetting_it_under_running_requests_computes_everything_again_and_keeps_their_order(
    recovery: str, delay: int
) -> None:
    isolated = Isolated(64, delay=delay, recovery_policy=recovery, limit=limits(64, host_blocks=64))
    for request_id in (1, 2, 3, 4):
        isolated.add(request_id, 20, max_tokens=20, open=request_id == 4)
    for _ in range(5):
        isolated.step()
    isolated.preempt(3)
    isolated.control("reset_prefix_cache", running="true")
    assert [request.id for request in isolated.core.strategies.queue if request.id != 3] == [1, 2]
    held = [request.blocks or request.host_blocks for request in isolated.core.requests.values()]
    assert not any(held), "what was computed before is nowhere any more"
    isolated.extend(4, [], last=True)
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 20, 20) for i in (1, 2, 3, 4)}


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", QUEUE_NAMES)
@pytest.mark.parametrize("batch", BATCH_NAMES)
def test_policies_change_under_load_without_losing_anybody(queue: str, batch: str) -> None:
    isolated = Isolated(12, delay=1, max_num_seqs=3)
    for request_id in range(1, 8):
        isolated.add(request_id, 20, max_tokens=15, tenant=str(request_id % 3), priority=request_id)
    for _ in range(4):
        isolated.step()
    isolated.control("set", queue_policy=queue, batch_policy=batch, victim_policy="most-recoverable")
    for _ in range(4):
        isolated.step()
    isolated.control("set", preset="sglang", queue_policy="", batch_policy="", victim_policy="")
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 20, 15) for i in range(1, 8)}


def test_limits_change_under_load() -> None:
    isolated = Isolated(64, max_num_seqs=8)
    for request_id in range(1, 7):
        isolated.add(request_id, 8, max_tokens=20)
    isolated.step()
    isolated.control("set", max_num_seqs="2", max_num_batched_tokens="3")
    assert sum(isolated.step().values()) <= 3
    assert len(isolated.running()) == 6, "nobody is thrown out"
    isolated.control("set", max_num_seqs="8", max_num_batched_tokens="2048")
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 8, 20) for i in range(1, 7)}


def test_a_change_leaves_what_other_strategies_have_learned() -> None:
    isolated = Isolated(64, queue_policy="fair", admission_policy="predictive")
    isolated.add(1, 20, max_tokens=9, tenant="a")
    isolated.step()
    queue, ratio = isolated.core.strategies.queue, isolated.core.strategies.admission.ratio
    isolated.control("set", watermark="0", max_num_seqs="4")
    assert isolated.core.strategies.queue is queue
    assert isolated.core.strategies.admission.ratio == ratio
    isolated.drain()


def test_a_subclass_keeps_its_own_choice_when_a_setting_changes() -> None:
    core = NewestFirst(SchedulerConfig(), limits(64), b"k" * 16, clock=lambda: 0)
    queue = core.strategies.queue
    core.adopt(SchedulerConfig(watermark=0.05))
    assert core.strategies.queue is core.waiting.queue is queue
    assert queue.name == "newest-first"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"queue_policy": "lifo"}, "queue_policy"),
        ({"watermark": "2"}, "watermark"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_num_seqs": "99999"}, "max_num_seqs"),
        ({"runtime_dir": "/tmp"}, "runtime_dir"),
        ({"tenant_weights": "a=zero"}, "a=zero"),
        ({"tenant_weights": "a=-1"}, "a=-1"),
        ({"max_num_batched_tokens": "64", "victim_policy": "nobody"}, "victim_policy"),
    ],
)
def test_a_wrong_value_is_named_and_nothing_is_changed(arguments: dict[str, str], names: str) -> None:
    isolated = Isolated(64)
    isolated.add(1, 20, max_tokens=9)
    isolated.step()
    before = (isolated.core.config, isolated.core.strategies, isolated.core.token_budget)
    assert names in isolated.refused_control("set", **arguments)["message"]
    assert before == (isolated.core.config, isolated.core.strategies, isolated.core.token_budget)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 9)


@pytest.mark.parametrize(
    ("action", "arguments", "code"),
    [
        ("dance", {}, "unknown_action"),
        ("pause", {"what": "some"}, "invalid_argument"),
        ("timeline", {}, "invalid_argument"),
        ("timeline", {"id": "x1"}, "invalid_argument"),
        ("timeline", {"id": "²"}, "invalid_argument"),
        ("explain", {"id": "77"}, "not_found"),
    ],
)
def test_an_order_that_makes_no_sense_is_answered_with_a_code(action: str, arguments: Any, code: str) -> None:
    assert Isolated(64).refused_control(action, **arguments)["code"] == code


def test_status_says_what_is_in_force_and_how_things_stand() -> None:
    isolated = Isolated(64, max_num_seqs=1)
    isolated.add(1, 20)
    isolated.add(2, 20)
    isolated.step()
    status = isolated.control("status")
    assert (status["running"], status["waiting"], status["paused"]) == (1, 1, "no")
    assert status["strategies"]["queue"] == isolated.core.strategies.queue.name
    assert status["settings"]["max_num_seqs"] == 1
    assert status["held_passes"] == {"slots": 1}
    isolated.drain()


# --- what happened to a request ---------------------------------------------------------------------------------


def eventful() -> Isolated:
    """Request 2 waits for a slot, is preempted for want of blocks, returns and ends."""
    isolated = Isolated(6, max_num_seqs=2)
    isolated.add(9, 8, max_tokens=3)
    isolated.add(1, 40, max_tokens=30, label="first")
    isolated.step()
    isolated.add(2, 40, max_tokens=30, label="second")
    isolated.drain()
    return isolated


def test_a_timeline_tells_in_order_what_happened_and_what_it_cost() -> None:
    isolated = eventful()
    record = isolated.control("timeline", id="2")
    assert [event["event"] for event in record["events"]] == [
        *("arrived", "admitted", "preempted", "admitted", "length")
    ]
    arrived, admitted, preempted, back, _ = record["events"]
    assert arrived["prompt_tokens"] == 40 and admitted["held"] == {"slots": 2}
    assert preempted["by"] == "1" and preempted["recovery"] == "recompute"
    assert back["replayed"] + back["cached"] == preempted["computed"]
    times = [event["ms"] for event in record["events"]]
    assert times == sorted(times)
    assert record["preemptions"] == 1 and record["replayed_tokens"] == back["replayed"]
    assert record["status"] == "LENGTH" and record["label"] == "second"


def test_explain_says_the_same_in_sentences_and_finds_requests_by_label() -> None:
    isolated = eventful()
    (found,) = isolated.control("explain", label="second")["requests"]
    text = " ".join(found["explanation"])
    assert "Request 2 (second) ended LENGTH: 40 prompt tokens, 30 outputs" in text
    assert "while all running slots were taken" in text
    assert re.search(r"preempted for request 1 \(first\), with \d+ tokens computed \(recompute\)", text)
    assert "had to be computed again" in text


def test_a_live_request_is_explained_with_what_it_has_so_far() -> None:
    isolated = Isolated(64)
    isolated.add(1, 20, max_tokens=9)
    isolated.step()
    isolated.step()
    record = isolated.control("timeline", id="1")
    assert record["status"] == "RUNNING" and record["output_tokens"] == 2
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 9)


def test_each_admission_counts_once_in_the_statistics_however_often_it_was_tried() -> None:
    isolated = Isolated(6, max_num_seqs=2)
    isolated.add(1, 40, max_tokens=30)
    isolated.add(2, 40, max_tokens=30)
    isolated.drain()
    stats = isolated.core.stats
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.prefix_queried_tokens) == (80, 80)
    assert len(stats.queue_seconds) == 2 and sorted(stats.preemption_counts) == [0, stats.preemptions]


def test_a_full_queue_answers_503_and_a_more_urgent_arrival_displaces_the_least_urgent_waiter() -> None:
    isolated = Isolated(64, queue_policy="priority", max_num_seqs=1, max_num_queued_reqs=2)
    isolated.add(1, 20, max_tokens=9, priority=0)
    isolated.step()
    isolated.add(2, 20, priority=3)
    isolated.add(3, 20, priority=5)
    isolated.add(4, 20, priority=5)
    assert isolated.rejected[4].code == "queue_full" and isolated.rejected[4].retry_after_s > 0
    isolated.add(5, 20, priority=4)
    assert isolated.status(3) == S.ERROR and isolated.finished[3].code == "displaced"
    isolated.drain()
    assert {i for i in isolated.finished if isolated.status(i) == S.LENGTH} == {1, 2, 5}


def test_sessions_that_wait_for_their_client_and_preempted_requests_take_no_place_in_the_bounded_queue() -> None:
    isolated = Isolated(64, max_num_queued_reqs=2, max_num_seqs=4)
    isolated.add(1, 20, open=True)
    isolated.add(2, 20, open=True)
    for _ in range(3):
        isolated.step()
    isolated.add(3, 20, max_tokens=9)
    assert 3 not in isolated.rejected
    isolated.step()
    isolated.preempt(3)
    isolated.add(4, 20)
    isolated.add(5, 20)
    isolated.add(6, 20)
    assert sorted(isolated.rejected) == [6]
    isolated.extend(1, [], last=True)
    isolated.extend(2, [], last=True)
    isolated.drain()


def test_a_parked_waiter_is_displaced_like_one_in_the_queue() -> None:
    isolated = Isolated(64, queue_policy="priority", max_num_queued_reqs=1, max_num_seqs=1)
    isolated.add(1, 20, max_tokens=9)
    isolated.step()
    isolated.add(2, 20, priority=9, grammar="json_schema:{}")
    isolated.add(3, 20, priority=0)
    assert isolated.finished[2].code == "displaced" and 3 not in isolated.rejected
    isolated.drain()
