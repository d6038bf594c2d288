"""The forecast's arithmetic beside slow twins: survival from ends and limits, and what a batch holds at its fullest."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.lengths import BINS, EDGES, MAX_TENANTS, LearnedLengths, OutputLengths, bin_of, survival
from scheduler.policies.peak import GROWTH, POINTS, Curve, Outlook, curve_of, curve_of_one, last_point

BLOCK = 16
AHEAD = GROWTH * BLOCK
NOBODY = np.zeros(0, np.int32)
FOREVER = 1 << 19


def point_of(ahead: int) -> int:
    """The point in time at which a row has `ahead` more outputs."""
    return AHEAD.tolist().index(ahead)


def chance(learned: LearnedLengths, outputs: int, ahead: int, tenant: int = -1) -> float:
    """That a request with so many outputs goes on for `ahead` more."""
    row = int(learned.rows(np.array([tenant]))[0])
    return float(learned.table[row, int(bin_of(np.array([outputs]))[0]), point_of(ahead)])


def taught(lengths: np.ndarray, limit: int = FOREVER, memory: float = 1e9, clip: int = 4096) -> LearnedLengths:
    """What is known after outputs of these lengths, cut off at `limit`."""
    learned = LearnedLengths(memory, clip, AHEAD)
    for length in lengths.tolist():
        learned.observe(0, min(length, limit), at_limit=length > limit)
    learned.refresh(NOBODY, NOBODY, all_rows=True)
    return learned


# --- how long outputs get ---------------------------------------------------------------------------------------


def test_before_there_is_data_nobody_ends_before_the_clip_and_everybody_soon_after() -> None:
    learned = LearnedLengths(1000, 512, AHEAD)
    assert chance(learned, 0, 464) == 1.0
    assert chance(learned, 0, 672) < 1e-3
    assert chance(learned, 3000, 672) == 1.0, "of those who outlived the clip nothing is known"


def test_survival_is_that_of_the_lengths_that_were_seen() -> None:
    lengths = np.ceil(np.random.default_rng(3).exponential(120, 6000)).astype(int)
    learned = taught(lengths)
    for ahead in (16, 64, 128, 384):
        assert chance(learned, 0, ahead) == pytest.approx(np.mean(lengths > ahead), abs=0.02)
        for outputs in (40, 200):
            lived = lengths[lengths > outputs]
            assert chance(learned, outputs, ahead) == pytest.approx(np.mean(lived > outputs + ahead), abs=0.04)


def test_a_request_ended_by_its_limit_says_only_that_it_would_have_been_longer() -> None:
    lengths = np.ceil(np.random.default_rng(4).exponential(120, 6000)).astype(int)
    learned = taught(lengths, limit=80)
    assert chance(learned, 0, 64) == pytest.approx(np.mean(lengths > 64), abs=0.02)
    assert chance(learned, 0, 128) == pytest.approx(chance(learned, 0, 464), abs=1e-9), "nobody was seen beyond"
    assert chance(learned, 0, 128) > 0.45


def test_those_that_still_run_keep_the_first_to_end_from_speaking_for_all() -> None:
    lengths = OutputLengths(1000)
    for _ in range(20):
        lengths.observe(10, at_limit=False)
    none = np.zeros(BINS)
    alone = survival(lengths.hazards(NOBODY, none, none), AHEAD)[0, point_of(64)]
    beside = survival(lengths.hazards(np.full(60, 200), none, none), AHEAD)[0, point_of(64)]
    assert alone < 1e-6
    assert beside == pytest.approx(60 / 80, abs=0.01)


def test_what_was_seen_long_ago_fades() -> None:
    learned = LearnedLengths(50, 4096, AHEAD)
    for length in [1000] * 200 + [20] * 200:
        learned.observe(0, length, at_limit=False)
    learned.refresh(NOBODY, NOBODY, all_rows=True)
    assert chance(learned, 0, 64) < 0.15
    assert chance(taught(np.array([1000] * 200 + [20] * 200)), 0, 64) > 0.45


def test_a_tenant_with_data_has_its_own_lengths_and_one_without_has_everybodys() -> None:
    learned = LearnedLengths(1000, 4096, AHEAD)
    for _ in range(200):
        learned.observe(3, 30, at_limit=False)
        learned.observe(5, 600, at_limit=False)
    learned.observe(7, 30, at_limit=False)
    learned.refresh(NOBODY, NOBODY, all_rows=True)
    assert chance(learned, 0, 64, tenant=3) < 0.05
    assert chance(learned, 0, 64, tenant=5) > 0.95
    assert chance(learned, 0, 64, tenant=9) == chance(learned, 0, 64)
    assert chance(learned, 0, 64, tenant=7) == pytest.approx(chance(learned, 0, 64), abs=0.12), "one end is little data"


def test_beyond_the_most_tenants_the_one_that_was_quiet_for_longest_is_forgotten() -> None:
    learned = LearnedLengths(1000, 4096, AHEAD)
    for tenant in range(MAX_TENANTS):
        for _ in range(50):
            learned.observe(tenant, 600 if tenant == 0 else 30, at_limit=False)
    learned.refresh(NOBODY, NOBODY, all_rows=True)
    assert chance(learned, 0, 64, tenant=0) > 0.9
    learned.observe(99, 30, at_limit=False)
    learned.refresh(NOBODY, NOBODY, all_rows=True)
    assert chance(learned, 0, 64, tenant=0) == chance(learned, 0, 64) < 0.2
    assert len({int(learned.rows(np.array([tenant]))[0]) for tenant in (*range(1, MAX_TENANTS), 99)}) == MAX_TENANTS


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(
    ends=st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=40),
    running=st.lists(st.integers(0, 200_000), max_size=10),
)
def test_survival_starts_at_one_never_rises_and_is_a_chance(ends: list[tuple[int, bool]], running: list[int]) -> None:
    learned = LearnedLengths(100, 512, AHEAD)
    for outputs, at_limit in ends:
        learned.observe(1, outputs, at_limit=at_limit)
    learned.refresh(np.ones(len(running), np.int32), np.array(running, np.int32), all_rows=True)
    assert np.isfinite(learned.table).all()
    assert (learned.table[:, :, 0] == 1.0).all()
    assert (np.diff(learned.table, axis=2) <= 1e-12).all() and (learned.table >= 0).all()


# --- what a batch holds -----------------------------------------------------------------------------------------

rows = st.lists(
    st.tuples(st.integers(0, BINS - 1), st.integers(1, 40), st.integers(0, 3000)),
    min_size=1,
    max_size=12,
)


def slow_curve(alive: np.ndarray, batch: list[tuple[int, int, int]]) -> tuple[list[float], list[float], list[float]]:
    """Row by row and point by point: (group, blocks now, outputs left) each."""
    mean, variance, most = [0.0] * POINTS, [0.0] * POINTS, [0.0] * POINTS
    for group, now, left in batch:
        last = next(k for k in range(POINTS) if GROWTH[k] * BLOCK >= left)
        for k in range(last + 1):
            size = float(now + (GROWTH[k] if k < last else -(-left // BLOCK)))
            p = float(alive[group, k])
            mean[k] += p * size
            variance[k] += p * (1 - p) * size**2
            most[k] += size
    return mean, variance, most


def fast_curve(alive: np.ndarray, batch: list[tuple[int, int, int]]) -> Curve:
    group, now, left = (np.array(column) for column in zip(*batch, strict=True))
    final = (now - (-left // BLOCK)).astype(float)
    return curve_of(alive, group.astype(np.intp), now.astype(float), last_point(left, BLOCK), final)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(batch=rows, seed=st.integers(0, 5))
def test_the_curve_of_a_batch_is_the_sum_over_its_rows(batch: list[tuple[int, int, int]], seed: int) -> None:
    alive = np.sort(np.random.default_rng(seed).random((BINS, POINTS)), axis=1)[:, ::-1]
    curve = fast_curve(alive, batch)
    for got, expected in zip((curve.mean, curve.variance, curve.most), slow_curve(alive, batch), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    group, now, left = batch[0]
    last = int(last_point(np.array([left]), BLOCK)[0])
    one = curve_of_one(alive[group], float(now), last, float(now - (-left // BLOCK)))
    again = fast_curve(alive, batch) - (fast_curve(alive, batch[1:]) if batch[1:] else curve_of(alive, *[NOBODY] * 4))
    for got, expected in ((one.mean, again.mean), (one.variance, again.variance), (one.most, again.most)):
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-6)


def test_mean_and_variance_are_those_of_all_the_ways_in_which_rows_can_end() -> None:
    alive = taught(np.ceil(np.random.default_rng(5).exponential(90, 500)).astype(int)).table[0]
    batch = [(0, 3, 3000), (20, 9, 3000), (30, 14, 3000), (8, 1, 3000)]
    curve = fast_curve(alive, batch)
    for k in (1, 4, 9):
        outcomes = []
        for lives in product((0, 1), repeat=len(batch)):
            odds, held = 1.0, 0.0
            for (group, now, _), lived in zip(batch, lives, strict=True):
                odds *= float(alive[group, k] if lived else 1 - alive[group, k])
                held += (now + int(GROWTH[k])) * lived
            outcomes.append((odds, held))
        mean = sum(odds * held for odds, held in outcomes)
        assert curve.mean[k] == pytest.approx(mean)
        assert curve.variance[k] == pytest.approx(sum(odds * (held - mean) ** 2 for odds, held in outcomes))


def test_without_any_chance_of_an_early_end_the_peak_is_all_that_limits_allow() -> None:
    """Rows of 2, 7 and 1 blocks with 100, 37 and 250 outputs to come: when the second ends they hold 5 + 10 + 4."""
    batch = [(0, 2, 100), (4, 7, 37), (9, 1, 250)]
    assert fast_curve(np.ones((BINS, POINTS)), batch).peak(3.0) == (19.0, point_of(48))
    assert fast_curve(np.ones((BINS, POINTS)), [batch[0]] * 5).peak(3.0) == (45.0, point_of(112))


@pytest.mark.parametrize(("mean_length", "held"), [(60, 2), (200, 4), (200, 40), (800, 10)])
def test_the_peak_at_a_confidence_is_the_quantile_of_simulated_batches(mean_length: int, held: int) -> None:
    """Batches in the middle of their work, played to the end token by token with lengths drawn anew."""
    random = np.random.default_rng(mean_length + held)
    lengths = np.ceil(random.gamma(2.0, mean_length / 2, 4000)).astype(int)
    alive = taught(lengths).table[0]
    outputs = random.integers(0, mean_length, 80)
    now = held + -(-outputs // BLOCK)
    limit = 4 * mean_length
    batch = list(zip(bin_of(outputs).tolist(), now.tolist(), (limit - outputs).tolist(), strict=True))
    forecast, _ = fast_curve(alive, batch).peak(1.645)
    left = np.empty((400, 80), int)
    for row, produced in enumerate(outputs.tolist()):
        left[:, row] = np.minimum(random.choice(lengths[lengths > produced], 400), limit) - produced
    times = np.arange(0, limit, 4)
    tokens = (now * BLOCK - random.integers(0, BLOCK, 80))[:, None] + times[None, :]
    blocks = -(-tokens // BLOCK)
    peaks = [float((blocks * (one[:, None] > times[None, :])).sum(axis=0).max()) for one in left]
    assert forecast == pytest.approx(float(np.quantile(peaks, 0.95)), rel=0.06)


def test_an_outlook_says_the_peak_the_capacity_and_how_sure_it_is() -> None:
    text = str(Outlook(peak=123.4, steps=320, capacity=100, confidence=0.95, observed=77))
    assert all(part in text for part in ("123 blocks", "320 steps", "100", "95.0%", "77 requests"))


def test_bins_cover_every_length_once() -> None:
    outputs = np.arange(0, 5000)
    bins = bin_of(outputs)
    assert ((EDGES[bins] <= outputs) & (outputs < EDGES[bins + 1])).all()
