"""Who makes room for an urgent arrival is as recorded of SGLang, except where it took victims in vain."""

from __future__ import annotations

import pytest

from scheduler.policies.urgent import Holder, make_room, tokens_needed
from tests.scheduler.sglang_cases import (
    Case,
    budget_of,
    candidate_of,
    held,
    key_of,
    left,
    offered,
    recorded,
    runner_of,
    tree_of,
    urgency,
)

CASES = recorded("prefill_adder", "preemption")

#: Purposeful differences, see docs/differences.md: whom we let go per candidate, where that isn't whom SGLang let go.
OUR_VICTIMS: dict[str, list[list[str]]] = {
    "threshold-one-victim-needed-candidate-11": [[]],
    "threshold-one-victim-needed-candidate-15": [[]],
    "threshold-one-victim-needed-candidate-16": [["run0", "run1"]],
    "threshold-low-first-one-needed-candidate-6": [[]],
    "threshold-zero-needs-strictly-better": [[], []],
    "newest-first-among-equals": [["run0", "run2", "run3"]],
    "least-urgent-first": [["run0", "run1", "run3"]],
    "least-urgent-first-then-newest": [[]],
    "least-urgent-first-low-first": [["run0", "run2", "run3"]],
    "stops-at-the-first-too-urgent": [[], []],
    "enough-exactly": [["run0", "run1"]],
    "prompt-counted-False": [[]],
    "fits-already-still-takes-one": [[]],
    "second-candidate-does-not-take-the-same": [[], [], []],
    "finished-is-skipped": [[]],
    "ratio-shrinks-what-a-victim-frees": [[]],
    "ignore-eos-victim-counts-in-full": [["run0", "run1", "run2", "run3"]],
    "clip-in-need": [["run0", "run1"]],
    "page16-victim-frees-pages": [[]],
    "chunking-on-admits-part": [[]],
    "mixture-0": [[], ["run0", "run1", "run2", "run4", "run5", "run6"], []],
    "mixture-2": [["run1"], []],
    "mixture-4": [[], [], []],
    "mixture-6": [["run0", "run3", "run4"], []],
    "mixture-7": [["run2", "run4"], [], []],
    "mixture-10": [["run0", "run2", "run3", "run5"], []],
    "mixture-12": [["run4", "run5"], [], ["run1", "run3"]],
    "mixture-13": [[], ["run1"], []],
}


def decide(case: Case, *, as_recorded: bool) -> list[Case]:
    """Offer the candidates in turn, and each that gets room to the budget.

    `as_recorded`: with what SGLang knew at that moment (no prompt of a candidate never tried before), and with a slot
    wanted by everybody. Otherwise with the whole prompt, and slots enough: only memory can be short.
    """
    low, page_size = case["low_values_first"], case["page_size"]
    tree = tree_of(case)
    budget = budget_of(case, tree)
    running = list(case["running"])
    available = case["available"]
    steps: list[Case] = []
    for index, request in enumerate(case["candidates"]):
        candidate = candidate_of(request, tree.path(key_of(request)))
        tokens, matched = candidate.tokens, candidate.matched
        if as_recorded:
            step = case["result"]["steps"][index]
            tokens, matched = step["prompt_tokens_seen"], step["prefix_len_seen"]
        able = [each for each in running if not each.get("finished")]
        victims = make_room(
            urgency(request, low),
            tokens_needed(tokens, matched, candidate.max_new, budget.rem_total),
            1 if as_recorded else 0,
            [Holder(urgency(each, low), each["entry_time"], budget.expected(runner_of(each))) for each in able],
            threshold=case["preemption_threshold"],
        )
        gone = [able[victim] for victim in victims or ()]
        freed = sum(held(each, page_size) for each in gone)
        budget.preempted([runner_of(each) for each in gone], freed)
        available += freed
        running = [each for each in running if each not in gone]
        seen: Case = {
            "id": request["id"],
            "preempted": bool(gone),
            "victims": sorted(each["id"] for each in gone),
            "running": [each["id"] for each in running],
            "available_after": available,
            "evictable_after": tree.evictable(),
            **left(budget),
        }
        if victims is not None and (gone or not as_recorded):
            grant, _ = offered(budget, tree, request, False)
            seen["then_add_one_req"] = {
                "verdict": grant.verdict.name,
                "admitted": grant.extend > 0,
                "extend_len": grant.extend or None,
                **left(budget),
            }
        steps.append(seen)
    return steps


def recorded_steps(case: Case) -> list[Case]:
    inputs = {"prompt_tokens_seen", "prefix_len_seen"}
    return [{key: value for key, value in step.items() if key not in inputs} for step in case["result"]["steps"]]


def victims_of(steps: list[Case]) -> list[list[str]]:
    return [step["victims"] for step in steps]


@pytest.mark.parametrize("name", CASES)
def test_knowing_what_sglang_knew_the_same_requests_leave(name: str) -> None:
    case = CASES[name]
    assert decide(case, as_recorded=True) == recorded_steps(case)


@pytest.mark.parametrize("name", CASES)
def test_with_the_whole_prompt_counted_nobody_leaves_in_vain(name: str) -> None:
    case = CASES[name]
    seen = decide(case, as_recorded=False)
    if name not in OUR_VICTIMS:
        assert victims_of(seen) == victims_of(recorded_steps(case))
        return
    assert victims_of(seen) == OUR_VICTIMS[name] != victims_of(recorded_steps(case))


def test_an_urgent_prompt_that_can_never_get_room_evicts_nobody() -> None:
    case = CASES["prompt-counted-False"]
    theirs, ours = recorded_steps(case)[0], decide(case, as_recorded=False)[0]
    assert (theirs["victims"], theirs["then_add_one_req"]["admitted"]) == (["run0"], False), "a victim in vain"
    assert (ours["victims"], ours["preempted"]) == ([], False)


def test_an_urgent_request_that_fits_anyway_is_admitted_and_nobody_leaves() -> None:
    case = CASES["fits-already-still-takes-one"]
    assert recorded_steps(case)[0]["victims"] == ["run0"]
    ours = decide(case, as_recorded=False)[0]
    assert (ours["victims"], ours["then_add_one_req"]["admitted"]) == ([], True)


def test_a_missing_slot_takes_one_victim_even_if_memory_is_plenty() -> None:
    running = [Holder(priority=5, entry=1.0, frees=7.0), Holder(priority=5, entry=2.0, frees=7.0)]
    assert make_room(-20, -100.0, 1, running) == (1,)
    assert make_room(-20, -100.0, 0, running) == ()


def test_equals_never_make_room_for_each_other() -> None:
    running = [Holder(priority=0, entry=1.0, frees=1000.0)]
    assert make_room(0, 1.0, 1, running, threshold=0) is None


def test_victims_leave_in_one_defined_order() -> None:
    running = [Holder(2, 1.0, 1.0), Holder(9, 1.0, 1.0), Holder(2, 3.0, 1.0), Holder(9, 2.0, 1.0)]
    assert make_room(-20, 4.0, 1, running) == (3, 1, 2, 0), "least urgent first, newest first among equals"
