"""The running `sglang` preset, put into recorded states of SGLang, decides as was recorded."""

from __future__ import annotations

import pytest

from tests.scheduler.isolated import Isolated, solo_tokens
from tests.scheduler.sglang_cases import Case, recorded
from tests.scheduler.sglang_states import RUNNING, State, admission, state_before_admission

PASSES = recorded("admission_pass", "cases")
RETRACTIONS = recorded("retract_order", "retract_decode")
TRACES = {name: trace for name, trace in recorded("ratio", "traces").items() if trace["kind"] == "scheduler"}

#: States that ours can't be in: an order by output limit that knows priorities, and a prompt larger than the pool,
#: which is refused at the door.
INEXPRESSIBLE = ("mixture-3", "mixture-5", "mixture-15", "mixture-17", "mixture-19", "head-too-big-nothing-running")

#: Purposeful differences, see docs/differences.md.
ASKED_ANEW = ("full-flag-stops", "full-flag-and-a-chunk")
ONE_A_PASS = ("preempt-two-candidates", "mixture-7", "mixture-9")
VICTIMS_IN_VAIN = ("preempt-then-still-no-memory", "mixture-21")
FOR_MEMORY = "mixture-13"
SHARED_AT_ONCE = "lpm-in-batch-sharer-goes-last"
DIFFERENT = {*ASKED_ANEW, *ONE_A_PASS, *VICTIMS_IN_VAIN, FOR_MEMORY, SHARED_AT_ONCE}

SAME = [name for name in PASSES if name not in {*INEXPRESSIBLE, *DIFFERENT}]


def recorded_pass(name: str, seen: Case) -> Case:
    """What was recorded of the things seen. A pass that ends before its budget is made leaves the queue unsorted."""
    result = PASSES[name]["result"]
    expected = {key: result[key] for key in seen}
    if result["budgets"] is None:
        expected["waiting"] = sorted(expected["waiting"])
    return expected


@pytest.mark.parametrize("name", SAME)
def test_a_whole_pass_is_as_recorded(name: str) -> None:
    seen = admission(state_before_admission(PASSES[name]))
    if PASSES[name]["result"]["budgets"] is None:
        seen["waiting"] = sorted(seen["waiting"])
    assert seen == recorded_pass(name, seen)


def test_most_recorded_passes_are_reproduced() -> None:
    assert (len(PASSES), len(SAME)) == (48, 33)


@pytest.mark.parametrize("name", ASKED_ANEW)
def test_a_batch_that_was_full_is_asked_anew_in_the_next_pass(name: str) -> None:
    """SGLang's flag of the pass before keeps everybody out until a request ends, whatever there is room for."""
    seen = admission(state_before_admission(PASSES[name]))
    theirs = recorded_pass(name, seen)
    assert seen["prefill_batch"][: len(theirs["prefill_batch"])] == theirs["prefill_batch"]
    assert len(seen["prefill_batch"]) > len(theirs["prefill_batch"])


@pytest.mark.parametrize("name", ONE_A_PASS)
def test_urgent_arrivals_displace_others_one_a_pass_and_end_where_was_recorded(name: str) -> None:
    state = state_before_admission(PASSES[name])
    first, second = admission(state), admission(state)
    theirs = recorded_pass(name, first)
    assert len(first["preempted"]) == len(second["preempted"]) == 1
    assert sorted(first["preempted"] + second["preempted"]) == theirs["preempted"]
    assert first["prefill_batch"] + second["prefill_batch"] == theirs["prefill_batch"]


@pytest.mark.parametrize("name", VICTIMS_IN_VAIN)
def test_nobody_leaves_for_an_urgent_one_that_would_not_enter_anyway(name: str) -> None:
    seen = admission(state_before_admission(PASSES[name]))
    theirs = recorded_pass(name, seen)
    assert theirs["preempted"] and not theirs["prefill_batch"]
    assert seen == theirs | {"preempted": [], "running": [each["id"] for each in PASSES[name]["running"]]}


def test_an_urgent_arrival_displaces_others_for_memory_too() -> None:
    """SGLang's waits until somebody ends: only a missing row makes others leave there."""
    seen = admission(state_before_admission(PASSES[FOR_MEMORY]))
    theirs = recorded_pass(FOR_MEMORY, seen)
    head = theirs["waiting"][0]
    assert (theirs["prefill_batch"], theirs["preempted"]) == ([], [])
    assert [row["id"] for row in seen["prefill_batch"]] == [head] and seen["preempted"] == ["run2"]


def test_a_prompt_hits_what_another_one_computes_in_the_same_step() -> None:
    """SGLang puts the sharer off and, once both enter together, computes the prefix twice."""
    seen = admission(state_before_admission(PASSES[SHARED_AT_ONCE]))
    theirs = recorded_pass(SHARED_AT_ONCE, seen)
    sizes = {row["id"]: (row["prefix_len"], row["extend_len"]) for row in seen["prefill_batch"]}
    assert {row["id"]: row["extend_len"] for row in theirs["prefill_batch"]} == {"w0": 90, "w2": 30, "w1": 90}
    assert sizes == {"w0": (0, 90), "w1": (60, 30), "w2": (0, 30)}


# --- retraction -------------------------------------------------------------------------------------------------


def ratio(isolated: Isolated) -> float:
    value = isolated.core.refresh_stats().new_token_ratio
    assert value is not None
    return value


def free_tokens(state: State) -> int:
    return state.isolated.core.pool.num_free * state.case["page_size"]


def decode(state: State) -> tuple[list[str], list[str], list[str]]:
    """One pass in which nobody enters: who was retracted, in order, who ended, and who runs on."""
    isolated = state.isolated
    isolated.core.table.limit = 1
    before = set(isolated.running())
    scheduled = isolated.step()
    assert set(scheduled) <= before and set(scheduled.values()) <= {1}
    queue = [request.id for request in isolated.core.strategies.queue]
    retracted = [state.names[number] for number in queue if number in before]
    return retracted, [state.names[n] for n in before if n in isolated.finished], state.running()


FULL = [name for name, case in RETRACTIONS.items() if not case["result"]["fits_before"] and case["result"]["kept"]]


@pytest.mark.parametrize("name", FULL)
def test_a_full_pool_retracts_the_recorded_victims_in_the_recorded_order_in_one_pass(name: str) -> None:
    case, theirs = RETRACTIONS[name], RETRACTIONS[name]["result"]
    state = State(case, victim_policy="priority" if case["retraction_policy"] == "priority" else "")
    state.start()
    retracted, _, running = decode(state)
    ended = [state.names[number] for number in state.isolated.finished if number >= RUNNING]
    assert retracted == theirs["retracted"]
    assert sorted(running + ended) == sorted(theirs["kept"]), "those that stay decode in the same step"
    assert ratio(state.isolated) == pytest.approx(max(theirs["new_ratio"], 0.098), abs=1e-9)
    if not ended:
        left = theirs["available_after"] + theirs["evictable_after"] - theirs["tokens_needed_after"]
        assert free_tokens(state) == left


@pytest.mark.parametrize("name", [name for name, case in RETRACTIONS.items() if case["result"]["fits_before"]])
def test_nobody_is_retracted_while_all_fit(name: str) -> None:
    case = RETRACTIONS[name]
    state = State(case)
    state.start()
    retracted, _, running = decode(state)
    assert retracted == [] and sorted(running) == sorted(request["id"] for request in case["running"])
    assert ratio(state.isolated) == pytest.approx(0.7 - 0.7 * 0.86 / 600)


def test_the_last_one_that_finds_no_room_takes_it_from_an_idle_session_instead_of_being_aborted() -> None:
    """What fills the pool beside it is that session, which waits for its next part."""
    case = RETRACTIONS["retract-one-running-fits-never"]
    state = State(case)
    state.start()
    assert case["result"]["aborted"] == ["only"]
    assert decode(state) == ([], [], ["only"])
    while RUNNING not in state.isolated.finished:
        state.isolated.step()
    assert len(state.isolated.tokens[RUNNING]) == 64


@pytest.mark.parametrize("name", TRACES)
def test_a_batch_decodes_on_a_filling_pool_as_recorded_step_by_step(name: str) -> None:
    """Victims, survivors, memory and ratio of every step; a burst moves the ratio once, other decodes let it decay."""
    trace = TRACES[name]
    state = State(trace, schedule_conservativeness=trace["conservativeness"])
    state.start()
    floor = 0.14 * trace["init"]
    for step in trace["steps"]:
        assert free_tokens(state) == step["available_before"] + step["evictable_before"]
        retracted, ended, running = decode(state)
        assert (retracted, ended) == (step["requeued"], step["aborted"])
        assert sorted(running) == sorted(step["running"])
        assert ratio(state.isolated) == pytest.approx(max(step["value"], floor), abs=1e-9)


def test_a_step_that_only_prefills_leaves_the_ratio_as_it_is() -> None:
    isolated = Isolated(64, preset="sglang", max_num_batched_tokens=32)
    isolated.add(1, 80, max_tokens=3)
    for _ in range(3):
        isolated.step()
        assert ratio(isolated) == 0.7
    isolated.step()
    assert ratio(isolated) < 0.7
    isolated.drain()


def test_victims_of_an_urgent_arrival_leave_the_ratio_as_it_is() -> None:
    isolated = Isolated(64, preset="sglang", queue_policy="priority", max_num_seqs=1)
    isolated.add(1, 20, max_tokens=9, priority=50)
    isolated.step()
    isolated.add(2, 20, max_tokens=9, priority=0)
    isolated.step()
    assert isolated.running() == [2] and ratio(isolated) == 0.7
    isolated.drain()


def test_a_step_that_mixes_prefill_and_decodes_counts_as_a_decode() -> None:
    isolated = Isolated(64, preset="sglang", batch_policy="mixed", max_num_batched_tokens=32)
    isolated.add(1, 20, max_tokens=9)
    isolated.step()
    isolated.add(2, 90, max_tokens=3)
    assert ratio(isolated) == 0.7
    assert isolated.step() == {1: 1, 2: 16}, "the running row is charged first, and the rest is cut to pages"
    assert ratio(isolated) < 0.7
    isolated.drain()


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_several_leave_at_once_and_all_get_the_text_they_would_have_got_alone(delay: int) -> None:
    isolated = Isolated(12, preset="sglang", schedule_conservativeness=0.01, delay=delay)
    for number in range(1, 7):
        isolated.add(number, 16, max_tokens=60 + number)
    isolated.drain()
    assert isolated.core.stats.preemptions > 1
    assert isolated.tokens == {number: solo_tokens(number, 16, 60 + number) for number in range(1, 7)}


def test_nobody_leaves_while_the_result_in_flight_ends_somebody() -> None:
    """Six blocks, all taken; the first ends with the step that is in flight, so the second needs no victim."""
    isolated = Isolated(6, preset="sglang", admission_policy="optimistic", delay=1)
    isolated.add(1, 32, max_tokens=16)
    isolated.add(2, 33, max_tokens=40)
    isolated.drain()
    assert {} in isolated.runner.scheduled or None in isolated.steps, "one pass waited"
    assert isolated.core.stats.preemptions == 0


# --- chunks -----------------------------------------------------------------------------------------------------


def test_one_prompt_at_a_time_is_cut_and_at_a_page_border() -> None:
    """A step of 100 tokens and pages of 16: what is left after the first prompt is cut to whole pages."""
    isolated = Isolated(64, preset="sglang", max_num_batched_tokens=100)
    for number, prompt in ((1, 30), (2, 150), (3, 150)):
        isolated.add(number, prompt, max_tokens=3)
    assert [isolated.step() for _ in range(4)] == [{1: 30, 2: 64}, {2: 86}, {3: 96}, {3: 54}]
    isolated.drain()


def test_shorter_waiters_fit_beside_a_prompt_under_way_if_the_shortest_go_first() -> None:
    isolated = Isolated(64, preset="sglang", queue_policy="shortest-prefill", max_num_batched_tokens=96)
    isolated.add(1, 400, max_tokens=3)
    assert isolated.step() == {1: 96}
    isolated.add(2, 20, max_tokens=3)
    isolated.add(3, 300, max_tokens=3)
    assert isolated.step() == {1: 64, 2: 20}
    isolated.drain()


def test_a_step_smaller_than_a_page_gets_a_prompt_on_all_the_same() -> None:
    isolated = Isolated(64, preset="sglang", max_num_batched_tokens=8)
    isolated.add(1, 10, max_tokens=30)
    isolated.step()
    isolated.add(2, 30, max_tokens=3)
    assert [isolated.step() for _ in range(3)] == [{1: 2}, {2: 8}, {2: 8}]
    isolated.drain()
    assert isolated.tokens[2] == solo_tokens(2, 30, 3)


# --- orders -----------------------------------------------------------------------------------------------------


def entered(queue: str, prompts: list[int], **config: bool) -> list[int]:
    """The order in which waiters enter, one a pass."""
    isolated = Isolated(64, preset="sglang", queue_policy=queue, max_num_seqs=1, **config)
    for number, prompt in enumerate(prompts, start=1):
        isolated.add(number, prompt, max_tokens=1)
    isolated.drain()
    return list(isolated.finished)


@pytest.mark.parametrize("queue", ["lpm", "hrrn", "dfs-weight"])
def test_without_a_cache_orders_that_live_on_it_are_first_come(queue: str) -> None:
    assert entered(queue, [60, 10, 30], enable_prefix_caching=False) == [1, 2, 3]


def test_without_a_cache_the_shortest_prefill_is_the_shortest_prompt() -> None:
    """SGLang refuses to start so."""
    assert entered("shortest-prefill", [60, 10, 30], enable_prefix_caching=False) == [2, 3, 1]
