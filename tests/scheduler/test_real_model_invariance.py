"""What the scheduler does never shows in the text: the real model says the same under any pressure, chunk and depth.

The scheduler drives the runner's executor in this process, in float32 on one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from protocol.columns import f32, i32, pack_i32, u64
from protocol.messages import Outputs, RequestStatus, SamplingParams, Step, StepResult, Submit
from runner.cuda.executor import DeviceExecutor
from runner.model_executor import ModelExecutor
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler
from tests.scheduler.conftest import AHEAD, AT_ONCE

PROMPTS = {
    1: [504, 3575, 282, 4649, 314],
    2: [504, 3575, 282, 4649, 314, 260, 216, 30, 198, 1, 520, 9531, 198, 2683, 359, 253, 5356, 5646, 11173],
    3: [28, 669, 314, 253, 1838, 355, 6629],
}
OUTPUTS = 14
SEEDED = {3}


# What the scheduler does with results doesn't depend on the executor: each has half of the depths and policies, and
# both have every kind of disturbance.


class Chain:
    """The real scheduler and the real model, with results `depth` - 1 steps late."""

    def __init__(self, executor: ModelExecutor | DeviceExecutor, depth: int, **config: Any) -> None:
        executor.clear()
        self.executor = executor
        self.now = 0
        usable = config.pop("usable", 0)
        limits = executor.limits
        if usable:
            limits = msgspec.structs.replace(limits, num_blocks=usable + 1)
        self.core = CoreScheduler(
            SchedulerConfig(pipeline_depth=depth, watermark=0.0, **config), limits, b"k" * 16, clock=lambda: self.now
        )
        self.core.epoch = 1
        self.depth = depth
        self.may_fail = False
        self.pending: deque[Callable[[], StepResult]] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.told: dict[int, list[float]] = {}

    def add(self, request_id: int, **more: Any) -> None:
        sampling = {"temperature": 0.8, "seed": 42} if request_id in SEEDED else {"temperature": 0.0}
        params = SamplingParams(OUTPUTS, ignore_eos=True, **sampling, **more)
        self.core.add(0, Submit(request_id, pack_i32(PROMPTS[request_id]), params))

    def step(self) -> None:
        self.now += 1_000_000
        step = self.core.schedule()
        if step is not None:
            self.pending.append(self.start(step))
        if self.pending and (len(self.pending) >= self.depth or step is None):
            result = self.pending.popleft()()
            assert self.may_fail or result.failure is None, result.failure
            self.core.update(result)
        for _, outputs in self.core.take_outputs():
            for part in outputs.prompt_logprobs:
                told = self.told.setdefault(part.id, [])
                assert part.position <= len(told) + 1 < part.end
                told += f32(part.logprobs)[len(told) + 1 - part.position :].tolist()
            for request_id, position, token in zip(
                u64(outputs.ids).tolist(), i32(outputs.positions).tolist(), i32(outputs.tokens).tolist(), strict=True
            ):
                stream = self.tokens.setdefault(request_id, [])
                assert position == len(stream)
                stream.append(token)
            self.finished |= {end.id for end in outputs.finished}

    def start(self, step: Step) -> Callable[[], StepResult]:
        """Give the step to the executor; what waits for its result."""
        if isinstance(self.executor, DeviceExecutor):
            return partial(self.executor.collect, self.executor.launch(step, 0))
        result = self.executor.execute(step, 0)
        return lambda: result

    def drain(self) -> dict[int, list[int]]:
        for _ in range(2000):
            if not self.core.has_requests and not self.pending:
                return self.tokens
            self.step()
        raise AssertionError("does not end")

    def preempt(self, request_id: int) -> None:
        request = self.core.requests.get(request_id)
        if request is not None and request.status == RequestStatus.RUNNING:
            self.core.preempt(request)


@pytest.fixture
def undisturbed(
    executor: ModelExecutor | DeviceExecutor, said_alone: dict[int, dict[int, list[int]]]
) -> dict[int, list[int]]:
    """What each says alone."""
    said = said_alone.setdefault(id(executor), {})
    for request_id in PROMPTS.keys() - said.keys():
        chain = Chain(executor, 1)
        chain.add(request_id)
        said |= chain.drain()
    assert len(set(map(tuple, said.values()))) == len(PROMPTS)
    return said


@pytest.mark.parametrize(
    ("executor", "depth", "recovery"),
    [(AT_ONCE, 1, "swap"), (AT_ONCE, 3, "recompute"), (AHEAD, 2, "recompute"), (AHEAD, 3, "swap")],
    indirect=["executor"],
)
def test_a_preemption_after_any_token_changes_nothing(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]], recovery: str, depth: int
) -> None:
    """One request after another is suspended, each at other positions, until all positions have had their turn."""
    for first in range(3):
        chain = Chain(executor, depth, recovery_policy=recovery, enable_prefix_caching=first != 1)
        for request_id in PROMPTS:
            chain.add(request_id)
        suspended: set[tuple[int, int]] = set()
        while len(chain.finished) < len(PROMPTS):
            chain.step()
            for request_id in PROMPTS:
                at = (request_id, len(chain.tokens.get(request_id, [])))
                if at not in suspended and (sum(at) + first) % 3 == 0:
                    suspended.add(at)
                    chain.preempt(request_id)
        assert chain.drain() == undisturbed
        assert chain.core.stats.preemptions >= OUTPUTS - 2


@pytest.mark.parametrize(
    ("executor", "chunk", "depth"),
    [(AT_ONCE, 1, 1), (AT_ONCE, 7, 3), (AHEAD, 3, 2), (AHEAD, 16, 2)],
    indirect=["executor"],
)
def test_the_size_of_a_chunk_changes_nothing(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]], chunk: int, depth: int
) -> None:
    chain = Chain(executor, depth, max_num_batched_tokens=chunk)
    for request_id in PROMPTS:
        chain.add(request_id)
    assert chain.drain() == undisturbed


@pytest.mark.parametrize(("executor", "depth"), [(AT_ONCE, 1), (AHEAD, 3)], indirect=["executor"])
def test_a_hit_in_the_prefix_cache_changes_nothing(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]], depth: int
) -> None:
    chain = Chain(executor, depth)
    chain.add(2)
    chain.drain()
    chain.tokens.clear()
    for request_id in PROMPTS:
        chain.add(request_id)
    assert chain.drain() == undisturbed
    assert chain.core.stats.prefix_hit_tokens == 16


@pytest.mark.parametrize(
    ("executor", "preset", "recovery"),
    [
        (AT_ONCE, "triptych", "swap"),
        (AT_ONCE, "vllm", "recompute"),
        (AHEAD, "triptych", "recompute"),
        (AHEAD, "sglang", "swap"),
    ],
    indirect=["executor"],
)
def test_a_pool_that_is_too_small_for_all_changes_nothing(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]], preset: str, recovery: str
) -> None:
    chain = Chain(executor, 2, preset=preset, recovery_policy=recovery, usable=5, admission_policy="optimistic")
    for request_id in PROMPTS:
        chain.add(request_id)
    assert chain.drain() == undisturbed
    assert chain.core.stats.preemptions > 0


class Poisoned:
    """A decoder whose steps fail, after they have written to their pages, if they compute a certain token."""

    def __init__(self, decoder: Any, token: int, error: Exception) -> None:
        self._decoder, self._token, self._error = decoder, token, error
        self.logits = decoder.logits

    def forward(self, token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._decoder.forward(token_ids, *others)
        if bool((token_ids == self._token).any()):
            raise self._error
        return hidden


ERRORS = {
    "a bug": (RuntimeError("the kernel gave up"), "internal_error"),
    "torch's allocator": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
    "the device's memory": (torch.OutOfMemoryError("no memory"), "out_of_memory"),
    "memory": (MemoryError(), "out_of_memory"),
    "the device": (torch.AcceleratorError("illegal access"), "device_error"),
}


@pytest.mark.parametrize(
    ("executor", "error", "depth"),
    [
        (AT_ONCE, "a bug", 1),
        (AT_ONCE, "torch's allocator", 3),
        (AT_ONCE, "memory", 3),
        (AHEAD, "a bug", 3),
        (AHEAD, "the device's memory", 3),
        (AHEAD, "the device", 1),
    ],
    indirect=["executor"],
)
def test_a_request_that_makes_steps_fail_ends_alone_and_the_others_say_the_same(
    executor: ModelExecutor | DeviceExecutor,
    undisturbed: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    depth: int,
) -> None:
    poison, (raised, code) = 40_000, ERRORS[error]
    monkeypatch.setattr(executor, "_decoder", Poisoned(executor._decoder, poison, raised))
    chain = Chain(executor, depth)
    chain.may_fail = True
    for request_id in PROMPTS:
        chain.add(request_id)
    for _ in range(3):
        chain.step()
    params = SamplingParams(OUTPUTS, ignore_eos=True, temperature=0.0)
    chain.core.add(0, Submit(9, pack_i32([*PROMPTS[2][:18], poison]), params))
    ends: list[Any] = []
    monkeypatch.setattr(chain.core, "take_outputs", keeping(chain.core.take_outputs, ends))
    assert chain.drain() == undisturbed
    assert [(end.id, end.code) for end in ends if end.status == RequestStatus.ERROR] == [(9, code)]


def keeping(take: Callable[[], list[tuple[int, Outputs]]], ends: list[Any]) -> Callable[[], list[tuple[int, Outputs]]]:
    """`take`, with the ends among what it returns kept in `ends`."""

    def taken() -> list[tuple[int, Outputs]]:
        found = take()
        ends.extend(end for _, outputs in found for end in outputs.finished)
        return found

    return taken


@pytest.mark.parametrize(
    ("executor", "chunk", "preemptions"), [(AT_ONCE, 5, (0, 2)), (AHEAD, 7, (1, 3))], indirect=["executor"]
)
def test_log_probabilities_of_a_prompt_are_the_same_whatever_happens_to_its_request(
    executor: ModelExecutor | DeviceExecutor, chunk: int, preemptions: tuple[int, ...]
) -> None:
    """In one piece; in chunks, behind a prefix that was cached before, preempted after so many passes (0: never)."""
    whole = Chain(executor, 1)
    whole.add(2, prompt_logprobs=3)
    whole.step()
    assert len(whole.told[2]) == len(PROMPTS[2]) - 1
    for after in preemptions:
        chain = Chain(executor, 2, max_num_batched_tokens=chunk, recovery_policy="swap")
        chain.add(2)
        while not chain.tokens:
            chain.step()
        chain.core.abort(0, [2])
        chain.tokens.clear()
        chain.add(2, prompt_logprobs=3)
        for _ in range(after):
            chain.step()
        if after:
            chain.preempt(2)
        while len(chain.told.get(2, ())) < len(PROMPTS[2]) - 1:
            chain.step()
        assert chain.told[2] == pytest.approx(whole.told[2], abs=1e-4), after
        assert chain.core.stats.prefix_hit_tokens == 0
