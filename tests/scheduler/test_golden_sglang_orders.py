"""Queue orders are those that SGLang was recorded to choose."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

import pytest

from scheduler.policies.orders import CACHE_AWARE, Surroundings, Waiting, active_policy, arrange, defer_sharers
from tests.scheduler.prefix_tree import Key, Node, PrefixTree
from tests.scheduler.sglang_cases import (
    POLICY_NAMES,
    Case,
    key_of,
    known_tokens,
    recorded,
    tree_of,
    waiting_of,
)

CASES = recorded("policy_order", "cases")

#: Purposeful differences: what we do instead, see docs/differences.md.
PRIORITIES_STILL_COUNT = "lpm-129-waiting-priority-ignored"


def described(case: Case, policy: str) -> list[Waiting]:
    """The queue as the orders see it: matches and deferral only where the policy looks at the cache."""
    queue = case["waiting"]
    paths: list[list[Node]] = [[] for _ in queue]
    deferred = [False] * len(queue)
    if policy in CACHE_AWARE:
        tree = tree_of(case)
        matched = [tree.matched(key_of(request)) for request in queue]  # all of them first: matching splits nodes
        paths = [tree.path(key_of(request)) for request in queue]
        keys = [Key(known_tokens(request), request.get("extra_key")) for request in queue]
        deferred = defer_sharers(keys, matched, PrefixTree(1))
    return [
        waiting_of(request, path, late, case["low_values_first"])
        for request, path, late in zip(queue, paths, deferred, strict=True)
    ]


def order_of(node: Hashable) -> float:
    return cast(Node, node).order


def decide(case: Case) -> Case:
    name: str = POLICY_NAMES.get(case["policy"], case["policy"])
    policy = active_policy(name, len(case["waiting"]), has_cache=not case["tree_disabled"])
    queue = described(case, policy)
    around = Surroundings(
        by_priority=case["priority_scheduling"],
        processed=case["processed_tokens"],
        running_keys=case["running_routing_keys"] or (),
        age=order_of,
    )
    seen: Case = {"active_policy": policy, "order": [queue[index].id for index in arrange(policy, queue, around)]}
    if policy in CACHE_AWARE:
        seen["matched"] = {request.id: request.matched for request in queue}
        seen["deprioritized"] = sorted(request.id for request in queue if request.deferred)
    return seen


@pytest.mark.parametrize("name", [name for name in CASES if name != PRIORITIES_STILL_COUNT])
def test_orders_are_as_recorded(name: str) -> None:
    case = CASES[name]
    expected = dict(case["result"])
    if "error" in expected:
        with pytest.raises(ValueError, match="queue policy"):
            decide(case)
        return
    expected["active_policy"] = POLICY_NAMES.get(expected["active_policy"], expected["active_policy"])
    assert decide(case) == expected


def test_the_fallback_of_a_long_queue_still_obeys_priorities() -> None:
    case = CASES[PRIORITIES_STILL_COUNT]
    assert case["result"]["order"] == [request["id"] for request in case["waiting"]], "SGLang leaves the queue unsorted"
    seen = decide(case)
    assert seen["active_policy"] == "fcfs"
    assert seen["order"] == CASES["fcfs-129-waiting-priority"]["result"]["order"]
