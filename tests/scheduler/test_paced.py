"""Paced steps: who decodes and how much prefill fits, from rows and waiters put together by hand."""

from __future__ import annotations

import pytest

from protocol.messages import SamplingParams
from runner.step_costs import LinearCost
from scheduler.policies.batch import BatchOptions
from scheduler.policies.on_time import OnTime
from scheduler.policies.pace import StepPace, StepSize
from scheduler.policies.paced import HURRY, Paced, Plan, Situation
from scheduler.policies.queue import QueueOptions
from scheduler.request import Request
from scheduler.table import RowTable

SECOND, MS = 1_000_000_000, 1_000_000
TPOT_MS, GRACE_S = 50, 30
NOW = 1000 * SECOND


def learned() -> StepPace:
    """A pace that has seen steps of the usual device."""
    pace, cost = StepPace(), LinearCost()
    for tokens in (200, 500, 1000, 2000):
        for rows in (1, 10):
            pace.learn(StepSize(tokens, 2000, rows), cost.step_ns(tokens, 2000, rows))
            pace.learn(StepSize(rows, 200 * rows, rows), cost.step_ns(rows, 200 * rows, rows))
    return pace


class Scene:
    """A table of running rows and a queue with one long fresh prompt."""

    def __init__(self) -> None:
        self.table = RowTable(8, 16)
        self.queue = OnTime(QueueOptions(slo_ttft_s=2.0, grace_s=GRACE_S))
        self._number = 0
        self.queue.push(self._request(age_s=0.1, prompt=4000))

    def _request(self, age_s: float, prompt: int) -> Request:
        self._number += 1
        return Request(
            id=self._number,
            peer=0,
            params=SamplingParams(1000),
            data=bytearray(4 * prompt),
            num_prompt=prompt,
            max_total=prompt + 1000,
            arrival=self._number,
            arrival_ns=NOW - int(age_s * SECOND),
        )

    def decoding(self, *, age_s: float, due_ms: float, timely: bool) -> int:
        """A row that decodes, whose next token is due that long after now. Returns its slot."""
        request = self._request(age_s, 100)
        request.timely = timely
        request.first_token_ns = NOW + int((due_ms - 0.92 * TPOT_MS) * MS)
        slot = self.table.enter(request, 100, 0, False, 0)
        self.table.known[slot] = self.table.target[slot] = 101
        return slot

    def plan(self) -> Plan:
        batch = Paced(BatchOptions(slo_ttft_s=2.0, slo_tpot_s=TPOT_MS / 1e3))
        plan = batch.plan(
            Situation(self.table, 1, self.queue, learned(), NOW, NOW, 8192, lambda request: 0, lambda request: True)
        )
        assert plan is not None
        return plan


def test_everybody_decodes_in_a_step_as_long_as_the_first_to_lose_its_pace_allows() -> None:
    scene = Scene()
    slots = [
        scene.decoding(age_s=GRACE_S - 1, due_ms=0, timely=False),
        scene.decoding(age_s=5, due_ms=40, timely=True),
        scene.decoding(age_s=5, due_ms=90, timely=True),
    ]
    plan = scene.plan()
    assert sorted(plan.rows.tolist()) == sorted(slots)
    assert plan.budget == pytest.approx(40 * MS / 40_000, rel=0.1)


def test_past_the_wait_of_the_late_one_that_decodes_shortens_steps_and_others_sit_out_what_isn_t_due() -> None:
    scene = Scene()
    late = scene.decoding(age_s=GRACE_S + 1, due_ms=0, timely=False)
    due = scene.decoding(age_s=5, due_ms=HURRY * TPOT_MS - 1, timely=True)
    early = scene.decoding(age_s=5, due_ms=40, timely=True)
    plan = scene.plan()
    assert sorted(plan.rows.tolist()) == sorted([late, due])
    assert early not in plan.rows
    assert plan.budget == pytest.approx(HURRY * TPOT_MS * MS / 40_000, rel=0.1)


def test_one_that_came_early_enough_hurries_nobody_however_long_it_takes() -> None:
    scene = Scene()
    old = scene.decoding(age_s=GRACE_S * 10, due_ms=45, timely=True)
    assert scene.plan().rows.tolist() == [old]
    assert scene.plan().budget == pytest.approx(45 * MS / 40_000, rel=0.1)
