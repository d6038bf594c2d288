"""Norms, activation, rotary embedding and linears of the GPU path against plain torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.cuda.ops import FlashInferOps
from runner.kernels.build import KernelError
from runner.ops import TorchOps
from tests.runner import flashinfer_reference as reference
from tests.runner.flashinfer_kit import LIBRARIES, library


@pytest.fixture(params=LIBRARIES)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return library(request.param, monkeypatch)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor, units: float = 1.0) -> None:
    """Within so many units in the last place of the largest expected number nearby."""
    allowed = units * torch.finfo(got.dtype).eps * expected.abs().clamp(min=1)
    assert got.shape == expected.shape and bool(((got.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("width", [576, 64, 12, 4096])
def test_norms_divide_by_the_root_of_the_mean_square(module: Any, dtype: torch.dtype, width: int) -> None:
    """12 isn't a whole number of vectors: torch serves it."""
    x, weight = normal(5, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(FlashInferOps(dtype, module).rms_norm(x, weight, 1e-5), expected, 2)


@pytest.mark.parametrize("head_dim", [64, 128, 20])
def test_heads_are_normed_in_place_within_strided_rows(module: Any, dtype: torch.dtype, head_dim: int) -> None:
    fused, weight = normal(4, 9, head_dim, dtype=dtype), normal(head_dim, dtype=dtype, seed=1)
    before = fused.clone()
    FlashInferOps(dtype, module).head_norm(fused[:, 2:5], weight, 1e-6)
    wide = before[:, 2:5].double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    close(fused[:, 2:5], expected, 2)
    assert torch.equal(fused[:, :2], before[:, :2]) and torch.equal(fused[:, 5:], before[:, 5:])


@pytest.mark.parametrize("width", [1536, 8, 12])
def test_gates_are_activated_and_multiply(module: Any, dtype: torch.dtype, width: int) -> None:
    gate_up = normal(3, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(FlashInferOps(dtype, module).silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up, 2)
    spread = torch.cat((gate_up, gate_up), dim=1)[:, : 2 * width]
    assert torch.equal(
        FlashInferOps(dtype, module).silu_and_mul(spread), FlashInferOps(dtype, module).silu_and_mul(gate_up)
    )


@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (128, 128), (128, 64), (64, 24), (80, 80), (64, 16)])
def test_heads_are_rotated_in_place_half_against_half(
    module: Any, dtype: torch.dtype, head_dim: int, rotary: int
) -> None:
    """Rotary sizes of 24 (a vector reaches across the halves) and heads of 80 (not compiled) are served by torch."""
    positions = torch.tensor([0, 7, 99, 3])
    angles = torch.arange(100).unsqueeze(1) / 10000 ** (torch.arange(rotary // 2) / (rotary // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    fused = normal(4, 6, head_dim, dtype=dtype)
    before = fused.clone()
    FlashInferOps(dtype, module).rope(fused[:, :3], fused[:, 3:5], positions, table)
    turned = torch.polar(torch.ones(4, 1, rotary // 2).double(), angles[positions].double().unsqueeze(1))
    half = rotary // 2
    pairs = torch.complex(before[..., :half].double(), before[..., half:rotary].double()) * turned
    expected = torch.cat((pairs.real, pairs.imag, before[..., rotary:].double()), dim=-1)
    close(fused[:, :5], expected[:, :5])
    assert torch.equal(fused[:, 5], before[:, 5])


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_adds_to_the_residual(dtype: torch.dtype, bias: bool) -> None:
    ops = FlashInferOps(dtype, reference)
    x, weight, residual = normal(3, 40, dtype=dtype), normal(24, 40, dtype=dtype, seed=1), normal(3, 24, dtype=dtype)
    more = normal(24, dtype=dtype, seed=2) if bias else None
    expected = residual.double() + x.double() @ weight.double().T + (0 if more is None else more.double())
    packed = ops.pack_linear(weight, more)
    kept = residual
    ops.linear_add(x, packed, residual)
    assert kept is residual
    close(residual, expected, 3)
    assert ops.linear(x, packed, torch.float32).dtype == torch.float32


def test_what_is_served_goes_through_flashinfer(dtype: torch.dtype) -> None:
    reference.CALLS.clear()
    ops = FlashInferOps(dtype, reference)
    x = normal(2, 4, 64, dtype=dtype)
    ops.rms_norm(x[:, 0].contiguous(), x[0, 0], 1e-5)
    ops.head_norm(x, x[0, 0].clone(), 1e-5)
    ops.rope(x[:, :2], x[:, 2:], torch.arange(2), torch.ones(8, 64))
    ops.linear_silu_and_mul(x[:, 0].contiguous(), ops.pack_gate_up(normal(32, 64, dtype=dtype)))
    names = [name for name, _, _ in reference.CALLS]
    assert names == ["rmsnorm", "rmsnorm", "apply_rope_with_cos_sin_cache_inplace", "silu_and_mul"]


def test_it_agrees_with_plain_torch_to_the_last_place(dtype: torch.dtype) -> None:
    ours, plain = FlashInferOps(dtype, reference), TorchOps()
    x, weight = normal(6, 576, dtype=dtype), normal(576, dtype=dtype, seed=1)
    close(ours.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5).double(), 2)


def test_float32_is_refused() -> None:
    with pytest.raises(KernelError, match="float16 or bfloat16, not torch.float32"):
        FlashInferOps(torch.float32, reference)
