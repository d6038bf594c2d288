"""Admission by forecast: it starts with all that limits allow, learns from requests that end, and says what it saw."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ops.ctl_text import render
from protocol.messages import RequestStatus
from scheduler.metrics import Metrics
from scheduler.passes import LOOK_PAST
from scheduler.policies import forecast
from scheduler.policies.calibration import Calibration
from scheduler.policies.forecast import Forecast
from tests.scheduler.isolated import Isolated, default_sample, solo_tokens

END = 2


class Lengths:
    """Samples so that each request ends after a number of outputs that only this knows."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def add(self, isolated: Isolated, request_id: int, prompt: int, outputs: int, max_tokens: int, **more: Any) -> None:
        self._ends[request_id] = prompt + outputs - 1
        isolated.add(request_id, prompt, max_tokens=max_tokens, ignore_eos=False, **more)

    def __call__(self, request_id: int, position: int) -> int:
        return END if position == self._ends.get(request_id) else default_sample(request_id, position)


def learned(isolated: Isolated) -> int:
    policy = isolated.core.strategies.admission
    assert isinstance(policy, Forecast)
    return policy._lengths.observed


def teach(isolated: Isolated, outputs: list[int], tenant: str = "") -> None:
    """As if requests of these lengths had come and gone."""
    number = isolated.core.tenants.enter(tenant)
    for length in outputs:
        isolated.core.strategies.admission.finished(number, length, at_limit=False)
    isolated.core.tenants.leave(tenant)


def make(blocks: int, **config: Any) -> tuple[Isolated, Lengths]:
    lengths = Lengths()
    return Isolated(blocks, admission_policy="forecast", sample=lengths, **config), lengths


# --- before it knows, and after ---------------------------------------------------------------------------------


def test_at_first_it_sets_aside_all_that_limits_allow_as_credit_does() -> None:
    """20 blocks. Each may get 16 + 64 tokens, of which the last is never computed: 5 blocks."""
    for policy in ("forecast", "credit"):
        isolated = Isolated(20, admission_policy=policy)
        for request_id in range(1, 7):
            isolated.add(request_id, 16, max_tokens=64)
        isolated.step()
        assert isolated.running() == [1, 2, 3, 4], "several newcomers of one pass count for one another"
        assert sum(isolated.request(5).held.values()) == 1
        isolated.drain()
        assert isolated.core.stats.preemptions == 0


def test_a_lone_request_may_always_use_the_whole_pool() -> None:
    isolated, _ = make(4)
    isolated.add(1, 40, max_tokens=4000)
    isolated.add(2, 8, max_tokens=4000)
    isolated.step()
    assert isolated.running() == [1]
    isolated.drain()
    assert isolated.status(1) == isolated.status(2) == RequestStatus.LENGTH


def test_no_limit_on_outputs_sets_no_more_aside_than_the_clip() -> None:
    for clip, entering in ((4096, 1), (64, 4)):
        isolated, _ = make(24, clip_max_new_tokens=clip)
        for request_id in range(1, 6):
            isolated.add(request_id, 16, max_tokens=4000)
        isolated.step()
        assert len(isolated.running()) == entering
        isolated.abort(1, 2, 3, 4, 5)


def test_what_it_learns_lets_more_in_beside_one_another() -> None:
    isolated, lengths = make(60)
    entered = []
    for _ in range(3):
        for request_id in range(1, 13):
            lengths.add(isolated, 100 * len(isolated.finished) + request_id, 16, 30, 400)
        isolated.step()
        entered.append(len(isolated.running()))
        isolated.drain()
    assert entered[0] == 2, "26 blocks each by their limits"
    assert entered[0] < entered[1] <= entered[2] and entered[2] >= 8
    assert isolated.core.stats.preemptions == 0


def test_requests_that_end_at_their_limit_teach_nothing_about_longer_limits() -> None:
    isolated, _ = make(60)
    for request_id in range(1, 41):
        isolated.add(request_id, 16, max_tokens=20)
    isolated.drain()
    for request_id in (101, 102, 103):
        isolated.add(request_id, 16, max_tokens=400)
    isolated.step()
    assert isolated.running() == [101, 102]
    isolated.drain()


def test_errors_and_requests_that_never_ran_teach_nothing() -> None:
    isolated, _ = make(8)
    isolated.add(1, 16, max_tokens=100)
    isolated.add(2, 16, max_tokens=100)
    isolated.step()
    isolated.abort(2)
    assert learned(isolated) == 0
    isolated.step()
    isolated.abort(1)
    assert learned(isolated) == 1
    isolated.drain()


def test_rows_that_go_on_and_on_raise_what_is_expected_of_newcomers_before_any_of_them_ends() -> None:
    isolated, _ = make(60)
    teach(isolated, [10] * 20)
    for request_id in range(1, 7):
        isolated.add(request_id, 16, max_tokens=300)
    isolated.step()
    isolated.add(7, 880, max_tokens=9)
    policy = isolated.core.strategies.admission
    assert isinstance(policy, Forecast)
    expected = []
    for _ in range(2):
        isolated.step()
        expected.append(float(policy._lengths.table[0, 0, 2]))
        for _ in range(forecast.LOOKS):
            isolated.step()
    assert isolated.running() == [1, 2, 3, 4, 5, 6] and learned(isolated) == 20
    assert expected[1] > expected[0] + 0.05
    isolated.drain()


def test_how_far_a_row_has_come_decides_what_is_expected_of_it() -> None:
    """Outputs are 10 tokens long or, two in a hundred, 480: whoever is beyond 10 will get there."""
    for progress, enters in ((2, True), (30, False)):
        isolated, lengths = make(40)
        teach(isolated, [10] * 196 + [480] * 4)
        teach(isolated, [300] * 200, tenant="steady")
        lengths.add(isolated, 1, 16, 480, 1000)
        for _ in range(progress):
            isolated.step()
        lengths.add(isolated, 2, 160, 300, 300, tenant="steady")
        isolated.step()
        assert (2 in isolated.running()) is enters
        isolated.drain()


def test_each_tenant_is_expected_to_go_on_as_it_has() -> None:
    isolated, lengths = make(60)
    teach(isolated, [8] * 100, tenant="brief")
    teach(isolated, [400] * 60, tenant="wordy")
    entered = {}
    for tenant in ("brief", "wordy"):
        for request_id in range(1, 9):
            lengths.add(isolated, len(entered) * 10 + request_id, 16, 8, 400, tenant=tenant)
        isolated.step()
        entered[tenant] = len(isolated.running())
        isolated.drain()
    assert entered == {"brief": 8, "wordy": 2}


def test_blocks_that_rows_share_are_in_the_pool_once() -> None:
    """Ten blocks of prompt are everybody's. 5 rows with one block of their own each hold 15 of 16, not 55."""
    shared = [300 + j for j in range(160)]
    isolated, _ = make(16)
    for request_id in range(1, 8):
        isolated.add(request_id, [*shared, request_id], max_tokens=15)
        isolated.step()
    assert len(isolated.running()) == 6
    isolated.drain()
    assert isolated.core.stats.preemptions == 0


def test_a_shared_prompt_stays_for_as_long_as_one_of_those_that_share_it() -> None:
    """Twenty blocks are everybody's. Four brief rows free one block each, so there is no room for two long outputs."""
    shared = [300 + j for j in range(320)]
    for blocks, enters in ((50, False), (70, True)):
        isolated, _ = make(blocks)
        teach(isolated, [8] * 400, tenant="brief")
        teach(isolated, [300] * 400, tenant="steady")
        for request_id in range(1, 6):
            tenant = "brief" if request_id < 5 else "steady"
            isolated.add(request_id, [*shared, request_id], max_tokens=300, tenant=tenant)
        isolated.step()
        assert isolated.running() == [1, 2, 3, 4, 5]
        isolated.add(6, 17, max_tokens=300, tenant="steady")
        isolated.step()
        assert (6 in isolated.running()) is enters
        isolated.abort(*range(1, 7))


def test_what_idle_sessions_hold_is_not_promised_to_others() -> None:
    isolated, _ = make(8)
    isolated.add(1, 64, max_tokens=1, open=True)
    isolated.step()
    isolated.add(2, 16, max_tokens=48)
    isolated.step()
    isolated.add(3, 16, max_tokens=17)
    isolated.step()
    assert isolated.running() == [2]
    isolated.extend(1, [], last=True)
    isolated.drain()
    assert isolated.core.stats.preemptions == 0


def test_an_urgent_request_takes_the_place_of_others_whose_future_leaves_with_them() -> None:
    isolated, _ = make(20, queue_policy="priority")
    isolated.add(1, 16, max_tokens=140, priority=50)
    isolated.add(2, 16, max_tokens=140, priority=60)
    isolated.step()
    isolated.add(3, 16, max_tokens=140, priority=0)
    isolated.step()
    assert isolated.running() == [1, 3]
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 16, 140) for i in (1, 2, 3)}


# --- a long history ---------------------------------------------------------------------------------------------


def history(policy: str, seed: int, **config: Any) -> tuple[Isolated, list[dict[int, int]]]:
    """200 requests whose outputs are 50 tokens on average and 512 at most, ten of them waiting at any time.

    Returns the scheduler, idle, and what was scheduled in each step.
    """
    random, lengths = Random(seed), Lengths()
    isolated = Isolated(
        100, admission_policy=policy, sample=lengths, max_num_seqs=64, enable_prefix_caching=False, **config
    )
    todo = [(random.randint(5, 60), min(1 + int(random.expovariate(1 / 50)), 512)) for _ in range(200)]
    scheduled = []
    while todo or isolated.core.has_requests:
        while todo and len(isolated.core.waiting) < 10:
            prompt, outputs = todo.pop()
            lengths.add(isolated, len(todo) + 1, prompt, outputs, 512)
        scheduled.append(isolated.step())
    isolated.check_drained()
    return isolated, scheduled


def play(policy: str, seed: int = 1, **config: Any) -> tuple[int, int, list[dict[int, int]]]:
    """The same; returns steps, preemptions, and what was scheduled in each step."""
    isolated, scheduled = history(policy, seed, **config)
    return len(scheduled), isolated.core.stats.preemptions, scheduled


def test_over_a_long_history_it_preempts_a_small_part_as_often_as_optimism_and_is_done_far_sooner_than_credit() -> None:
    steps, preemptions, _ = play("forecast")
    _, optimistic, _ = play("optimistic", watermark=0.01)
    assert optimistic > 100
    assert preemptions < optimistic / 5
    credit, none, _ = play("credit")
    assert none == 0
    assert steps < credit / 2


def test_more_confidence_preempts_less() -> None:
    bold, usual, sure = (play("forecast", forecast_confidence=share)[1] for share in (0.5, 0.95, 0.999))
    assert bold > 2 * usual and usual >= sure


def test_forecasts_that_turn_out_too_low_are_made_with_more_to_spare() -> None:
    isolated, _ = history("forecast", 1, forecast_confidence=0.8)
    policy = isolated.core.strategies.admission
    assert isinstance(policy, Forecast)
    calibration = policy._calibration
    assert calibration.misses > 0.2 * calibration.outcomes > 0
    assert calibration.z > Calibration(0.8).z


def test_the_same_history_is_decided_the_same_way_each_time() -> None:
    assert play("forecast", seed=7) == play("forecast", seed=7)


# --- explains itself, costs little, changes under load ----------------------------------------------------------


def test_status_and_explanation_show_the_forecast_that_kept_a_request_out() -> None:
    isolated, _ = make(20)
    for request_id in (1, 2):
        isolated.add(request_id, 16, max_tokens=200)
    isolated.step()
    seen = isolated.control("status")["forecast"]
    assert seen == {"peak": 28.0, "steps": 224, "capacity": 20, "confidence": 0.95, "observed": 0}
    metrics = Metrics(registry := CollectorRegistry())
    metrics.sync(isolated.core.refresh_stats(), 0, {})
    assert registry.get_sample_value("triptych_scheduler_forecast_peak_blocks") == 28.0
    assert "28 of 20 blocks at the fullest" in render("status", isolated.control("status"))
    explained = isolated.control("explain", id="2")
    assert explained["forecast"] == seen and explained["held_passes"] == {"blocks": 1}
    text = " ".join(explained["explanation"])
    assert all(part in text for part in ("28 blocks", "224 steps", "of 20", "95.0%", "0 requests"))
    isolated.drain()
    assert "28 blocks" not in " ".join(isolated.control("explain", id="1")["explanation"])


def test_other_policies_have_no_forecast_to_show() -> None:
    isolated = Isolated(20, admission_policy="credit")
    for request_id in (1, 2):
        isolated.add(request_id, 16, max_tokens=200)
    isolated.step()
    assert isolated.control("status")["forecast"] is None
    assert isolated.control("explain", id="2")["forecast"] is None
    isolated.drain()


@pytest.mark.parametrize("waiting", [20, 300])
def test_a_pass_forecasts_the_batch_once_however_many_wait(monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
    batches, newcomers = [], []
    curve_of, curve_of_one = forecast.curve_of, forecast.curve_of_one

    def count_batch(*arguments: Any) -> Any:
        batches.append(1)
        return curve_of(*arguments)

    def count_one(*arguments: Any) -> Any:
        newcomers.append(1)
        return curve_of_one(*arguments)

    isolated, _ = make(30, max_bypasses=1000)
    for request_id in range(1, waiting + 4):
        isolated.add(request_id, 16, max_tokens=200)
    isolated.step()
    monkeypatch.setattr(forecast, "curve_of", count_batch)
    monkeypatch.setattr(forecast, "curve_of_one", count_one)
    isolated.step()
    assert len(batches) == 1 and len(newcomers) == 1 + LOOK_PAST
    isolated.abort(*range(1, waiting + 4))


def test_a_change_of_settings_under_load_leaves_what_was_learned() -> None:
    isolated, _ = make(60)
    teach(isolated, [20] * 20)
    for change in ({"watermark": "0.1"}, {"forecast_confidence": "0.8"}, {"max_num_seqs": "50"}):
        isolated.control("set", **change)
        assert learned(isolated) == 20
    assert isolated.control("status")["settings"]["forecast_confidence"] == 0.8
    isolated.control("set", forecast_memory="50")
    assert learned(isolated) == 0, "another memory is another estimate"


def test_a_confidence_of_less_than_a_half_or_of_certainty_is_refused() -> None:
    isolated, _ = make(20)
    for value in ("0.4", "1"):
        assert isolated.refused_control("set", forecast_confidence=value)["code"] == "invalid_argument"
