"""What an operator is told: a line for each burst of preemptions, for each change of order, and metrics of the same."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from protocol.messages import RequestStatus
from scheduler.interface import Door
from scheduler.metrics import Metrics
from tests.scheduler.isolated import Isolated, limits, solo_tokens

S = RequestStatus


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


# --- bursts of preemptions --------------------------------------------------------------------------------------


def test_each_pass_that_preempts_writes_one_warning_with_the_counts(caplog: pytest.LogCaptureFixture) -> None:
    isolated = Isolated(12)
    for request_id in range(1, 5):
        isolated.add(request_id, 40, max_tokens=60)
    expected = []
    with caplog.at_level(logging.WARNING, "triptych.scheduler"):
        while isolated.core.has_requests:
            before = isolated.core.stats.preemptions
            isolated.step()
            count = isolated.core.stats.preemptions - before
            if count:
                expected.append(count)
    told = [re.match(r"preempted (\d+) requests \(([\d, ]+)\)", line) for line in lines(caplog, "preempted")]
    assert [int(match[1]) for match in told if match] == expected and expected
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    match = re.search(r"(\d+) running, (\d+) waiting, (\d+) of 12 blocks free", lines(caplog, "preempted")[0])
    assert match is not None and int(match[1]) + int(match[2]) == 4


def test_the_warning_shows_the_ratio_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    isolated = Isolated(24, admission_policy="predictive", schedule_conservativeness=0.01)
    for request_id in range(1, 9):
        isolated.add(request_id, 20, max_tokens=100)
    before = after = isolated.core.strategies.admission.ratio
    with caplog.at_level(logging.WARNING, "triptych.scheduler"):
        while not isolated.core.stats.preemptions:
            before = isolated.core.strategies.admission.ratio
            isolated.step()
            after = isolated.core.strategies.admission.ratio
    assert before is not None and after is not None and after > before
    (line,) = lines(caplog, "preempted")
    assert f"ratio {before:.3f} -> {after:.3f}" in line
    isolated.drain()


def test_a_pass_that_preempts_nobody_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    isolated = Isolated(64)
    isolated.add(1, 40, max_tokens=20)
    with caplog.at_level(logging.WARNING, "triptych.scheduler"):
        isolated.drain()
    assert not caplog.records


def test_the_choice_between_copy_and_recompute_is_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    isolated = Isolated(8, recovery_policy="auto", limit=limits(8, host_blocks=8, kv_bytes_per_block=1 << 20))
    isolated.core.suspension.rates.saw_step(1000, 1, 1.0)
    isolated.core.suspension.rates.saw_copy(1 << 30, 1.0)
    for request_id in (1, 2):
        isolated.add(request_id, 48, max_tokens=40)
    with caplog.at_level(logging.WARNING, "triptych.scheduler"):
        isolated.drain()
    first = lines(caplog, "preempted")[0]
    match = re.search(r"(swap|recompute): copying (\d+) blocks both ways ([\d.]+) ms .* tokens ([\d.]+) ms", first)
    assert match is not None
    assert (match[1] == "swap") == (float(match[3]) < float(match[4]))


# --- the order --------------------------------------------------------------------------------------------------


def test_a_change_of_order_is_one_line_in_the_log_and_one_in_the_counter(caplog: pytest.LogCaptureFixture) -> None:
    isolated = Isolated(64, queue_policy="lpm", queue_fallback_waiting=3, max_num_seqs=2)
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    with caplog.at_level(logging.INFO, "triptych.scheduler"):
        for request_id in range(1, 9):
            isolated.add(request_id, 20, max_tokens=3)
        isolated.step()
        assert len(lines(caplog, "queue order changed")) == 1, "eight wait, three are allowed"
        assert "fcfs from now on" in lines(caplog, "queue order changed")[0]
        isolated.drain()
    assert len(lines(caplog, "queue order changed")) == 2, "and back"
    assert "lpm from now on" in lines(caplog, "queue order changed")[1]
    metrics.sync(isolated.core.refresh_stats(), 0, {})
    assert registry.get_sample_value("triptych_scheduler_queue_order_flips_total") == 2


# --- metrics ----------------------------------------------------------------------------------------------------


def test_preemptions_of_each_request_are_in_its_final_record_and_in_a_histogram() -> None:
    isolated = Isolated(12)
    for request_id in range(1, 5):
        isolated.add(request_id, 40, max_tokens=60)
    isolated.drain()
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.sync(isolated.core.refresh_stats(), 0, {})
    counts = {request_id: end.num_preemptions for request_id, end in isolated.finished.items()}
    records = {request_id: isolated.control("timeline", id=str(request_id)) for request_id in counts}
    assert {request_id: record["preemptions"] for request_id, record in records.items()} == counts
    for request_id, record in records.items():
        assert sum(event["event"] == "preempted" for event in record["events"]) == counts[request_id]

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"triptych_scheduler_{name}", labels)

    assert sum(counts.values()) == isolated.core.stats.preemptions > 0
    assert sample("request_preemptions_count") == 4
    assert sample("request_preemptions_sum") == sample("preemptions_total") == sum(counts.values())
    assert sample("request_preemptions_bucket", le="0.0") == sum(count == 0 for count in counts.values())
    metrics.sync(isolated.core.refresh_stats(), 0, {})
    assert sample("request_preemptions_count") == 4, "each request is counted once"


def test_the_test_that_held_the_head_is_counted_for_the_request_and_in_the_metric() -> None:
    isolated = Isolated(64, max_num_seqs=1)
    isolated.add(1, 20, max_tokens=5)
    isolated.add(2, 20, max_tokens=2)
    isolated.drain()
    registry = CollectorRegistry()
    Metrics(registry).sync(isolated.core.refresh_stats(), 0, {})
    held = isolated.control("timeline", id="2")["held_passes"]
    name = "triptych_scheduler_admission_held_passes_total"
    assert registry.get_sample_value(name, {"test": "slots"}) == held["slots"] > 0


# --- a full queue -----------------------------------------------------------------------------------------------


def full_queue(**config: Any) -> Isolated:
    """One runs, two wait: the second more urgent than the third."""
    isolated = Isolated(64, max_num_seqs=1, max_num_queued_reqs=2, **config)
    isolated.add(1, 20, max_tokens=9, priority=0)
    isolated.step()
    isolated.add(2, 20, priority=3)
    isolated.add(3, 20, priority=5)
    return isolated


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_the_door_says_what_arrivals_are_judged_by(policy: str) -> None:
    isolated = full_queue(queue_policy=policy)
    assert isolated.core.door() == Door(2, 2, policy == "priority", 5)
    isolated.preempt(1)
    assert isolated.core.door().queued == 2, "who has run before needs no place"
    isolated.drain()
    assert isolated.core.door() == Door(2, 0, policy == "priority", 0)


@pytest.mark.parametrize("priority", [5, 6])
def test_an_arrival_that_is_not_strictly_more_urgent_displaces_nobody(priority: int) -> None:
    isolated = full_queue(queue_policy="priority")
    isolated.add(4, 20, priority=priority)
    assert isolated.rejected[4].status == 503 and isolated.rejected[4].retry_after_s > 0
    assert isolated.request(3).status == S.WAITING
    isolated.drain()


def test_of_the_least_urgent_the_newest_is_displaced() -> None:
    isolated = Isolated(64, max_num_seqs=1, max_num_queued_reqs=3, queue_policy="priority")
    isolated.add(1, 20, max_tokens=9)
    isolated.step()
    for request_id in (2, 3, 4):
        isolated.add(request_id, 20, priority=5 if request_id != 3 else 6)
    isolated.add(5, 20, priority=1)
    isolated.add(6, 20, priority=1)
    assert list(isolated.finished) == [3, 4]
    assert "limit" in isolated.finished[3].message or "full" in isolated.finished[3].message
    isolated.drain()
    assert isolated.tokens.keys() == {1, 2, 5, 6}, "who is displaced was never run"


def test_who_has_run_before_is_never_displaced() -> None:
    isolated = Isolated(64, max_num_seqs=1, max_num_queued_reqs=1, queue_policy="priority")
    isolated.add(1, 20, max_tokens=9, priority=9)
    isolated.step()
    isolated.preempt(1)
    isolated.add(2, 20, priority=0, resumed=True)
    isolated.add(3, 20, priority=0)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 9)


def test_orders_without_urgency_displace_nobody() -> None:
    isolated = full_queue(queue_policy="fcfs")
    isolated.add(4, 20, priority=-9)
    assert isolated.rejected[4].code == "queue_full"
    isolated.drain()
    assert isolated.tokens.keys() == {1, 2, 3}
