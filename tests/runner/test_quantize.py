"""Fewer bits for the weights: nearly the same numbers, fewer bytes, and the real model still knows Paris."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config import RunnerConfig
from runner.errors import StartError
from runner.kernels.build import KernelError
from runner.loader import load_model
from runner.model_executor import load_executor
from runner.ops import TorchOps
from runner.quantize import QuantizedOps, group_of, quantized
from tests.runner.kit import generate

pytest.importorskip("torchao", reason="quantization needs torchao")

PARIS = [504, 3575, 282, 4649, 314]  # "The capital of France is"
ERRORS = {"int8": 0.01, "fp8": 0.04, "int4": 0.15}
"""Relative error of a linear layer's output under normal weights and inputs, at most."""


@pytest.mark.parametrize("scheme", ERRORS)
def test_a_quantized_linear_is_close_to_the_whole_one_with_bias_and_sum(scheme: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 128, generator=generator).to(torch.bfloat16)
    bias = torch.randn(96, generator=generator).to(torch.bfloat16)
    x = torch.randn(5, 128, generator=generator).to(torch.bfloat16)
    whole, ops = TorchOps(), quantized(TorchOps(), scheme, "cpu")
    packed = ops.pack_linear(weight.clone(), bias)
    expected = whole.linear(x, whole.pack_linear(weight, bias)).float()
    got = ops.linear(x, packed).float()
    assert 0 < (got - expected).norm() / expected.norm() <= ERRORS[scheme]
    residual = torch.ones(5, 96, dtype=torch.bfloat16)
    ops.linear_add(x, packed, residual)
    assert torch.equal(residual, torch.ones(5, 96, dtype=torch.bfloat16) + ops.linear(x, packed))
    gated = ops.linear_silu_and_mul(x, ops.pack_gate_up(weight))
    assert gated.shape == (5, 48)


def test_nothing_is_wrapped_where_nothing_is_quantized() -> None:
    ops = TorchOps()
    assert quantized(ops, "none", "cpu") is ops


def test_the_group_that_shares_a_scale_divides_the_width() -> None:
    assert [group_of(width) for width in (4096, 576, 1536, 96)] == [128, 64, 128, 32]
    with pytest.raises(KernelError, match="100 input features"):
        group_of(100)


@pytest.mark.parametrize("scheme", ERRORS)
def test_the_real_model_still_knows_the_capital(smollm2_path: Path, scheme: str, tmp_path: Path) -> None:
    executor = load_executor(
        RunnerConfig(
            model=str(smollm2_path), quantization=scheme, attention_backend="torch", num_threads=1,
            max_model_len=64, num_blocks_override=8,
        )
    )  # fmt: skip
    assert generate(lambda step: executor.execute(step, 0), PARIS, 1, size=16) == [7042]


def test_the_head_and_the_embedding_stay_whole(smollm2_path: Path, smollm2_cache: Path) -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(QuantizedOps):
        def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
            seen.append(tuple(weight.shape))
            return super().pack_linear(weight, bias)

    import torchao.quantization as torchao

    ops: Callable[[torch.dtype], Any] = lambda dtype: Watching(TorchOps(), "int8", torch.device("cpu"), torchao)  # noqa: E731
    model = load_model(smollm2_path, "bfloat16", ops, max_model_len=64, cache_dir=smollm2_cache)
    assert len(seen) == 4 * model.config.num_layers and (49152, 576) not in seen


def test_without_torchao_the_start_says_what_is_missing(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(StartError, match="quantization int8: torchao can't be imported"):
        load_executor(RunnerConfig(model=str(smollm2_path), quantization="int8", num_threads=1))
