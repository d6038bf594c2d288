"""Every dense kernel against plain torch in float64, and what a row may not notice: neighbours, threads, strides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runner.kernels.native import NativeOps
from runner.ops import Ops, TorchOps

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 13, 14, 15, 16, 29, 200]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
EPS = 1e-5


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def native(dtype: torch.dtype) -> NativeOps:
    return NativeOps(dtype)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the dtype's tolerance of the largest magnitude expected."""
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max()
    assert error <= TOLERANCE[dtype] * expected.double().abs().max().clamp(min=1.0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("wide", "deep"), [(32, 16), (33, 64), (1, 2), (960, 576), (70, 1536)])
def test_a_linear_equals_torch_whatever_the_rows_and_the_ragged_edge_of_its_outputs(
    native: NativeOps, dtype: torch.dtype, threads: int, rows: int, wide: int, deep: int
) -> None:
    weight, bias = random(wide, deep, dtype=dtype) / deep**0.5, random(wide, dtype=dtype)
    x = random(rows, deep, dtype=dtype)
    expected = TorchOps().linear(x.double(), TorchOps().pack_linear(weight.double(), bias.double()))
    packed = native.pack_linear(weight, bias)
    assert_close(native.linear(x, packed), expected, dtype)
    logits = native.linear(x, packed, torch.float32)
    assert logits.dtype == torch.float32
    assert_close(logits, expected, torch.float32)


@pytest.mark.parametrize("rows", [1, 16, 31])
@pytest.mark.parametrize("wide", [32, 50])
def test_linear_add_adds_to_the_residual_in_place(
    native: NativeOps, dtype: torch.dtype, threads: int, rows: int, wide: int
) -> None:
    weight, x, residual = (
        random(wide, 64, dtype=dtype) / 8,
        random(rows, 64, dtype=dtype),
        random(rows, wide, dtype=dtype),
    )
    expected = residual.double() + x.double() @ weight.double().T
    native.linear_add(x, native.pack_linear(weight), residual)
    assert_close(residual, expected, dtype)


@pytest.mark.parametrize("inner", [16, 48, 20], ids=["one vector", "three vectors", "not whole vectors"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_the_fused_gated_projection_equals_its_two_parts(
    native: NativeOps, dtype: torch.dtype, threads: int, inner: int, biased: bool
) -> None:
    weight, x = random(2 * inner, 64, dtype=dtype) / 8, random(17, 64, dtype=dtype)
    bias = random(2 * inner, dtype=dtype) if biased else None
    reference = TorchOps()
    packed = reference.pack_gate_up(weight.double(), None if bias is None else bias.double())
    expected = reference.linear_silu_and_mul(x.double(), packed)
    assert_close(native.linear_silu_and_mul(x, native.pack_gate_up(weight, bias)), expected, dtype)


def test_a_weight_of_odd_width_goes_through_torch() -> None:
    native = NativeOps(torch.bfloat16)
    weight, x = random(32, 63, dtype=torch.bfloat16) / 8, random(3, 63, dtype=torch.bfloat16)
    expected = x.double() @ weight.double().T
    packed = native.pack_linear(weight)
    assert_close(native.linear(x, packed), expected, torch.bfloat16)
    residual = torch.zeros(3, 32, dtype=torch.bfloat16)
    native.linear_add(x, packed, residual)
    assert_close(residual, expected, torch.bfloat16)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 576, 1000])
@pytest.mark.parametrize("rows", [1, 16, 65])
def test_norms_and_the_activation_equal_torch_at_every_ragged_width(
    native: NativeOps, dtype: torch.dtype, threads: int, rows: int, width: int
) -> None:
    reference = TorchOps()
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype)
    assert_close(native.rms_norm(x, weight, EPS), reference.rms_norm(x.double(), weight.double(), EPS), dtype)

    gate_up = random(rows, 2 * width, dtype=dtype) * 8
    assert_close(native.silu_and_mul(gate_up), reference.silu_and_mul(gate_up.double()), dtype)


def test_the_activation_is_right_where_the_exponential_is_extreme() -> None:
    gates = torch.tensor([-1e4, -200.0, -88.0, -20.0, -1.0, 0.0, 1.0, 20.0, 88.0, 200.0, 1e4] + [0.5] * 5)
    gate_up = torch.cat((gates, torch.ones(16))).unsqueeze(0)
    got = NativeOps(torch.float32).silu_and_mul(gate_up)
    torch.testing.assert_close(got, TorchOps().silu_and_mul(gate_up), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("head_dim", "rot_dim"), [(64, 64), (128, 128), (64, 32), (20, 12), (80, 80)])
def test_rotary_embedding_turns_slices_of_a_fused_projection_in_place(
    native: NativeOps, dtype: torch.dtype, threads: int, head_dim: int, rot_dim: int
) -> None:
    rows, q_heads, k_heads = 33, 6, 2
    fused = random(rows, (q_heads + 2 * k_heads) * head_dim, dtype=dtype)
    positions = (torch.arange(rows) * 37) % 100
    cos_sin = random(100, rot_dim, dtype=torch.float32)

    def parts(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = (q_heads * head_dim, k_heads * head_dim, k_heads * head_dim)
        q, k, v = source.split(sizes, dim=-1)
        return q.unflatten(-1, (q_heads, head_dim)), k.unflatten(-1, (k_heads, head_dim)), v

    expected, got = fused.double(), fused.clone()
    q, k, _ = parts(expected)
    TorchOps().rope(q, k, positions, cos_sin)
    q, k, v = parts(got)
    native.rope(q, k, positions, cos_sin)
    assert_close(got, expected, dtype)
    assert torch.equal(v, parts(fused)[2]), "values are not rotated"


def test_head_norm_works_on_each_head_of_a_slice_in_place(native: NativeOps, dtype: torch.dtype, threads: int) -> None:
    fused, weight = random(17, 5 * 64, dtype=dtype), random(64, dtype=dtype)
    expected, got = fused.double(), fused.clone()
    TorchOps().head_norm(expected[:, 64:256].unflatten(-1, (3, 64)), weight.double(), EPS)
    native.head_norm(got[:, 64:256].unflatten(-1, (3, 64)), weight, EPS)
    assert_close(got, expected, dtype)
    assert torch.equal(got[:, :64], fused[:, :64])
    assert torch.equal(got[:, 256:], fused[:, 256:])


def test_a_rows_result_is_the_same_bits_alone_and_in_any_batch(
    native: NativeOps, dtype: torch.dtype, threads: int
) -> None:
    weight, gates = random(100, 576, dtype=dtype) / 24, random(96, 576, dtype=dtype) / 24
    norm = random(576, dtype=dtype)
    packed, paired = native.pack_linear(weight), native.pack_gate_up(gates)
    x = random(211, 576, dtype=dtype)

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        logits = native.linear(x, packed, torch.float32)
        return [native.linear(x, packed), logits, native.linear_silu_and_mul(x, paired), native.rms_norm(x, norm, EPS)]

    whole = results(x)
    for begin, end in [(0, 1), (210, 211), (5, 21), (90, 205)]:
        for alone, together in zip(results(x[begin:end]), whole, strict=True):
            assert torch.equal(alone, together[begin:end])


def test_not_a_number_stays_in_its_row(native: NativeOps, dtype: torch.dtype) -> None:
    packed = native.pack_linear(random(32, 64, dtype=dtype))
    x = random(16, 64, dtype=dtype)
    clean = native.linear(x, packed)
    x[7] = float("nan")
    poisoned = native.linear(x, packed)
    assert poisoned[7].isnan().all()
    others = [row for row in range(16) if row != 7]
    assert torch.equal(poisoned[others], clean[others])


@pytest.mark.parametrize("ops", [TorchOps(), NativeOps(torch.float32)], ids=["torch", "native"])
def test_a_step_without_rows_is_no_error(ops: Ops) -> None:
    x = torch.empty(0, 64)
    assert ops.linear(x, ops.pack_linear(torch.zeros(32, 64))).shape == (0, 32)
    assert ops.rms_norm(x, torch.ones(64), EPS).shape == (0, 64)
