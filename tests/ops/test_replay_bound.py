"""The least share of late requests, where it can be worked out by hand, and that no replay does better."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ops.replay import bound
from ops.replay.bound import Load, least_late
from runner.step_costs import LinearCost

COST = LinearCost(token_ns=1e7, context_ns=0, row_ns=0)
"""A hundred tokens a second."""
TRACES = Path(__file__).parents[1] / "data/traces"


def load(*requests: tuple[float, int]) -> Load:
    """(arrival in seconds, prompt tokens) each; one output token."""
    at, prompt = np.array(requests, np.float64).T
    return Load(at, prompt, np.ones(len(requests)))


def test_nobody_need_be_late_where_everything_fits() -> None:
    assert least_late(load((0, 100), (3, 100), (6, 100)), COST, 100, 0.01) == 0


def test_one_large_request_stands_in_for_the_backlog_of_many_small_ones() -> None:
    """20 s of work come at once, then a second of it every second: if the large one waits, nobody else does."""
    arrivals = [(0.0, 2000), *[(float(second), 100) for second in range(1, 61)]]
    assert 0.5 / 61 < least_late(load(*arrivals), COST, 1000, 0.01) < 1.5 / 61


def test_a_shorter_longest_time_makes_more_late() -> None:
    """A backlog of 20 s stays for 100: who waits 40 s at most has to be relieved by others."""
    arrivals = [(second / 2, 100) for second in range(40)] + [(20.0 + second, 100) for second in range(100)]
    shares = [least_late(load(*arrivals), COST, longest, 0.01) for longest in (40, 80, 300)]
    assert shares[0] > 1.3 * shares[1] > 1.3 * 1.3 * shares[2] > 0.1


def test_who_can_not_tell_the_long_from_the_short_has_more_late() -> None:
    """20 s of work too many, in requests with one prompt and very different numbers of outputs."""
    at = np.repeat(np.arange(40.0), 4)
    some = Load(at, np.full(160, 10.0), np.tile((1.0, 1.0, 1.0, 121.0), 40))
    known, alike = (least_late(some, COST, 1000, 0.01, alike=same) for same in (False, True))
    assert 0 < 2 * known < alike


def test_a_time_in_which_not_all_can_end_is_refused() -> None:
    with pytest.raises(ValueError, match="no order ends every request within 10 s"):
        least_late(load(*[(0.0, 1000)] * 10), COST, 10, 0.01)


def test_the_command_says_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(TRACES / "azure_2023_conv_300.csv.gz")
    assert bound.main([trace, "--longest-e2e", "100", "--time-scale", "0.2"]) == 0
    assert "of 300 requests are late" in capsys.readouterr().out
    assert bound.main(["nowhere", "--longest-e2e", "100"]) == 1
    assert "nowhere" in capsys.readouterr().err
