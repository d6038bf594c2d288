"""For how long, not only for how many passes, each admission test keeps the head of the queue out. A pass is 1 ms."""

from __future__ import annotations

from typing import Any

from ops.ctl_text import render
from tests.scheduler.isolated import Isolated


def held_head(**config: Any) -> Isolated:
    """Request 1 runs in the only slot, request 2 has been held for three passes."""
    isolated = Isolated(64, max_num_seqs=1, **config)
    isolated.add(1, 8, max_tokens=9)
    isolated.step()
    isolated.add(2, 8, max_tokens=2, priority=5)
    for _ in range(3):
        isolated.step()
    return isolated


def held(isolated: Isolated, request_id: int) -> tuple[dict[str, int], dict[str, float]]:
    record = isolated.control("timeline", id=str(request_id))
    return record["held_passes"], record["held_ms"]


def test_the_time_of_a_test_runs_from_the_pass_in_which_it_bound_to_the_admission() -> None:
    isolated = held_head()
    isolated.drain()
    passes, spent = held(isolated, 2)
    assert passes == {"slots": 8} and spent == {"slots": 8.0}
    admitted = isolated.control("timeline", id="2")["events"][1]
    assert (admitted["event"], admitted["held"], admitted["held_ms"]) == ("admitted", passes, spent)


def test_a_request_that_is_still_held_has_been_so_until_now() -> None:
    isolated = held_head()
    assert held(isolated, 2) == ({"slots": 3}, {"slots": 2.0})
    isolated.now += 5_000_000
    assert held(isolated, 2) == ({"slots": 3}, {"slots": 7.0})
    isolated.drain()


def test_each_test_gets_its_own_time_and_together_they_are_the_wait_at_the_head() -> None:
    isolated = Isolated(8, max_num_seqs=2, max_bypasses=0)
    isolated.add(1, 70, max_tokens=25)
    isolated.add(2, 4, max_tokens=5)
    isolated.step()
    isolated.add(3, 100, max_tokens=2)
    isolated.drain()
    passes, spent = held(isolated, 3)
    assert set(passes) == {"slots", "blocks"}
    assert spent == {test: float(count) for test, count in passes.items()}
    events = isolated.control("timeline", id="3")["events"]
    assert events[1]["event"] == "admitted" and events[1]["ms"] == sum(spent.values()) + 1


def test_time_stops_when_a_more_urgent_request_takes_the_head_and_goes_on_when_it_is_gone() -> None:
    isolated = held_head(queue_policy="priority", priority_preemption_threshold=-1)
    isolated.add(3, 8, max_tokens=2, priority=1)
    for _ in range(4):
        isolated.step()
    assert held(isolated, 2) == ({"slots": 3}, {"slots": 3.0})
    assert held(isolated, 3) == ({"slots": 4}, {"slots": 3.0})
    isolated.drain()
    (passes, spent), (others, _) = held(isolated, 2), held(isolated, 3)
    assert passes["slots"] > 3 and spent["slots"] == passes["slots"]
    assert isolated.finished[2].queue_ns == int(1e6 * (spent["slots"] + others["slots"]) + 1e6)


def test_a_pause_and_a_time_without_a_runner_belong_to_no_test() -> None:
    isolated = held_head()
    isolated.control("pause", what="all")
    isolated.step()
    isolated.now += 1_000_000_000
    assert held(isolated, 2)[1] == {"slots": 3.0}
    isolated.control("resume")
    isolated.step()
    isolated.now += 1_000_000_000
    isolated.lose_runner()
    assert held(isolated, 2)[1] == {"slots": 3.0}
    isolated.drain()


def test_a_request_that_ends_while_it_is_held_was_held_to_its_end() -> None:
    isolated = held_head()
    isolated.now += 4_000_000
    isolated.abort(2)
    isolated.now += 4_000_000
    assert held(isolated, 2) == ({"slots": 3}, {"slots": 6.0})
    isolated.drain()


def test_the_explanation_and_the_text_of_the_timeline_give_both_numbers() -> None:
    isolated = held_head()
    isolated.drain()
    body = isolated.control("explain", id="2")
    sentence = "It stood first in the queue for 8 passes, 8.0 ms, while all running slots were taken."
    assert sentence in body["explanation"] and sentence in render("explain", body)
    line = next(line for line in render("timeline", body).splitlines() if "admitted" in line)
    assert line.split()[-2:] == ["held=slots:8", "held_ms=slots:8.0"]
