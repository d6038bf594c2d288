"""The forecast's confidence: what is said to happen nineteen times in twenty does, whatever the curves look like."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from scheduler.policies.calibration import Calibration

ROWS = 10


def watch(calibration: Calibration, said: float, real: float, first: int) -> None:
    """A batch of rows that entered from `first` on is said to hold `said` blocks, comes to hold `real`, and ends."""
    entered = np.arange(first, first + ROWS, dtype=np.int32)
    calibration.said(said, 0.0)
    for total, rows in ((real / 2, ROWS), (real, ROWS), (real / 4, ROWS // 4)):
        calibration.look(np.full(rows, total / rows), entered[:rows])


def misses(calibration: Calibration, rounds: int, points: int) -> float:
    """Forecasts for the highest of several points, each normal: the share that is exceeded of the later half."""
    random, found = Random(4), []
    for number in range(rounds):
        real = 1000.0 + 50.0 * max(random.gauss(0, 1) for _ in range(points))
        said = 1000.0 + 50.0 * calibration.z
        found.append(real > said)
        watch(calibration, said, real, ROWS * number + 1)
    assert calibration.outcomes == rounds
    return sum(found[rounds // 2 :]) / (rounds - rounds // 2)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_highest_of_many_points_exceeds_its_forecast_as_seldom_as_the_confidence_says(confidence: float) -> None:
    highest, pointwise = (
        [max(Random(seed).gauss(0, 1) for seed in range(8 * n, 8 * n + 8)) for n in range(500)],
        Calibration(confidence).z,
    )
    assert sum(peak > pointwise for peak in highest) / 500 > 3 * (1 - confidence)
    assert misses(Calibration(confidence), 2000, points=8) == pytest.approx(1 - confidence, abs=0.02)


def test_a_forecast_that_is_never_exceeded_becomes_bolder() -> None:
    calibration = Calibration(0.95)
    before = calibration.z
    for number in range(20):
        watch(calibration, said=100.0, real=50.0, first=ROWS * number + 1)
    assert calibration.z < before and calibration.misses == 0


def test_those_who_enter_later_say_nothing_about_an_earlier_forecast() -> None:
    calibration = Calibration(0.95)
    calibration.said(100.0, 0.0)
    calibration.look(np.full(ROWS, 9), np.arange(ROWS))
    calibration.look(np.full(3 * ROWS, 9), np.arange(3 * ROWS))
    assert calibration.outcomes == 0
    calibration.look(np.full(3 * ROWS, 11), np.arange(3 * ROWS))
    assert (calibration.outcomes, calibration.misses) == (1, 1)


def test_blocks_that_rows_share_are_counted_as_the_forecast_counted_them() -> None:
    calibration = Calibration(0.95)
    calibration.said(50.0, 6.0)
    calibration.look(np.full(ROWS, 10), np.arange(ROWS))
    calibration.look(np.full(ROWS, 10), np.arange(ROWS))
    assert calibration.outcomes == 0


def test_a_preemption_for_want_of_blocks_is_a_miss_of_the_forecast_that_is_watched() -> None:
    calibration = Calibration(0.95)
    calibration.preempted()
    assert calibration.outcomes == 0
    calibration.said(50.0, 0.0)
    calibration.look(np.full(ROWS, 1), np.arange(ROWS))
    before = calibration.z
    calibration.preempted()
    assert calibration.misses == 1 and calibration.z > before


def test_no_run_of_luck_takes_the_level_to_where_there_is_no_quantile() -> None:
    calm, unlucky = Calibration(0.5), Calibration(0.999)
    for number in range(500):
        watch(calm, said=100.0, real=50.0, first=ROWS * number + 1)
        watch(unlucky, said=10.0, real=50.0, first=ROWS * number + 1)
    assert calm.z == pytest.approx(0.0)
    assert 3.0 < unlucky.z < 5.0
