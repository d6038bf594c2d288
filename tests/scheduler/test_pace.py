"""The learned step times: what they predict, and that no noise makes them absurd."""

from __future__ import annotations

import random

import pytest

from runner.step_costs import LinearCost
from scheduler.policies.pace import StepPace, StepSize


def taught(cost: LinearCost, steps: int, noise: float = 0.0, seed: int = 1) -> StepPace:
    """A pace that has seen steps of both kinds at `cost`."""
    pace, draw = StepPace(), random.Random(seed)
    for _ in range(steps):
        rows = draw.randint(1, 200)
        context = rows * draw.randint(100, 3000)
        tokens = rows if draw.random() < 0.5 else rows + draw.randint(200, 4000)
        took = cost.step_ns(tokens, context, rows) * (1 + noise * draw.uniform(-1, 1))
        pace.learn(StepSize(tokens, context, rows), int(took))
    return pace


@pytest.mark.parametrize(
    "cost",
    [LinearCost(), LinearCost(fixed_ns=3e6, token_ns=250_000, context_ns=900, row_ns=20_000, overlap=False)],
    ids=["large GPU", "small CPU"],
)
def test_what_was_seen_is_predicted_and_the_tokens_of_a_step_are_what_fits(cost: LinearCost) -> None:
    pace = taught(cost, 300)
    for size in (StepSize(64, 90_000, 64), StepSize(1500, 120_000, 100), StepSize(4000, 40_000, 20)):
        assert pace.predict(size) == pytest.approx(cost.step_ns(size.tokens, size.context, size.rows), rel=0.1)
    limit = 50e6 if cost.overlap else 500e6
    tokens = pace.tokens_within(limit, 100_000)
    assert cost.step_ns(tokens, 100_000 + tokens, 60) == pytest.approx(limit, rel=0.1)


def test_noise_and_steps_of_one_size_for_hours_leave_it_sane() -> None:
    pace, draw = taught(LinearCost(), 100, noise=0.3), random.Random(3)
    for _ in range(20_000):
        size = StepSize(1000, 50_000 + draw.randint(-50, 50), 40)
        pace.learn(size, int(LinearCost().step_ns(1000, 50_000, 40) * draw.uniform(0.7, 1.3)))
    assert pace.predict(StepSize(1000, 50_000, 40)) == pytest.approx(LinearCost().step_ns(1000, 50_000, 40), rel=0.1)
    assert 500 <= pace.tokens_within(45e6, 50_000) <= 2000
    assert 0 < pace.predict(StepSize(1, 0, 1)) < 100e6


def test_a_device_that_becomes_slower_is_noticed() -> None:
    pace = taught(LinearCost(), 200)
    before = pace.tokens_within(50e6, 10_000)
    slower = LinearCost(fixed_ns=11e6, token_ns=80_000, context_ns=88, row_ns=4000)
    draw = random.Random(5)
    for _ in range(2000):
        size = StepSize(draw.randint(500, 3000), 20_000, 20)
        pace.learn(size, slower.step_ns(size.tokens, size.context, size.rows))
    assert pace.tokens_within(50e6, 10_000) == pytest.approx(before / 2, rel=0.15)


@pytest.mark.parametrize("times", [1, 13, 200])
def test_one_step_tells_how_fast_a_device_is(times: int) -> None:
    """The prior is a large GPU's; what it costs more than that must not be taken for the cost of an empty step."""
    pace = StepPace()
    cost = LinearCost(fixed_ns=0, token_ns=40_000 * times, context_ns=44 * times, row_ns=0)
    pace.learn(StepSize(400, 400, 1), cost.step_ns(400, 400, 1))
    assert pace.predict(StepSize(400, 400, 1)) == pytest.approx(cost.step_ns(400, 400, 1), rel=0.02)
    assert pace.tokens_within(cost.step_ns(100, 0, 1), 0) == pytest.approx(100, abs=5)


def test_small_prefills_on_a_slow_device_teach_what_a_token_costs() -> None:
    """There no step as large as on a GPU fits the objective: who learned only from those would never see one."""
    pace = StepPace()
    cost = LinearCost(fixed_ns=2e6, token_ns=500_000, context_ns=1_000, row_ns=100_000, overlap=False)
    draw = random.Random(7)
    for _ in range(200):
        rows = draw.randint(1, 8)
        for tokens in (rows, rows + draw.randint(20, 100)):
            size = StepSize(tokens, rows * 300, rows)
            pace.learn(size, cost.step_ns(size.tokens, size.context, size.rows))
    size = StepSize(80, 1500, 5)
    assert pace.predict(size) == pytest.approx(cost.step_ns(80, 1500, 5), rel=0.1)


def test_small_prefills_that_memory_hides_do_not_change_what_a_token_costs() -> None:
    pace, cost = taught(LinearCost(), 300), LinearCost()
    before = pace.tokens_within(50e6, 10_000)
    for tokens in range(20, 120):
        size = StepSize(tokens, 2_000, 4)
        pace.learn(size, cost.step_ns(tokens, 2_000, 4))
    assert pace.tokens_within(50e6, 10_000) == before


@pytest.mark.parametrize("first_ns", [2_000_000_000, 20_000_000_000])
def test_a_first_step_that_took_seconds_is_soon_forgotten(first_ns: int) -> None:
    """A kernel was compiled in it. The steps after it are as small as can be while a token seems that dear."""
    pace, cost, steps = StepPace(), LinearCost(), 0
    pace.learn(StepSize(400, 400, 1), first_ns)
    while (tokens := max(64, min(pace.tokens_within(46e6, 5_000), 8192))) < 900:
        size = StepSize(tokens + 4, 5_000 + tokens, 5)
        pace.learn(size, cost.step_ns(size.tokens, size.context, size.rows))
        steps += 1
        assert steps < 200
    assert tokens == pytest.approx(1150, rel=0.25)


def test_before_any_step_it_has_an_opinion_and_gives_no_negative_tokens() -> None:
    pace = StepPace()
    assert pace.tokens_within(50e6, 0) > 0
    assert pace.tokens_within(1e6, 10_000_000) == 0


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("seen", [0, 3, 50])
def test_a_run_of_decodes_teaches_what_its_steps_teach_one_by_one(seen: int, steps: int) -> None:
    one_by_one, at_once = taught(LinearCost(), seen), taught(LinearCost(), seen)
    sizes = [StepSize(5, 4_000 + 5 * step, 5) for step in range(steps)]
    times_ns = [LinearCost().step_ns(size.tokens, size.context, size.rows) for size in sizes]
    for size, took_ns in zip(sizes, times_ns, strict=True):
        one_by_one.predict(size)
        one_by_one.learn(size, took_ns)
    at_once.learn_decodes(sizes[0], times_ns)
    for step in range(12):  # so that the sums are solved again, more than once
        size = StepSize(6, 9_000 + step, 6)
        assert at_once.predict(size) == one_by_one.predict(size)
        assert at_once.tokens_within(2e8, size.context) == one_by_one.tokens_within(2e8, size.context)
        for pace in (one_by_one, at_once):
            pace.learn(size, 6_000_000 + step)
