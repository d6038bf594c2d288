"""Log-probabilities of prompts come to the API complete and in order, whatever becomes of the request on its way."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protocol.columns import pack_i32
from protocol.messages import PromptLogprobs, RequestStatus, StepResult
from scheduler.core import CoreScheduler
from tests.scheduler.isolated import Isolated, limits

S = RequestStatus
PROMPT = 70
WHOLE = [-float(position) for position in range(1, PROMPT)]
SHARED = [1000 + n for n in range(PROMPT)]


def isolated(usable: int = 64, **config: Any) -> Isolated:
    return Isolated(usable, limit=limits(usable, max_num_batched_tokens=16, host_blocks=64), **config)


@pytest.mark.parametrize("delay", [0, 2])
def test_parts_come_with_the_steps_that_compute_them_and_all_before_the_first_token(delay: int) -> None:
    run = isolated(delay=delay)
    run.add(1, PROMPT, 3, prompt_logprobs=2)
    run.add(2, PROMPT, 3)
    seen: list[int] = []
    while not run.finished:
        run.step()
        seen.append(len(run.told.get(1, [])))
        assert not run.tokens.get(1) or run.told[1] == WHOLE
    run.drain()
    assert run.told == {1: WHOLE}
    assert len(set(seen) - {0, len(WHOLE)}) >= 3, "part by part, as long prompts need it"


def test_a_request_that_asks_reads_nothing_from_the_cache_but_writes_to_it() -> None:
    run = isolated()
    for request_id, asks in ((1, -1), (2, 0), (3, -1), (4, 0)):
        run.add(request_id, SHARED, 2, prompt_logprobs=asks)
        run.drain()
    assert [run.finished[number].num_cached_tokens for number in (1, 2, 3, 4)] == [0, 0, 64, 0]
    assert run.told == {2: WHOLE, 4: WHOLE}
    cold = isolated()
    cold.add(2, SHARED, 2, prompt_logprobs=0)
    cold.drain()
    cold.add(3, SHARED, 2)
    cold.drain()
    assert cold.finished[3].num_cached_tokens == 64


@pytest.mark.parametrize("recovery", ["recompute", "swap"])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_preemption_after_any_pass_repeats_and_loses_nothing(delay: int, recovery: str) -> None:
    for after in range(9):
        run = isolated(delay=delay, recovery_policy=recovery)
        run.add(1, PROMPT, 6, prompt_logprobs=0)
        for _ in range(after):
            run.step()
        run.preempt(1)
        run.drain()
        assert run.told[1] == WHOLE and len(run.tokens[1]) == 6
        assert after == 0 or run.finished[1].num_preemptions == 1


def test_pages_go_to_the_host_only_when_all_has_been_told() -> None:
    run = isolated(recovery_policy="swap")
    run.add(1, PROMPT, 6, prompt_logprobs=0)
    run.step()
    run.preempt(1)
    assert not run.request(1).host_blocks
    while not run.tokens:
        run.step()
    run.preempt(1)
    assert run.request(1).host_blocks
    run.drain()
    assert run.told[1] == WHOLE


def test_what_has_been_told_may_come_from_the_cache_when_the_request_returns() -> None:
    run = isolated()
    run.add(1, SHARED, 6, prompt_logprobs=0)
    for _ in range(3):
        run.step()
    assert len(run.told[1]) == 48
    run.preempt(1)
    run.step()
    (new,) = run.steps[-1].new  # type: ignore[union-attr]
    assert (new.num_computed, new.prompt_logprobs_from) == (48, 49)
    run.drain()
    assert run.told[1] == WHOLE


@pytest.mark.parametrize("delay", [0, 2])
def test_another_runner_tells_the_rest(delay: int) -> None:
    run = isolated(delay=delay)
    run.add(1, PROMPT, 4, prompt_logprobs=0)
    for _ in range(delay + 2):
        run.step()
    assert 0 < len(run.told[1]) < len(WHOLE)
    run.lose_runner()
    run.drain()
    assert run.told[1] == WHOLE and len(run.tokens[1]) == 4


@pytest.mark.parametrize("delay", [0, 2])
def test_a_step_that_fails_tells_nothing_and_its_tokens_are_computed_again(delay: int) -> None:
    for after in range(6):
        run = isolated(delay=delay)
        run.add(1, PROMPT, 4, prompt_logprobs=0)
        run.add(2, PROMPT, 4)
        for _ in range(after):
            run.step()
        run.fail_next()
        run.drain()
        assert run.told == {1: WHOLE} and run.status(1) == S.LENGTH


def test_a_scheduler_that_takes_over_goes_on_where_the_api_is() -> None:
    run = isolated()
    run.add(1, SHARED, 2)
    run.drain()
    for known, cached in ((0, 0), (1, 0), (16, 0), (17, 16), (40, 32), (PROMPT, 64)):
        request_id = 10 + known
        run.told[request_id] = WHOLE[: max(known - 1, 0)]
        run.add(request_id, SHARED, 2, prompt_logprobs=0, prompt_logprobs_from=known, resumed=True)
        run.drain()
        assert run.finished[request_id].num_cached_tokens == cached, known
        assert run.told[request_id] == WHOLE


def test_more_than_the_prompt_has_cannot_have_been_told() -> None:
    run = isolated()
    run.add(1, SHARED, 2, prompt_logprobs=0, prompt_logprobs_from=1 << 40, resumed=True)
    assert run.request(1).introduced(0).prompt_logprobs_from == PROMPT  # the runner keeps it in 32 bits
    run.drain()
    assert run.status(1) == S.LENGTH


def test_a_request_that_moves_takes_along_what_has_been_told() -> None:
    one, other = isolated(), isolated()
    one.add(1, PROMPT, 4, prompt_logprobs=0)
    one.step()
    one.step()
    (moved,) = one.core.hand_over(1000)
    assert moved.submit.prompt_logprobs_from == 33 == len(one.told[1]) + 1
    other.told[1] = list(one.told[1])
    other.core.take_in(moved)
    other.collect()
    other.drain()
    assert other.told[1] == WHOLE


def test_a_kv_source_brings_nothing_to_a_request_that_asks() -> None:
    run = isolated()
    run.add(1, PROMPT, 2, prompt_logprobs=0, kv_source="peer/1")
    run.drain()
    assert run.orders() == [] and run.told[1] == WHOLE


def test_a_prompt_in_parts_cannot_be_asked_about() -> None:
    run = isolated()
    run.add(1, PROMPT, 2, prompt_logprobs=0, open=True)
    assert run.rejected[1].code == "invalid_open"


def test_a_part_of_another_residency_or_behind_a_gap_changes_nothing() -> None:
    run = isolated()
    run.add(1, PROMPT, 2, prompt_logprobs=0)
    run.step()
    apart = run.core.schedule()
    assert apart is not None
    incarnation = run.request(1).incarnation
    parts = [
        PromptLogprobs(1, incarnation + 1, 17, b"\0\0\0\0", pack_i32([1])),
        PromptLogprobs(1, incarnation, 18, b"\0\0\0\0", pack_i32([1])),
        PromptLogprobs(1, incarnation, 2, b"\0\0\0\0", pack_i32([1])),
        PromptLogprobs(99, incarnation, 17, b"\0\0\0\0", pack_i32([1])),
    ]
    run.core.update(StepResult(apart.epoch, apart.step_id, prompt_logprobs=parts))
    assert all(not outputs.prompt_logprobs for _, outputs in run.core.take_outputs())
    assert run.request(1).told == 17


def test_random_histories_tell_every_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools, shared prefixes, preemptions, failed steps and lost runners, at every depth."""
    swapped = 0
    out = CoreScheduler.preempt

    def counting(self: CoreScheduler, request: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal swapped
        out(self, request, *args, **kwargs)
        swapped += bool(request.host_blocks)

    monkeypatch.setattr(CoreScheduler, "preempt", counting)
    for seed in range(25):
        rng = random.Random(seed)
        run = isolated(14, delay=rng.randrange(3), recovery_policy=rng.choice(["recompute", "swap"]))
        wanted = {}
        for request_id in range(1, 7):
            prompt = SHARED[: rng.randint(1, PROMPT)] + [request_id] * rng.randrange(3)
            asks = rng.choice([-1, 0, 3])
            run.add(request_id, prompt, rng.randint(1, 12), prompt_logprobs=asks)
            if asks >= 0 and len(prompt) > 1:
                wanted[request_id] = [-float(position) for position in range(1, len(prompt))]
        for _ in range(rng.randint(5, 40)):
            act = rng.random()
            if act < 0.2:
                run.preempt(rng.randint(1, 6))
            if act > 0.96:
                run.fail_next()
            elif act > 0.94:
                run.lose_runner()
            else:
                run.step()
        run.drain()
        assert run.told == wanted, seed
    assert swapped
