"""Phase `operations`: everything but attention, against float64; and sampling, against the CPU's sampler.

Also that a row's token depends on that row alone: the same in any batch, with FlashInfer's thresholds and without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.gpu.report import Attempt, Checks, Skipped
from ops.gpu.setting import Setting
from runner.cuda.ops import FlashInferOps
from runner.cuda.sampling import SamplingColumns, device_uniforms, sample_on_device
from runner.kernels.build import KernelError
from runner.model.rope import RopeSpec, cos_sin_table
from runner.ops import TorchOps
from runner.quantize import quantized
from runner.sampler import keep_min_p, keep_top_k, keep_top_p, pick
from runner.uniform import uniforms

ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of a result, relative to 1 + its size: one rounding, and one more where the kernel rounds in between."""
QUANTIZED = {"int8": 0.015, "fp8": 0.05, "int4": 0.15}
"""Relative error of a linear of normal weights and inputs, about twice what torchao's schemes have."""
BORDERLINE = 1e-5
"""Two devices may round exponentials apart: how near to the border of two tokens a draw counts as on it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the tensors are."""

    tokens: int = 300
    hidden: int = 4096
    inner: int = 14336
    vocabulary: int = 128_256
    rows: int = 256
    draws: int = 1 << 20


SMALL = Sizes(5, 64, 96, 1000, 24, 512)


def run(checks: Checks, setting: Setting, sizes: Sizes | None = None) -> None:
    """Each operation in both dtypes, then sampling."""
    sizes = sizes or Sizes()
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
        _dense(checks, setting, sizes, dtype, name)
    _quantized(checks, setting, sizes)
    _uniforms(checks, setting, sizes)
    _sampling(checks, setting, sizes)


def _error(got: Tensor, expected: Tensor) -> float:
    """The largest difference relative to 1 + the size of what is right."""
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max().nan_to_num(float("inf")))


def _dense(checks: Checks, setting: Setting, sizes: Sizes, dtype: torch.dtype, name: str) -> None:
    ops, plain, device = FlashInferOps(dtype, setting.module), TorchOps(), setting.device.torch
    generator = torch.Generator(device).manual_seed(5)
    most = ROUNDING[dtype]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    tokens = sizes.tokens
    with checks.attempt(f"rms_norm, {name}") as found:
        for width in (sizes.hidden, 576):
            x, weight = random(tokens, width), random(width)
            expected = plain.rms_norm(x.double(), weight.double(), 1e-5)
            found.within("error", _error(ops.rms_norm(x, weight, 1e-5), expected), most)
        heads, weight = random(tokens, 12, 128)[:, 2:9], random(128)  # rows with gaps, as a fused projection has
        expected = plain.rms_norm(heads.double(), weight.double(), 1e-6)
        ops.head_norm(heads, weight, 1e-6)
        found.within("error", _error(heads, expected), most)
    with checks.attempt(f"silu_and_mul, {name}") as found:
        x = random(tokens, 2 * sizes.inner)
        found.within("error", _error(ops.silu_and_mul(x), plain.silu_and_mul(x.double())), most)
    with checks.attempt(f"rope, {name}") as found:
        for head_dim in (64, 128):
            _check_rope(lambda value: found.within("error", value, most), ops, random, tokens, head_dim, device)
    with checks.attempt(f"linear and linear_add, {name}") as found:
        weight, x = random(sizes.inner, sizes.hidden), random(tokens, sizes.hidden)
        residual = random(tokens, sizes.inner)
        expected = F.linear(x.double(), weight.double())
        packed = ops.pack_linear(weight)
        found.within("relative", _relative(ops.linear(x, packed), expected), most)
        expected = residual.double() + expected
        ops.linear_add(x, packed, residual)
        found.within("relative", _relative(residual, expected), most)


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def _check_rope(
    found: Callable[[float], None],
    ops: FlashInferOps,
    random: Callable[..., Tensor],
    tokens: int,
    head_dim: int,
    device: torch.device,
) -> None:
    table = cos_sin_table(RopeSpec("default", 500_000.0, head_dim), 8192).to(device)
    positions = torch.arange(tokens, device=device) * (8191 // tokens)
    fused = random(tokens, 12, head_dim)
    expected = fused.double()
    TorchOps().rope(expected[:, :8], expected[:, 8:], positions, table.double())
    ops.rope(fused[:, :8], fused[:, 8:], positions, table)
    found(_error(fused, expected))


def _quantized(checks: Checks, setting: Setting, sizes: Sizes) -> None:
    device = setting.device.torch
    for scheme, most in QUANTIZED.items():
        with checks.attempt(f"weights in {scheme}") as found:
            try:
                ops = quantized(FlashInferOps(torch.bfloat16, setting.module), scheme, device)
            except KernelError as error:
                raise Skipped(str(error)) from error
            generator = torch.Generator(device).manual_seed(9)
            width = max(128, sizes.hidden)
            weight = torch.randn(width, width, generator=generator, device=device).to(torch.bfloat16)
            x = torch.randn(sizes.tokens, width, generator=generator, device=device).to(torch.bfloat16)
            expected = F.linear(x.double(), weight.double())
            with torch.inference_mode():
                got = ops.linear(x, ops.pack_linear(weight))
            found.within("relative", _relative(got, expected), most)


def _uniforms(checks: Checks, setting: Setting, sizes: Sizes) -> None:
    with checks.attempt("random numbers, bit for bit") as found:
        rng = np.random.default_rng(3)
        seeds, choices = (rng.integers(0, 2**64, sizes.draws, dtype=np.uint64) for _ in range(2))
        seeds[:3] = (0, 2**63, 2**64 - 1)
        positions = rng.integers(0, 2**20, sizes.draws, dtype=np.int64)
        sent = [torch.from_numpy(x.view(np.int64)).to(setting.device.torch) for x in (seeds, choices, positions)]
        drawn = device_uniforms(*sent).cpu().numpy()
        found.numbers["numbers"] = sizes.draws
        found.need(np.array_equal(drawn, uniforms(seeds, choices, positions)), "the device draws other numbers")


def columns_for(rows: int, vocabulary: int, seed: int) -> SamplingColumns:
    """Rows with every mixture of temperature, top-k, top-p and min-p, greedy ones among them."""
    rng = np.random.default_rng(seed)
    number = np.arange(rows)
    return SamplingColumns(
        temperature=np.where(number % 8 == 7, 0.0, 0.5 + number % 3 * 0.4),
        top_k=np.where(number % 2 == 1, np.minimum(5 + number * 3, vocabulary // 2), 0).astype(np.int64),
        top_p=np.where(number % 4 >= 2, 0.3 + number % 5 * 0.15, 1.0).astype(np.float32).astype(np.float64),
        min_p=np.where(number % 5 == 4, 0.02, 0.0).astype(np.float32).astype(np.float64),
        seed=rng.integers(-(2**63), 2**63 - 1, rows, dtype=np.int64),
        choice=number.astype(np.int64) % 3,
        position=rng.integers(1, 5000, rows, dtype=np.int64),
        random=True,
        limited=(True, True, True),
    )


def _sampling(checks: Checks, setting: Setting, sizes: Sizes) -> None:
    rows, vocabulary, device = sizes.rows, sizes.vocabulary, setting.device.torch
    columns = columns_for(rows, vocabulary, 11)
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2)) * 3
    kernels = {"FlashInfer's thresholds": setting.module.sampling, "torch alone": None}
    sent = logits.to(device)
    with checks.attempt("thresholds of top-k and top-p") as found:
        _thresholds(found, sent, setting.module.sampling)
    for name, source in kernels.items():
        with checks.attempt(f"tokens with {name}, as on the CPU") as found:
            tokens = _sample(sent, columns, vocabulary, source, slice(None)).tolist()
            expected, wrong, borderline = _cpu_tokens(logits, columns), 0, 0
            for row in (row for row in range(rows) if tokens[row] != expected[row]):
                near = _on_border(logits[row], columns, row, tokens[row])
                borderline, wrong = borderline + near, wrong + (not near)
            found.numbers |= {"rows": rows, "borderline": borderline, "wrong": wrong}
            found.need(wrong == 0, f"{wrong} of {rows} tokens are others than the CPU's")
        with checks.attempt(f"tokens with {name}, the same in any batch") as found:
            together = _sample(sent, columns, vocabulary, source, slice(None))
            found.need(torch.equal(together, _sample(sent, columns, vocabulary, source, slice(None))), "twice differs")
            for part in (slice(0, rows // 3), slice(rows // 3, rows), slice(rows - 1, rows)):
                alone = _sample(sent, columns, vocabulary, source, part)
                found.need(torch.equal(together[part], alone), f"rows {part.start} to {part.stop} alone differ")


def _thresholds(found: Attempt, logits: Tensor, kernels: Any) -> None:
    """The ids that sorting keeps; of top-p's in float64, but for those on the border, where roundings decide."""
    rows, width = logits.shape
    top_k = 1 + torch.arange(rows, device=logits.device) * 7 % (width // 2)
    borders = logits.sort(1, descending=True).values.gather(1, top_k.unsqueeze(1) - 1)
    kept = kernels.top_k_mask_logits(logits, top_k.int()) > float("-inf")
    others = (kept != (logits >= borders)) & (logits != borders)  # of those that tie with the last any may be kept
    found.need(not bool(others.any() or (kept.sum(1) < top_k).any()), "top-k keeps other ids")
    top_p = (0.05 + 0.9 * torch.arange(rows, device=logits.device) / rows).float()
    probabilities = logits.softmax(1)
    kept = kernels.top_p_renorm_probs(probabilities, top_p, is_deterministic=True) > 0
    ordered, order = probabilities.double().sort(1, descending=True)
    before = ordered.cumsum(1) - ordered
    wrong = (kept.gather(1, order) != (before < top_p.double().unsqueeze(1))) & (ordered > 0)
    far = (before - top_p.double().unsqueeze(1)).abs() > BORDERLINE
    found.numbers["borderline"] = int((wrong & ~far).sum())
    found.need(not bool((wrong & far).any()), "top-p keeps other ids")


def _sample(logits: Tensor, columns: SamplingColumns, vocabulary: int, kernels: Any, rows: slice) -> Tensor:
    sent = [torch.from_numpy(array[rows].copy()).to(logits.device) for array in columns.arrays]
    with torch.inference_mode():
        return sample_on_device(logits[rows], columns, sent, vocabulary, kernels).tokens


def _cpu_tokens(logits: Tensor, columns: SamplingColumns) -> list[int]:
    """What the host's sampler chooses: the same functions, on the CPU."""
    temperature = torch.from_numpy(columns.temperature).float()
    random = temperature > 0
    part = logits / torch.where(random, temperature, 1.0).unsqueeze(1)
    keep_top_k(part, torch.from_numpy(columns.top_k))
    keep_top_p(part, torch.from_numpy(columns.top_p).float())
    keep_min_p(part, torch.from_numpy(columns.min_p).float())
    tokens: list[int] = torch.where(random, pick(part, _draws(columns)), logits.argmax(1)).tolist()
    return tokens


def _draws(columns: SamplingColumns) -> Tensor:
    seeds, choices = columns.seed.view(np.uint64), columns.choice.view(np.uint64)
    return torch.from_numpy(uniforms(seeds, choices, columns.position))


def _on_border(logits: Tensor, columns: SamplingColumns, row: int, token: int) -> bool:
    """Whether the draw of this row lies within a rounding of `token`'s part of the distribution, in float64."""
    if columns.temperature[row] == 0:
        return False
    part = (logits.double() / float(columns.temperature[row])).float().unsqueeze(0)
    keep_top_k(part, torch.from_numpy(columns.top_k[row : row + 1]))
    keep_top_p(part, torch.from_numpy(columns.top_p[row : row + 1]).float())
    keep_min_p(part, torch.from_numpy(columns.min_p[row : row + 1]).float())
    running = part.double().softmax(1).cumsum(1).flatten()
    draw = float(_draws(columns)[row])
    before = float(running[token - 1]) if token else 0.0
    return before - BORDERLINE <= draw <= float(running[token]) + BORDERLINE
