"""Admission that looks ahead: a learned share of what the running may still want, or all of it as a credit."""

from __future__ import annotations

import pytest

from scheduler.policies.ratio import RatioController
from tests.scheduler.isolated import Isolated, solo_tokens


def ratio(isolated: Isolated) -> float:
    value = isolated.core.refresh_stats().new_token_ratio
    assert value is not None
    return value


# --- predictive -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["sglang", "triptych"])
def test_a_newcomer_waits_while_the_expected_outputs_of_those_that_run_need_its_room(preset: str) -> None:
    """20 blocks, 320 tokens. The first: 16 + 0.7·200 = 156 to come. The second wants 16 + 200 and a page."""
    isolated = Isolated(20, preset=preset, admission_policy="predictive")
    isolated.add(1, 16, max_tokens=200)
    isolated.add(2, 16, max_tokens=200)
    isolated.step()
    assert isolated.running() == [1]
    isolated.step()
    assert isolated.running() == [1], "also in a pass in which only decodes run"
    assert isolated.request(2).held["blocks"] == 2
    isolated.drain()
    assert isolated.core.stats.preemptions == 0


def test_less_conservative_admission_lets_both_in_and_pays_with_a_retraction() -> None:
    isolated = Isolated(20, admission_policy="predictive", schedule_conservativeness=0.1)
    isolated.add(1, 16, max_tokens=200)
    isolated.step()
    isolated.add(2, 16, max_tokens=200)
    isolated.step()
    assert isolated.running() == [1, 2]
    isolated.drain()
    assert isolated.core.stats.preemptions > 0
    assert isolated.tokens == {i: solo_tokens(i, 16, 200) for i in (1, 2)}


def test_a_lone_request_may_always_use_the_whole_pool() -> None:
    isolated = Isolated(4, admission_policy="predictive")
    isolated.add(1, 40, max_tokens=4000)
    isolated.step()
    assert isolated.running() == [1]
    isolated.drain()


def test_the_ratio_starts_at_seven_tenths_and_decays_linearly_to_a_seventh_of_that_over_600_steps() -> None:
    isolated = Isolated(200, admission_policy="predictive")
    isolated.add(1, 16, max_tokens=900)
    isolated.step()
    assert ratio(isolated) == 0.7, "only steps that decode tell anything"
    for _ in range(300):
        isolated.step()
    assert ratio(isolated) == pytest.approx(0.7 - 0.7 * 0.86 / 2)
    for _ in range(400):
        isolated.step()
    assert ratio(isolated) == pytest.approx(0.098)
    isolated.drain()
    assert ratio(isolated) == 0.7, "an idle scheduler has nothing to go by"


def test_a_retraction_sets_the_ratio_to_what_the_survivors_have_shown() -> None:
    isolated = Isolated(24, admission_policy="predictive", schedule_conservativeness=0.01)
    for request_id in range(1, 9):
        isolated.add(request_id, 20, max_tokens=100)
    decoded: dict[int, int] = {}
    while not isolated.core.stats.preemptions and isolated.core.has_requests:
        decoded = {request_id: len(stream) for request_id, stream in isolated.tokens.items()}
        isolated.step()
    left = isolated.running()
    expected = (sum(decoded[request_id] for request_id in left) + 20 * len(left)) / (100 * len(left) + 1)
    assert 0.1 < expected < 1 and ratio(isolated) == pytest.approx(expected)
    isolated.drain()


@pytest.mark.parametrize("conservativeness", [0.3, 1.0, 2.0])
def test_conservativeness_scales_the_start_and_the_floor_up_to_one(conservativeness: float) -> None:
    controller = RatioController(conservativeness)
    assert controller.value == min(1.0, 0.7 * conservativeness)
    assert controller.floor == pytest.approx(0.14 * controller.value)
    controller.retract(10, 10, 1)
    assert controller.value == 1.0


# --- the watermark ----------------------------------------------------------------------------------------------


def test_the_watermark_holds_a_newcomer_only_while_something_else_is_scheduled() -> None:
    isolated = Isolated(10, watermark=0.3)
    isolated.add(1, 150, max_tokens=2)
    isolated.step()
    assert isolated.running() == [1], "alone it may have the pool"
    isolated.drain()
    isolated.add(2, 60, max_tokens=9)
    isolated.step()
    isolated.add(3, 60, max_tokens=2)
    isolated.step()
    assert isolated.running() == [2] and isolated.request(3).held == {"watermark": 1}
    isolated.drain()


def test_a_decode_is_never_charged_the_watermark() -> None:
    isolated = Isolated(10, watermark=0.5)
    isolated.add(1, 16, max_tokens=140)
    assert isolated.drain() <= 141
    assert isolated.core.stats.preemptions == 0


# --- credit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "outputs", "blocks"), [(1, 8, 1), (16, 1, 1), (16, 2, 2), (17, 16, 2), (17, 17, 3), (40, 100, 9)]
)
def test_credit_reserves_prompt_and_outputs_without_the_last_token(prompt: int, outputs: int, blocks: int) -> None:
    """As many as fit by ⌈(P + N - 1)/B⌉ enter at once, and one more waits."""
    usable = 3 * blocks
    isolated = Isolated(usable, preset="credit", enable_prefix_caching=False)
    for request_id in (1, 2, 3, 4):
        isolated.add(request_id, prompt, max_tokens=outputs)
    isolated.step()
    entered = 4 - len(isolated.core.waiting)
    assert entered == 3
    isolated.drain()
    assert isolated.core.stats.preemptions == 0


def test_credits_are_no_pages_blocks_are_taken_as_tokens_come() -> None:
    isolated = Isolated(8, preset="credit")
    isolated.add(1, 16, max_tokens=100)
    isolated.step()
    assert isolated.core.pool.num_free == 7
    isolated.add(2, 16, max_tokens=10)
    isolated.step()
    assert isolated.running() == [1], "seven blocks are free and all of them are spoken for"
    isolated.drain()


def test_a_finished_request_gives_up_its_future_credits_at_once() -> None:
    isolated = Isolated(8, preset="credit", sample=lambda i, p: 2 if i == 1 and p == 17 else 5)
    isolated.add(1, 16, max_tokens=100, ignore_eos=False)
    isolated.add(2, 16, max_tokens=100)
    isolated.step()
    isolated.step()
    isolated.step()
    assert isolated.running() == [2]
    isolated.drain()


def test_what_idle_sessions_hold_is_not_promised_to_others() -> None:
    isolated = Isolated(8, preset="credit")
    isolated.add(1, 64, max_tokens=1, open=True)
    isolated.step()
    isolated.add(2, 16, max_tokens=60)
    isolated.step()
    isolated.add(3, 16, max_tokens=30)
    for _ in range(70):
        isolated.step()
    isolated.extend(1, [], last=True)
    isolated.drain()
    assert isolated.core.stats.preemptions == 0


def test_the_clip_of_outputs_is_a_setting_that_is_heeded() -> None:
    """20 blocks, 320 tokens. 16 + 0.7·200 for the first leave no room for 16 + 200; clipped at 32 they do."""
    for clip, running in ((4096, [1]), (32, [1, 2])):
        isolated = Isolated(20, admission_policy="predictive", clip_max_new_tokens=clip)
        isolated.add(1, 16, max_tokens=200)
        isolated.add(2, 16, max_tokens=200)
        isolated.step()
        assert isolated.running() == running
        isolated.drain()
