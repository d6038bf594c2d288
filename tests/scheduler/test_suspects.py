"""Who made a step fail is found by running halves of its requests again; the innocent lose nothing but time."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

import pytest
from harness import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protocol.messages import GrammarStatus, RequestStatus
from scheduler.suspects import CALM_STEPS, RUNNER_DIED, SUSPECT_DEATHS
from tests.scheduler.isolated import Isolated, limits, solo_tokens
from tests.scheduler.test_guarantees import CONFIGS, EVENTS, History, alone

S = RequestStatus
TRIES = 3
"""`max_step_failures` as it is by default."""
PRESETS: list[dict[str, Any]] = [
    {},
    {"preset": "vllm"},
    {"preset": "sglang"},
    {"preset": "sglang-lpm"},
    {"preset": "credit"},
    {"batch_policy": "prefill-first"},
    {"batch_policy": "static"},
    {"queue_policy": "on-time", "batch_policy": "paced", "slo_ttft_s": 1.0, "slo_tpot_s": 0.05},
    {"recovery_policy": "swap"},
    {"enable_prefix_caching": False},
]


def poisoned(*culprits: int, code: str = "device_error") -> Callable[[dict[int, int]], str]:
    """Any step with one of these fails."""
    return lambda counts: code if set(culprits) & set(counts) else ""


class Failures:
    """Counts, for each request, the failed steps that it was part of."""

    def __init__(self, isolated: Isolated, fault: Callable[[dict[int, int]], str]) -> None:
        self.fault = fault
        self.steps: list[dict[int, int]] = []
        self.isolated = isolated
        isolated.runner.fault = self

    def __call__(self, counts: dict[int, int]) -> str:
        code = self.fault(counts)
        if code:
            self.steps.append(dict(counts))
        return code

    def of(self, request_id: int) -> int:
        return sum(request_id in counts for counts in self.steps)


def loaded(count: int, *, usable: int = 256, prompt: int = 20, outputs: int = 12, **config: Any) -> Isolated:
    isolated = Isolated(usable, **config)
    for request_id in range(1, count + 1):
        isolated.add(request_id, prompt, max_tokens=outputs)
    return isolated


def assert_intact(isolated: Isolated, count: int, *culprits: int, prompt: int = 20, outputs: int = 12) -> None:
    for request_id in range(1, count + 1):
        whole = solo_tokens(request_id, prompt, outputs)
        got = isolated.tokens.get(request_id, [])
        if request_id in culprits:
            assert isolated.status(request_id) == S.ERROR and got == whole[: len(got)]
        else:
            assert isolated.status(request_id) == S.LENGTH and got == whole


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 33])
def test_a_poisoned_request_ends_alone_within_the_stated_number_of_tries(count: int, delay: int) -> None:
    for culprit in {1, (count + 1) // 2, count}:
        isolated = loaded(count, delay=delay)
        failures = Failures(isolated, poisoned(culprit))
        isolated.drain()
        assert_intact(isolated, count, culprit)
        assert failures.of(culprit) == len(failures.steps) <= ceil(log2(count)) + TRIES
        end = isolated.finished[culprit]
        assert end.code == "device_error" and "made to fail" in end.message
        assert isolated.core.stats.culprits == 1


@pytest.mark.parametrize("config", PRESETS, ids=str)
@pytest.mark.parametrize("delay", [0, 2])
def test_every_policy_keeps_suspects_apart(config: dict[str, Any], delay: int) -> None:
    limit = limits(40, host_blocks=32, kv_bytes_per_block=1024)
    isolated = loaded(12, usable=40, delay=delay, limit=limit, max_num_batched_tokens=64, **config)
    for _ in range(6):
        isolated.step()
    failures = Failures(isolated, poisoned(5))
    suspected: set[int] = set()
    while isolated.core.has_requests or isolated.pending:
        groups = [{one.request.id for one in group} for group in isolated.core.suspects.groups]
        suspected = set().union(*groups)
        ids = set(isolated.step())
        if suspected & ids:
            assert any(ids <= group for group in groups), "a step with suspects has nobody else"
    isolated.check_drained()
    assert_intact(isolated, 12, 5)
    assert failures.of(5) <= ceil(log2(12)) + TRIES


def test_several_poisoned_requests_are_all_found() -> None:
    isolated = loaded(16, delay=1)
    failures = Failures(isolated, poisoned(1, 2, 9, 16))
    isolated.drain()
    assert_intact(isolated, 16, 1, 2, 9, 16)
    assert all(failures.of(culprit) <= ceil(log2(16)) + TRIES for culprit in (1, 2, 9, 16))


def test_if_all_are_poisoned_all_of_them_end() -> None:
    isolated = loaded(6, delay=1)
    Failures(isolated, lambda counts: "device_error")
    isolated.drain()
    assert {end.status for end in isolated.finished.values()} == {S.ERROR}


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 9])
def test_a_failure_that_does_not_return_ends_nobody(count: int, delay: int) -> None:
    isolated = loaded(count, delay=delay)
    for _ in range(4):
        isolated.step()
    isolated.fail_next()
    isolated.drain()
    assert_intact(isolated, count)
    assert not isolated.core.suspects.watching or isolated.core.stats.steps < CALM_STEPS


def test_who_comes_meanwhile_runs_before_the_culprit_is_found() -> None:
    isolated = loaded(16)
    Failures(isolated, poisoned(7))
    isolated.step()
    assert isolated.core.suspects.open
    isolated.add(100, 20, max_tokens=2)
    while 100 not in isolated.finished:
        assert 7 not in isolated.finished, "the newcomer waited for the verdict"
        isolated.step()
    isolated.drain()
    assert_intact(isolated, 16, 7)


def test_a_second_culprit_among_those_not_suspected_joins_the_case() -> None:
    isolated = loaded(8)
    failures = Failures(isolated, poisoned(3, 101))
    isolated.step()
    for request_id in (100, 101, 102):
        isolated.add(request_id, 20, max_tokens=12)
    isolated.drain()
    assert_intact(isolated, 8, 3)
    assert isolated.status(101) == S.ERROR and failures.of(101) <= ceil(log2(3)) + TRIES
    assert isolated.tokens[100] == solo_tokens(100, 20, 12) and isolated.tokens[102] == solo_tokens(102, 20, 12)


def test_a_prompt_that_fails_in_its_last_chunk_is_found_there() -> None:
    isolated = Isolated(256, delay=1, max_num_batched_tokens=32)
    for request_id in range(1, 5):
        isolated.add(request_id, 100, max_tokens=4)
    done: dict[int, int] = {}

    def fault(counts: dict[int, int]) -> str:
        row = isolated.runner.rows.get(3)
        at_end = 3 in counts and row is not None and row["computed"] + counts[3] >= 100
        done[3] = done.get(3, 0) + at_end
        return "device_error" if at_end else ""

    failures = Failures(isolated, fault)
    isolated.drain()
    assert_intact(isolated, 4, 3, prompt=100, outputs=4)
    assert done[3] == failures.of(3) <= ceil(log2(4)) + TRIES


@pytest.mark.parametrize("act", ["abort", "preempt", "reset", "pause", "drain", "policy", "extend"])
def test_whatever_happens_to_suspects_meanwhile_nobody_is_lost(act: str) -> None:
    isolated = loaded(12, delay=1, usable=24)
    failures = Failures(isolated, poisoned(5))
    isolated.step()
    aborted: set[int] = set()
    for turn in range(10_000):
        if not isolated.core.has_requests and not isolated.pending:
            break
        suspects = [one.request.id for group in isolated.core.suspects.groups for one in group]
        if act == "abort" and suspects and turn == 3:
            aborted = {suspects[0], suspects[-1]} - {5}
            isolated.abort(*aborted)
        elif act == "preempt" and turn % 5 == 0:
            for request_id in suspects:
                isolated.preempt(request_id)
        elif act == "reset" and turn % 7 == 0 and turn < 40:
            isolated.control("reset_prefix_cache", running="true")
        elif act == "pause" and turn in (3, 6):
            isolated.control("pause", what="all") if turn == 3 else isolated.control("resume")
        elif act == "drain" and turn == 3:
            isolated.control("drain")
        elif act == "policy" and turn in (3, 8, 13):
            isolated.control("set", preset={3: "sglang", 8: "credit", 13: "vllm"}[turn])
        isolated.step()
    isolated.check_drained()
    for request_id in set(range(1, 13)) - aborted - {5}:
        assert isolated.tokens[request_id] == solo_tokens(request_id, 20, 12)
    assert isolated.status(5) == S.ERROR
    assert act in ("reset", "preempt") or failures.of(5) <= ceil(log2(12)) + TRIES


def test_the_culprit_may_be_aborted_while_it_is_looked_for() -> None:
    isolated = loaded(8, delay=1)
    Failures(isolated, poisoned(5))
    for _ in range(4):
        isolated.step()
    isolated.abort(5)
    isolated.drain()
    assert isolated.status(5) == S.ABORTED
    assert all(isolated.tokens[i] == solo_tokens(i, 20, 12) for i in range(1, 9) if i != 5)


def test_a_poisoned_session_is_found_when_its_next_part_comes() -> None:
    isolated = loaded(4)
    isolated.add(9, 20, max_tokens=12, open=True)
    failures = Failures(isolated, poisoned(9))
    for _ in range(60):
        isolated.step()
    assert_intact(isolated, 4)
    for part in range(TRIES):
        if 9 in isolated.finished:
            break
        isolated.extend(9, [7 + part], last=part == TRIES - 1)
        isolated.step()
    isolated.drain()
    assert isolated.status(9) == S.ERROR
    assert failures.of(9) <= ceil(log2(5)) + TRIES


@pytest.mark.parametrize("delay", [0, 1])
def test_a_failure_by_size_ends_nobody_and_steps_become_smaller_for_a_while(delay: int) -> None:
    isolated = loaded(16, delay=delay, outputs=60)
    failures = Failures(isolated, lambda counts: "out_of_memory" if sum(counts.values()) > 100 else "")
    for _ in range(20):
        isolated.step()
    assert isolated.core.token_budget <= 160
    isolated.drain()
    assert_intact(isolated, 16, outputs=60)
    assert len(failures.steps) <= 10
    assert not isolated.core.stats.culprits
    isolated.runner.fault = lambda counts: ""
    isolated.add(100, 20, max_tokens=3000)
    isolated.drain()
    assert isolated.core.token_budget == isolated.limits.max_num_batched_tokens, "all is as before in the end"


def test_a_prompt_too_large_for_one_step_is_computed_in_smaller_parts() -> None:
    isolated = Isolated(256)
    isolated.add(1, 2000, max_tokens=4)
    Failures(isolated, lambda counts: "out_of_memory" if sum(counts.values()) > 600 else "")
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 2000, 4)


def test_two_that_fail_only_together_both_get_through() -> None:
    isolated = loaded(8, delay=1)
    Failures(isolated, lambda counts: "device_error" if {2, 7} <= set(counts) else "")
    isolated.drain()
    assert_intact(isolated, 8)


def test_a_step_that_fails_for_want_of_voided_pages_accuses_nobody() -> None:
    isolated = loaded(4)
    isolated.step()
    for _ in range(2 * TRIES):
        isolated.fail_next("voided_page")
        assert not isolated.core.suspects.open
    isolated.drain()
    assert_intact(isolated, 4)


def lose(isolated: Isolated) -> None:
    """The runner dies, and another one with the same faults comes."""
    fault = isolated.runner.fault
    isolated.lose_runner()
    isolated.runner.fault = fault


def drain_with_deaths(isolated: Isolated, *culprits: int, most: int = 2000) -> int:
    """Step until all is done, on a runner that any step with one of these kills. Returns how often it died."""
    deaths = 0
    for _ in range(most):
        if not isolated.core.has_requests and not isolated.pending:
            isolated.check_drained()
            return deaths
        isolated.now += 1_000_000
        step = isolated.core.schedule()
        if step is not None and set(culprits) & set(isolated.runner._to_compute(step)):
            deaths += 1
            lose(isolated)
            continue
        if step is not None:
            isolated.pending.append(isolated.runner.execute(step))
        if isolated.pending and (len(isolated.pending) > isolated.delay or step is None):
            isolated.core.update(isolated.pending.popleft())
        isolated.collect()
        assert not isolated.core.check()
    raise AssertionError("never done")


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 9, 16])
def test_a_request_that_kills_the_runner_ends_within_the_stated_number_of_deaths(count: int, delay: int) -> None:
    for culprit in {1, count}:
        isolated = loaded(count, delay=delay)
        deaths = drain_with_deaths(isolated, culprit)
        assert_intact(isolated, count, culprit)
        assert deaths <= SUSPECT_DEATHS - 1 + ceil(log2(count)) + TRIES
        assert isolated.finished[culprit].code == RUNNER_DIED


def test_two_requests_that_kill_the_runner_are_both_found() -> None:
    isolated = loaded(9, delay=1)
    drain_with_deaths(isolated, 2, 8)
    assert_intact(isolated, 9, 2, 8)


def test_a_runner_that_is_killed_now_and_then_costs_nobody_an_error() -> None:
    isolated = loaded(6, delay=1, outputs=40)
    for turn in range(400):
        if turn % 4 == 3:
            lose(isolated)
        if not isolated.core.has_requests:
            break
        isolated.step()
    isolated.drain()
    assert_intact(isolated, 6, outputs=40)


def test_suspects_with_a_grammar_wait_for_the_new_runner_to_compile_it() -> None:
    isolated = Isolated(256)
    for request_id in range(1, 5):
        isolated.add(request_id, 20, max_tokens=12, grammar="json_schema:{}")
    for _ in range(SUSPECT_DEATHS):
        for order in isolated.orders():
            isolated.core.on_grammar_status(GrammarStatus(order.id, ""))
        step = isolated.core.schedule()
        assert step is not None
        lose(isolated)
    assert {request.status for request in isolated.core.requests.values()} == {S.WAITING_FOR_GRAMMAR}
    for order in isolated.orders():
        isolated.core.on_grammar_status(GrammarStatus(order.id, ""))
    isolated.drain()
    assert_intact(isolated, 4)


def test_passes_without_suspects_know_nothing_of_them() -> None:
    isolated = loaded(4)
    assert not isolated.core.suspects.open and not isolated.core.suspects.watching
    isolated.drain()
    assert isolated.core.stats.culprits == isolated.core.stats.failed_steps == 0


@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    config=CONFIGS,
    events=st.lists(EVENTS.filter(lambda event: event[0] not in ("fail", "lose")), min_size=5, max_size=40),
    usable=st.integers(5, 14),
    delay=st.integers(0, 3),
    culprits=st.sets(st.integers(1, 12), max_size=3),
    most_tokens=st.sampled_from([20, 1000]),
)
@example(  # a suspect that is preempted meanwhile: swapped out, it would come back past its own limit
    config={"preset": "triptych", "recovery_policy": "swap", "max_num_batched_tokens": 64, "max_num_seqs": 2},
    events=[
        ("add", 42, 1, 0, 0, "plain"),
        ("step", 1),
        ("add", 49, 14, 0, 0, "plain"),
        ("add", 17, 1, 0, 0, "plain"),
        ("add", 1, 17, 0, 0, "plain"),
    ],
    usable=5,
    delay=0,
    culprits=set(),
    most_tokens=20,
)
@example(  # the last suspect leaves by itself: the pass that notices is as small as those after it
    config={"preset": "triptych", "max_num_batched_tokens": 64, "max_num_seqs": 1, "enable_prefix_caching": False},
    events=[
        ("add", 21, 1, 0, 0, "plain"),
        ("add", 1, 1, 0, 0, "grammar"),
        ("step", 1),
        ("add", 11, 1, 0, 0, "plain"),
        ("abort", 1),
        ("step", 1),
    ],
    usable=5,
    delay=0,
    culprits=set(),
    most_tokens=20,
)
def test_whatever_the_policies_and_the_history_only_culprits_end_with_an_error(
    config: dict[str, Any],
    events: list[tuple[Any, ...]],
    usable: int,
    delay: int,
    culprits: set[int],
    most_tokens: int,
) -> None:
    """Steps fail for culprits, and for all if they are too large: a third try never is (the budget is 64)."""
    history = History(usable, delay, 6, config | {"max_step_failures": TRIES})

    def fault(counts: dict[int, int]) -> str:
        if culprits & set(counts):
            return "device_error"
        return "out_of_memory" if sum(counts.values()) > most_tokens else ""

    history.isolated.runner.fault = fault
    for event in events:
        history.play(event)
    history.drain(4000)
    for request_id, (prompt, outputs) in history.asked.items():
        if request_id in history.isolated.rejected:
            continue
        status, got = history.isolated.status(request_id), history.isolated.tokens.get(request_id, [])
        whole = alone(request_id, len(prompt), outputs, history.capacity)
        assert got == whole if status in (S.LENGTH, S.STOPPED) else got == whole[: len(got)]
        assert status != S.ERROR or request_id in culprits
