"""The predictive budget gives the verdicts and grants that SGLang was recorded to give, one prefill pass at a time."""

from __future__ import annotations

import copy

import pytest

from scheduler.policies.orders import chunk_limit, shortest_prefill
from scheduler.policies.prefill_budget import Chunk, Verdict
from tests.scheduler.sglang_cases import (
    SHORTEST,
    Case,
    budget_of,
    in_pages,
    left,
    offered,
    recorded,
    tree_of,
    waiting_of,
)

ADMISSIONS = recorded("prefill_adder", "admission")
LIMITS = recorded("prefill_adder", "shortest_prefill_chunk_limit")

#: Purposeful differences, see docs/differences.md: tokens that we grant to a chunk which SGLang ends inside a page.
OUR_CHUNKS = {"continue-chunk-tight-page16": 16, "mixture-6": 192, "mixture-19": 112}


def decide(case: Case) -> Case:
    """A pass as SGLang's loop makes it, described in the recording's terms."""
    tree = tree_of(case)
    budget = budget_of(case, tree)
    seen: Case = {"evictable": tree.evictable(), "start": left(budget), "steps": [], "stopped": None}
    admitted: list[str] = []
    hits = inputs = 0
    cut = None
    if chunk := case.get("chunked"):
        grant = budget.offer_chunk(
            Chunk(chunk["input_len"], chunk["computed_len"], chunk["max_new_tokens"]),
            limit=case.get("chunked_req_limit"),
        )
        seen["steps"].append(
            {
                "call": "add_chunked_req",
                "id": chunk["id"],
                "admitted": True,
                "prefix_len": chunk["computed_len"],
                "extend_len": grant.extend,
                "unfinished": grant.unfinished,
                "state": grant.verdict.name,
                **left(budget),
            }
        )
        admitted.append(chunk["id"])
        inputs += grant.extend
    for request in case["waiting"]:
        before = budget.state
        if before is Verdict.OTHER and not case["probe_past_stop"]:
            seen["stopped"] = f"budget_state before {request['id']}"
            break
        grant, matched = offered(budget, tree, request, case["tree_disabled"])
        seen["steps"].append(
            {
                "call": "add_one_req",
                "id": request["id"],
                "state_before": before.name,
                "prefix_len": matched,
                "verdict": grant.verdict.name,
                "admitted": grant.extend > 0,
                "extend_len": grant.extend or None,
                "is_new_chunked": grant.unfinished,
                **left(budget),
            }
        )
        if grant.extend:
            admitted.append(request["id"])
            hits += matched
            inputs += grant.extend
            cut = request["id"] if grant.unfinished else cut
        if grant.verdict is not Verdict.CONTINUE and not case["probe_past_stop"]:
            seen["stopped"] = f"verdict for {request['id']}"
            break
    return seen | {"can_run": admitted, "new_chunked": cut, "log_hit_tokens": hits, "log_input_tokens": inputs}


@pytest.mark.parametrize("name", [name for name in ADMISSIONS if name not in OUR_CHUNKS])
def test_a_pass_admits_as_recorded(name: str) -> None:
    case = ADMISSIONS[name]
    assert decide(case) == case["result"]


@pytest.mark.parametrize("name", OUR_CHUNKS)
def test_an_unfinished_chunk_ends_at_a_page_border_and_the_rest_is_as_recorded(name: str) -> None:
    case, ours = ADMISSIONS[name], OUR_CHUNKS[name]
    expected, page_size = copy.deepcopy(case["result"]), case["page_size"]
    theirs = expected["steps"][0]["extend_len"]
    assert theirs % page_size and not ours % page_size
    saved = in_pages(theirs, page_size) - ours
    for step in expected["steps"]:
        for budget in ("rem_total", "cur_rem", "rem_input", "rem_chunk"):
            step[budget] += saved
    expected["steps"][0]["extend_len"] = ours
    expected["log_input_tokens"] += ours - theirs
    assert decide(case) == expected


@pytest.mark.parametrize("name", LIMITS)
def test_a_chunk_leaves_the_recorded_room_for_shorter_prompts(name: str) -> None:
    case = LIMITS[name]
    queue = [waiting_of(request, [], False, False) for request in case["waiting"]]
    order = shortest_prefill(queue)
    assert [queue[index].id for index in order] == case["result"]["order"]
    chunk = case["chunked"]
    limit = None
    if case["policy"] == SHORTEST:
        remaining = chunk["input_len"] - chunk["computed_len"]
        limit = chunk_limit(case["budget"], case["page_size"], remaining, (queue[index].uncached for index in order))
    assert limit == case["result"]["limit"]
