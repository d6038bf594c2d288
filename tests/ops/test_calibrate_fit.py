"""Fitting the cost model: exact where the steps are, robust where they aren't, and judged on what it hasn't seen."""

from __future__ import annotations

import numpy as np
import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.calibrate.fit import FitError, Floats, Samples, errors, fit, nnls, predict
from runner.step_costs import LinearCost

DENSE = LinearCost(6_000_000, 200_000, 50, 30_000, overlap=False)
OVERLAPPED = LinearCost(5_500_000, 40_000, 44, 2_000, overlap=True)


def steps(cost: LinearCost, *, noise: float = 0.0, seed: int = 1, count: int = 900, runs: int = 24) -> Samples:
    """Decodes of up to 32 rows and prefills beside them, in runs, at what `cost` says they take."""
    random = np.random.default_rng(seed)
    rows = random.choice([1, 2, 4, 8, 16, 32], count).astype(float)
    prefill = np.where(random.random(count) < 0.2, random.choice([64, 128, 256, 1024], count), 0)
    tokens = rows + prefill
    context = rows * random.choice([16, 128, 512, 2048], count) + tokens
    plain = Samples(tokens, context, rows, np.ones(count), np.sort(random.integers(0, runs, count)))
    ns = predict(cost, plain) * (1 + noise * random.standard_normal(count))
    return Samples(tokens, context, rows, ns, plain.group)


def numbers(cost: LinearCost) -> list[float]:
    return [cost.fixed_ns, cost.token_ns, cost.context_ns, cost.row_ns]


@pytest.mark.parametrize("cost", [DENSE, OVERLAPPED])
def test_steps_that_follow_a_model_give_that_model_back(cost: LinearCost) -> None:
    found = fit(steps(cost))
    assert found.cost.overlap == cost.overlap
    assert numbers(found.cost) == pytest.approx(numbers(cost), rel=1e-6)
    assert found.error < 1e-9 and found.error_p90 < 1e-9
    assert found.steps == 900


@pytest.mark.parametrize("cost", [DENSE, OVERLAPPED])
def test_noise_moves_the_model_little_and_is_stated_as_the_error(cost: LinearCost) -> None:
    found = fit(steps(cost, noise=0.1))
    assert found.cost.overlap == cost.overlap
    assert found.cost.fixed_ns == pytest.approx(cost.fixed_ns, rel=0.05)
    assert found.cost.token_ns == pytest.approx(cost.token_ns, rel=0.05)
    assert found.error == pytest.approx(0.08, abs=0.02), "the mean of |x| is 0.8 deviations"
    assert found.error_p90 == pytest.approx(0.165, abs=0.03)


def test_disturbed_steps_are_left_out_of_the_fit_but_not_of_the_error() -> None:
    clean = steps(DENSE, noise=0.02)
    disturbed = np.random.default_rng(2).random(len(clean)) < 0.05
    short = np.arange(len(clean)) % 2 == 0
    ns = np.where(disturbed, clean.ns * np.where(short, 0.001, 10), clean.ns)
    found = fit(Samples(clean.tokens, clean.context, clean.rows, ns, clean.group))
    assert numbers(found.cost)[:2] == pytest.approx(numbers(DENSE)[:2], rel=0.02)
    assert found.trimmed == pytest.approx(disturbed.mean(), abs=0.02)
    assert found.error > 0.05, "of undisturbed steps it would be 0.016"


def test_no_number_is_negative_even_if_the_steps_ask_for_it() -> None:
    plain = steps(DENSE)
    ns = plain.ns - 100_000 * plain.rows + 6_000_000
    found = fit(Samples(plain.tokens, plain.context, plain.rows, ns, plain.group))
    assert min(numbers(found.cost)) >= 0


def test_the_error_comes_from_runs_that_the_fit_has_not_seen() -> None:
    plain = steps(DENSE)
    odd = np.isin(plain.group, np.unique(plain.group)[3::4])
    found = fit(Samples(plain.tokens, plain.context, plain.rows, np.where(odd, 2.0, 1.0) * plain.ns, plain.group))
    assert numbers(found.cost) == pytest.approx(numbers(DENSE), rel=1e-6)
    assert found.error == pytest.approx(0.5)


def test_one_run_is_judged_by_every_fourth_step() -> None:
    plain = steps(DENSE)
    one = Samples(plain.tokens, plain.context, plain.rows, plain.ns, np.zeros(len(plain), np.int64))
    assert fit(one).error < 1e-9


def test_a_few_steps_are_no_basis() -> None:
    with pytest.raises(FitError, match="31 steps, at least 32"):
        fit(steps(DENSE, count=31))


def test_a_prediction_is_what_the_cost_model_itself_says() -> None:
    for cost in (DENSE, OVERLAPPED):
        plain = steps(cost, noise=0.3, count=50)
        sizes = zip(*(column.astype(int).tolist() for column in (plain.tokens, plain.context, plain.rows)), strict=True)
        assert predict(cost, plain).astype(int).tolist() == [cost.step_ns(*size) for size in sizes]
    assert errors(DENSE, steps(DENSE, count=50)) == (0.0, 0.0)


def projected(columns: Floats, target: Floats) -> Floats:
    """The slow twin: projected gradient descent to the same minimum."""
    gram, aim = columns.T @ columns, columns.T @ target
    step = 1 / max(float(np.linalg.eigvalsh(gram)[-1]), 1e-12)
    x = np.zeros(columns.shape[1])
    for _ in range(20_000):
        x = np.maximum(x - step * (gram @ x - aim), 0)
    return x


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_non_negative_least_squares_finds_the_minimum(seed: int, width: int) -> None:
    random = np.random.default_rng(seed)
    columns, target = random.standard_normal((12, width)), random.standard_normal(12)
    x, loss = nnls(columns, target)
    twin = projected(columns, target)
    assert (x >= 0).all()
    assert loss == pytest.approx(float(np.square(columns @ x - target).sum()))
    assert loss <= float(np.square(columns @ twin - target).sum()) + 1e-9


def test_a_column_of_zeros_does_no_harm() -> None:
    columns = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    x, loss = nnls(columns, np.array([2.0, 2.0, 2.0]))
    assert x.tolist() == pytest.approx([2.0, 0.0])
    assert loss == pytest.approx(0.0)


def test_a_busy_machine_that_makes_many_steps_longer_moves_the_model_little() -> None:
    clean, random = steps(DENSE, noise=0.03), np.random.default_rng(5)
    longer = 1 + (random.random(len(clean)) < 0.3) * random.exponential(0.5, len(clean))
    found = fit(Samples(clean.tokens, clean.context, clean.rows, clean.ns * longer, clean.group))
    assert numbers(found.cost)[:2] == pytest.approx(numbers(DENSE)[:2], rel=0.08)
    assert 0.03 < found.trimmed < 0.35
