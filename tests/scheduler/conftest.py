"""What tests with the real model share: it, loaded once for a file, in both executors, in float32 on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from protocol.messages import Limits
from runner.attention.torch_paged import TorchAttention
from runner.config import RunnerConfig
from runner.cuda.device import HostDevice
from runner.cuda.executor import DeviceExecutor
from runner.cuda.pages import DevicePages
from runner.grammar.engine import Grammars
from runner.kernels.select import select_ops
from runner.loader import default_cache_dir, load_model
from runner.model_executor import ModelExecutor, load_executor

AT_ONCE, AHEAD = "at once", "launched and collected"
Executors = Callable[[str], ModelExecutor | DeviceExecutor]


@pytest.fixture(scope="module")
def executors(real_model_path: Path) -> Iterator[Executors]:
    """Each kind of executor, made when it is first asked for."""
    threads = torch.get_num_threads()
    config = RunnerConfig(
        model=str(real_model_path), dtype="float32", attention_backend="auto", block_size=16, max_model_len=128,
        kv_cache_memory_bytes=64 << 20, swap_space_bytes=32 << 20, num_threads=1,
    )  # fmt: skip
    at_once = load_executor(config)
    made: dict[str, ModelExecutor | DeviceExecutor] = {AT_ONCE: at_once}

    def of_kind(kind: str) -> ModelExecutor | DeviceExecutor:
        if kind not in made:
            made[kind] = _ahead(config, at_once.limits)
        return made[kind]

    yield of_kind
    torch.set_num_threads(threads)


def _ahead(config: RunnerConfig, limits: Limits) -> DeviceExecutor:
    """An executor that takes the next step in before the last one's tokens are there, on the CPU."""
    model = load_model(
        *(Path(config.model), config.dtype, lambda dtype: select_ops(dtype, "cpu", "auto")),
        max_model_len=limits.max_model_len,
        cache_dir=default_cache_dir(),
    )
    shape, device = model.config, HostDevice()
    pages = DevicePages(shape, limits.num_blocks, limits.block_size, model.dtype, device, limits.host_blocks)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale)
    grammars = Grammars.of_model(Path(config.model), limits.vocab_size, soon=True)
    return DeviceExecutor(model, TorchAttention(pages.layers, *heads), pages, limits, device, grammars=grammars)


@pytest.fixture(params=[AT_ONCE, AHEAD])
def executor(request: pytest.FixtureRequest, executors: Executors) -> ModelExecutor | DeviceExecutor:
    """Either kind; a test that doesn't need both names its own."""
    return executors(request.param)


@pytest.fixture(scope="module")
def said_alone() -> dict[int, dict[int, list[int]]]:
    """Kept for a file's `undisturbed`: what each request says alone, by executor."""
    return {}
