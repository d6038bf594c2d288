"""Requests that make steps fail, kill the runner or hang it, among others that must not notice: by real processes."""

from __future__ import annotations

from itertools import count
from math import ceil, log2

import pytest
from harness import running_server, wait_until

from protocol.columns import pack_i32
from protocol.messages import Finished, RequestStatus, SamplingParams, Submit
from tests.e2e import operate
from tests.e2e.kit import samples_of, wait_until_idle
from tests.e2e.operate import BareApi, bare_api

POISON = 777
OUTPUTS = 40
TRIES = 2
numbers = count(1)


def submit(api: BareApi, kind: int, *, poisoned: bool = False) -> int:
    """Submit a request whose prompt only `kind` decides; its number. Nobody is waited for."""
    number = next(numbers)
    prompt = [1000 + 100 * kind + j for j in range(40)]
    if poisoned:
        prompt[-1] = POISON
    api.send(Submit(number, pack_i32(prompt), SamplingParams(OUTPUTS, seed=7, ignore_eos=True)))
    return number


def answers(api: BareApi, kinds: range, poisoned: int = -1) -> tuple[dict[int, list[int]], Finished | None]:
    """What requests of these kinds say, all at once, one of them `poisoned`; and how that one ended."""
    sent = {kind: submit(api, kind, poisoned=kind == poisoned) for kind in kinds}
    ends = {kind: api.end_of(number) for kind, number in sent.items()}
    culprit = ends.pop(poisoned, None)
    assert {end.status for end in ends.values()} == {RequestStatus.LENGTH}
    return {kind: api.tokens[sent[kind]] for kind in ends}, culprit


def test_a_poisoned_request_ends_alone_with_the_error_and_the_others_say_what_they_would_have() -> None:
    flags = ("--backend", "sim", "--sim-step-ms", "2", "--sim-first-token-id", "2000")
    with running_server(*flags, "--sim-poison-token", str(POISON)) as server, bare_api(server) as api:
        alone, _ = answers(api, range(12))
        together, culprit = answers(api, range(12), poisoned=5)
        assert culprit is not None and (culprit.status, culprit.code) == (RequestStatus.ERROR, "device_error")
        assert together == {kind: tokens for kind, tokens in alone.items() if kind != 5}
        wait_until(lambda: samples_of(server)["triptych_scheduler_culprits_total"] == 1, 60, "the count of culprits")
        seen = wait_until_idle(server)
        assert seen["triptych_scheduler_failed_steps_total"] <= ceil(log2(12)) + 3


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_request_that_takes_the_runner_with_it_each_time_is_found_and_ended(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "DEADLINE_S", 90.0)
    flags = ("--backend", "sim", "--sim-step-ms", "2", "--sim-first-token-id", "2000", "--step-deadline-s", "0.5")
    poison = ("--sim-poison-token", str(POISON), "--sim-poison-fault", fault, "--max-step-failures", str(TRIES))
    patience = ("--restart-limit", "50", "--restart-backoff-s", "0.01")
    with running_server(*flags, *poison, *patience) as server, bare_api(server) as api:
        alone, _ = answers(api, range(3))
        together, culprit = answers(api, range(3), poisoned=1)
        assert culprit is not None and (culprit.status, culprit.code) == (RequestStatus.ERROR, "runner_died")
        assert together == {kind: tokens for kind, tokens in alone.items() if kind != 1}
        deaths = server.log().count("starting it again")
        assert 2 <= deaths <= 1 + ceil(log2(3)) + TRIES
