"""The ratio of the predictive budget, and who leaves when the pool is full, are as recorded of SGLang."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scheduler.policies.ratio import RatioController, share_decoded
from scheduler.policies.retraction import Running, growth, retract, retraction_order
from tests.scheduler.sglang_cases import Case, held, in_pages, recorded, urgency

TRACES = recorded("ratio", "traces")
TRACKERS = {name: trace for name, trace in TRACES.items() if trace["kind"] == "tracker"}
BATCHES = {name: trace for name, trace in TRACES.items() if trace["kind"] == "scheduler"}
ORDERS = recorded("retract_order", "order")
RETRACTIONS = recorded("retract_order", "retract_decode")


class Pool:
    """Free tokens, cached sequences (oldest first, each dropped whole), and what the running requests hold."""

    def __init__(self, available: int, cached: Sequence[int], running: Sequence[Case], page_size: int) -> None:
        self.free = available
        self.cached = [length // page_size * page_size for length in cached]
        self.held = [held(request, page_size) for request in running]

    def available(self) -> int:
        return self.free

    def evict(self, wanted: int) -> None:
        while self.free < wanted and any(self.cached):
            self.free += self.cached.pop(0)

    def release(self, index: int) -> None:
        self.free += self.held[index]


def running_of(case: Case, requests: Sequence[Case]) -> list[Running]:
    return [
        Running(
            request["input_len"],
            request["output_len"],
            urgency(request, case.get("low_values_first", False)),
        )
        for request in requests
    ]


def demand(running: Sequence[Running], page_size: int) -> int:
    return sum(growth(request.kv_len, page_size) for request in running)


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("name", TRACKERS)
def test_the_ratio_moves_as_recorded_but_never_under_its_floor(name: str) -> None:
    trace = TRACKERS[name]
    ratio = RatioController(trace["conservativeness"])
    assert (ratio.initial, ratio.floor, ratio.step) == (
        close(trace["init"]),
        close(trace["min"]),
        close(trace["decay"]),
    )
    for step in trace["steps"]:
        match step["op"]:
            case "decode":
                for _ in range(step["n"]):
                    ratio.decay()
            case "retract":
                survivors = step["survivors"]
                ratio.retract(sum(done for done, _ in survivors), sum(most for _, most in survivors), len(survivors))
            case "reset":
                ratio.reset()
        assert ratio.value == close(max(step["value"], trace["min"]))


def test_a_retraction_whose_estimate_is_below_the_floor_leaves_the_floor() -> None:
    below = [step for trace in TRACKERS.values() for step in trace["steps"] if step["value"] < trace["min"] - 1e-9]
    assert below and all(step["op"] == "retract" for step in below), "SGLang's ratio drops under its floor there"
    ratio = RatioController()
    ratio.retract(0, 8000, 2)
    assert ratio.value == ratio.floor == close(0.7 * 0.14)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_on_a_full_pool_retracts_as_recorded(name: str) -> None:
    trace = BATCHES[name]
    page_size = trace["page_size"]
    requests = [dict(request) for request in trace["running"]]
    pool = Pool(trace["available"], trace["cached_lens"], [], page_size)
    ratio = RatioController(trace["conservativeness"])
    for step in trace["steps"]:
        assert (pool.free, sum(pool.cached)) == (step["available_before"], step["evictable_before"])
        running = running_of(trace, requests)
        pool.held = [held(request, page_size) for request in requests]
        pool.evict(demand(running, page_size))
        requeued, aborted = [], []
        if pool.free < demand(running, page_size):
            decision = retract(running, pool, page_size)
            requeued = [requests[index]["id"] for index in decision.retracted]
            aborted = [requests[index]["id"] for index in (decision.outgrown,) if index is not None]
            requests = [requests[index] for index in decision.kept]
            decoded, allowed = (sum(each[key] for each in requests) for key in ("output_len", "max_new_tokens"))
            ratio.retract(decoded, allowed, len(requests))
        else:
            ratio.decay()
        seen = {
            "requeued": requeued,
            "aborted": aborted,
            "running": [request["id"] for request in requests],
            "available_after": pool.free,
            "evictable_after": sum(pool.cached),
        }
        assert seen == {key: step[key] for key in seen}
        assert ratio.value == close(max(step["value"], ratio.floor))
        pool.free -= demand(running_of(trace, requests), page_size)
        for request in requests:
            request["output_len"] += 1


@pytest.mark.parametrize("name", ORDERS)
def test_requests_leave_in_the_recorded_order(name: str) -> None:
    case = ORDERS[name]
    running = running_of(case, case["running"])
    order = retraction_order(running, by_priority=case["retraction_policy"] == "priority")
    assert [case["running"][index]["id"] for index in order] == case["result"]["retract_order"]


@pytest.mark.parametrize("name", RETRACTIONS)
def test_a_retraction_is_as_recorded(name: str) -> None:
    case = RETRACTIONS[name]
    page_size, requests = case["page_size"], case["running"]
    running = running_of(case, requests)
    needed = demand(running, page_size)
    pool = Pool(case["available"], case["cached_lens"], requests, page_size)
    pool.evict(needed)
    seen: Case = {
        "tokens_needed_before": needed,
        "fits_before": pool.free >= needed,
        "available_after_check": pool.free,
        "evictable_after_check": sum(pool.cached),
    }
    decision = retract(running, pool, page_size, by_priority=case["retraction_policy"] == "priority")
    kept = [requests[index] for index in decision.kept]
    decoded, allowed = (sum(each[key] for each in kept) for key in ("output_len", "max_new_tokens"))
    seen |= {
        "retracted": [requests[index]["id"] for index in decision.retracted],
        "aborted": [requests[index]["id"] for index in (decision.outgrown,) if index is not None],
        "kept": [request["id"] for request in kept],
        "new_ratio": close(share_decoded(decoded, allowed, len(kept))),
        "tokens_needed_after": demand([running[index] for index in decision.kept], page_size),
        "available_after": pool.free,
        "evictable_after": sum(pool.cached),
    }
    assert seen == {key: case["result"][key] for key in seen}
    assert in_pages(pool.free, page_size) == pool.free
