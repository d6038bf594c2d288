"""The pool of a GPU runner: measured, not guessed, and refused with numbers. On the CPU, over FlashInfer's stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.messages import SamplingParams, StepResult
from runner.attention.torch_paged import TorchAttention
from runner.config import RunnerConfig
from runner.cuda.device import HostDevice
from runner.cuda.executor import DeviceExecutor
from runner.cuda.graphs import buckets_up_to
from runner.cuda.load import Builder, buckets_of, load_device_executor, run_largest
from runner.cuda.ops import FlashInferOps
from runner.errors import StartError
from runner.kv import KvPool, block_bytes
from runner.loader import LoadedModel, load_model
from runner.main import build_executor
from runner.model_executor import ModelExecutor
from runner.pool import GIB, PoolSize
from runner.sizing import warm_up
from tests.runner import flashinfer_reference as reference
from tests.runner.kit import generate

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]
SEEDED = SamplingParams(max_tokens=64, temperature=0.9, top_p=0.95, top_k=200, seed=42)


class Measured(HostDevice):
    """A device of 80 GiB on which 20 are taken, a step takes 3, and each recorded graph half a GiB."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = 0

    def memory(self) -> tuple[int, int]:
        return 60 * GIB - self.captured * GIB // 2, 80 * GIB

    def peak(self, run: Any) -> int:
        run()
        return 3 * GIB

    def capture(self, run: Any) -> Any:
        self.captured += 1
        return super().capture(run)


@pytest.fixture(scope="module")
def model(smollm2_path: Path, smollm2_cache: Path) -> LoadedModel:
    """The real model with FlashInfer's operations."""

    def ops(dtype: torch.dtype) -> FlashInferOps:
        return FlashInferOps(dtype, reference)

    return load_model(smollm2_path, "bfloat16", ops, max_model_len=256, cache_dir=smollm2_cache)


def config(**changes: Any) -> RunnerConfig:
    values: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return RunnerConfig(**{**values, "device": "cuda", **changes})


def builder(model: LoadedModel, device: HostDevice | None = None, **changes: Any) -> Builder:
    return Builder(config(**changes), model, device or HostDevice(), reference)


def small(model: LoadedModel, **changes: Any) -> DeviceExecutor:
    made = builder(model, **changes)
    return made.build(PoolSize(40, 256, 0), buckets_of(made.config))


def said(executor: DeviceExecutor | ModelExecutor, count: int, **options: Any) -> list[int]:
    return generate(lambda one: executor.execute(one, 0), PROMPT, count, size=16, **options)


def test_pages_get_what_the_largest_step_and_the_graphs_leave_of_the_allowed_part(model: LoadedModel) -> None:
    """Graphs of 1, 2 and 4 rows; what was recorded to measure them is counted as taken when the next is."""
    device = Measured()
    free, origin = builder(model, device, gpu_memory_utilization=0.9)._measure()
    assert free <= (72 - 20 - 3) * GIB - 3 * GIB // 2 and free > 40 * GIB
    assert "0.9 of 80.00 GiB" in origin and "20.00 taken" in origin and "3.00 for the largest step" in origin


def test_without_graphs_nothing_is_kept_for_them(model: LoadedModel) -> None:
    device = Measured()
    free, _ = builder(model, device, enforce_eager=True)._measure()
    assert free == (72 - 20 - 3) * GIB and device.captured == 0


def test_no_room_for_pages_is_refused_with_what_took_it(model: LoadedModel) -> None:
    device = Measured()
    with pytest.raises(
        StartError, match=r"gpu_memory_utilization 0.25 of 80.00 GiB, less 20.00 taken.*Lower max_model"
    ):
        builder(model, device, gpu_memory_utilization=0.25).pool()


def test_a_pool_that_was_asked_for_is_not_measured(model: LoadedModel) -> None:
    assert builder(model, num_blocks_override=100).pool().num_blocks == 100
    size = block_bytes(model.config, 16, torch.bfloat16)
    assert builder(model, kv_cache_memory_bytes=50 * size).pool().num_blocks == 50
    assert builder(model, kv_cache_memory_bytes=50 * size, kv_cache_dtype="fp8_e4m3").pool().num_blocks == 100


def test_the_step_that_is_measured_is_the_largest_legal_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = builder(model, enforce_eager=True)
    executor = made.build(made._smallest(), [])
    results: list[StepResult] = []
    execute = executor.execute
    monkeypatch.setattr(executor, "execute", lambda *args: results.append(execute(*args)) or results[-1])
    run_largest(executor)
    size = executor.step_size
    assert (size.tokens, size.rows) == (64, 4) and executor.num_residents == 0
    told = results[0].prompt_logprobs
    assert [part.end - part.position for part in told] == [15] * 4, "of all tokens of all prompts"
    assert all(len(part.top_ids) == 15 * 20 * 4 for part in told)


@pytest.mark.parametrize("params", [None, SEEDED], ids=["greedy", "seeded"])
def test_recorded_decodes_say_what_eager_ones_say(model: LoadedModel, params: SamplingParams | None) -> None:
    options = {} if params is None else {"params": params}
    recorded, eager = small(model), small(model, enforce_eager=True)
    assert said(recorded, 12, **options) == said(eager, 12, **options)


def test_the_gpu_s_path_says_what_the_cpu_s_says(model: LoadedModel, smollm2_bfloat16: LoadedModel) -> None:
    """bfloat16 on both: the same words as long as no two of them are nearly as likely."""
    executor = small(model)
    warm_up(executor)
    pool = KvPool(smollm2_bfloat16.config, 40, 16, torch.bfloat16)
    shape = smollm2_bfloat16.config
    attention = TorchAttention(pool.layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale)
    plain = ModelExecutor(smollm2_bfloat16, attention, pool, executor.limits)
    assert said(executor, 8) == said(plain, 8)


def test_graphs_are_recorded_up_to_the_most_rows() -> None:
    assert buckets_up_to(1) == [1] and buckets_up_to(4) == [1, 2, 4] and buckets_up_to(9) == [1, 2, 4, 8, 9]
    sizes = buckets_up_to(300)
    assert sizes[-4:] == [256, 272, 288, 300] and sizes == sorted(set(sizes))


def test_a_gpu_that_isn_t_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(StartError, match="device cuda: torch sees no GPU"):
        load_device_executor(RunnerConfig(device="cuda", model="x"))
    with pytest.raises(StartError, match="device cuda"):
        build_executor(RunnerConfig(device="cuda", model="x"))
