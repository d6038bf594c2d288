"""The real model says the same wherever it is interrupted: each position of prompt and output, all ways back together.

`test_real_model_invariance` takes one cause at a time. Here they meet: chunks, prefix hits, depth and recovery, with a
suspension at each place that a request passes through, in the middle of its prompt too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from protocol.messages import RequestStatus
from runner.cuda.executor import DeviceExecutor
from runner.model_executor import ModelExecutor
from tests.scheduler.conftest import AHEAD, AT_ONCE
from tests.scheduler.test_real_model_invariance import OUTPUTS, PROMPTS, Chain, undisturbed

__all__ = ["undisturbed"]


def place(chain: Chain, request_id: int) -> int | None:
    """Tokens of a running request that are computed or in flight; None if it doesn't run."""
    request = chain.core.requests.get(request_id)
    if request is None or request.status != RequestStatus.RUNNING:
        return None
    return int(chain.core.table.computed[request.slot])


def interrupted(
    executor: ModelExecutor | DeviceExecutor, depth: int, warm: bool, **config: Any
) -> Iterator[tuple[Chain, set[int]]]:
    """For each request in turn: a run in which it is suspended once at each place where a step ends."""
    for victim in PROMPTS:
        chain = Chain(executor, depth, **config)
        if warm:
            chain.add(2)
            chain.drain()
            chain.tokens.clear()
            chain.finished.clear()
        for request_id in PROMPTS:
            chain.add(request_id)
        places: set[int] = set()
        for _ in range(2000):
            if len(chain.finished) == len(PROMPTS):
                break
            chain.step()
            at = place(chain, victim)
            if at is not None and at not in places:
                places.add(at)
                chain.preempt(victim)
        chain.drain()
        yield chain, places


@pytest.mark.parametrize(
    ("executor", "depth", "chunk", "warm", "recovery"),
    [
        (AT_ONCE, 1, 5, False, "recompute"),
        (AT_ONCE, 2, 7, True, "swap"),
        (AT_ONCE, 3, 64, False, "swap"),
        (AHEAD, 2, 7, True, "recompute"),
    ],
    indirect=["executor"],
)
def test_a_suspension_at_every_place_changes_no_token(
    executor: ModelExecutor | DeviceExecutor,
    undisturbed: dict[int, list[int]],
    recovery: str,
    depth: int,
    chunk: int,
    warm: bool,
) -> None:
    runs = interrupted(
        executor, depth, warm, recovery_policy=recovery, max_num_batched_tokens=chunk, enable_prefix_caching=warm
    )
    for (chain, places), (victim, prompt) in zip(runs, PROMPTS.items(), strict=True):
        assert chain.tokens == undisturbed
        outputs = {at for at in places if at >= len(prompt)}
        assert outputs >= set(range(len(prompt), len(prompt) + OUTPUTS - depth)), f"of request {victim}"
        if chunk < len(prompt) and not warm:
            assert places - outputs, "in the middle of its prompt too"
