"""All blocks in one native call: the same bits as the decoder's own loop, and only where everything is native."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runner.attention.base import AttentionError
from runner.attention.cpu import CpuAttention
from runner.attention.reference import ReferenceAttention
from runner.kernels.native import NativeOps
from runner.metadata import BatchMetadata, build
from runner.model.config import ModelConfig
from runner.model.decoder import Decoder
from runner.model.parameters import fused_shapes, layout
from runner.model.rope import RopeSpec
from runner.ops import TorchOps

PAGES, PAGE_SIZE = 12, 4
TABLE = np.array([[7, 3, 9, 1], [2, 8, 0, 0], [5, 11, 4, 0]], np.int32)


def decoder(dtype: torch.dtype, *, native: bool = True, intermediate_size: int = 80, extras: bool = False) -> Decoder:
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=100,
        hidden_size=48,
        intermediate_size=intermediate_size,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeSpec("default", 10_000.0, 16),
        max_context=64,
        qkv_bias=extras,
        output_bias=extras,
        mlp_bias=extras,
        qk_norm=extras,
    )
    generator = torch.Generator().manual_seed(1)
    shapes = fused_shapes(layout(config))
    parameters = {name: (torch.randn(shape, generator=generator) * 0.2).to(dtype) for name, shape in shapes.items()}
    return Decoder(config, parameters, NativeOps(dtype) if native else TorchOps(), 64)


def pools(dtype: torch.dtype) -> list[torch.Tensor]:
    return list(torch.full((3, PAGES, 2, PAGE_SIZE, 2, 16), float("nan"), dtype=dtype))


def steps() -> list[BatchMetadata]:
    """Three prompts, then a step that mixes two decodes with the next chunk of a prompt."""
    return [
        build(TABLE, np.array(starts, np.int32), np.array(counts, np.int32), PAGE_SIZE)
        for starts, counts in (([0, 0, 0], [9, 5, 3]), ([9, 5, 3], [1, 1, 6]))
    ]


def hidden_states(model: Decoder, attention: CpuAttention | ReferenceAttention) -> list[torch.Tensor]:
    out = []
    for meta in steps():
        attention.plan(meta)
        positions = torch.from_numpy(meta.positions)
        out.append(model.forward(positions * 7 % 100, positions, attention))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "biases and q/k norm"])
def test_one_call_computes_the_same_bits_as_the_loop(dtype: torch.dtype, extras: bool) -> None:
    model = decoder(dtype, extras=extras)
    assert model._stack is not None
    stacked_pools, looped_pools = pools(dtype), pools(dtype)
    stacked = hidden_states(model, CpuAttention(stacked_pools, 6, 2, 16, 0.25))
    model._stack = None
    looped = hidden_states(model, CpuAttention(looped_pools, 6, 2, 16, 0.25))
    for one, other in zip(stacked, looped, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    for one, other in zip(stacked_pools, looped_pools, strict=True):
        assert torch.equal(one.nan_to_num(nan=-5.0), other.nan_to_num(nan=-5.0))


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "biases and q/k norm"])
def test_one_call_agrees_with_plain_torch(extras: bool) -> None:
    dtype = torch.float32
    native = hidden_states(decoder(dtype, extras=extras), CpuAttention(pools(dtype), 6, 2, 16, 0.25))
    plain = hidden_states(decoder(dtype, native=False, extras=extras), ReferenceAttention(pools(dtype), 6, 2, 16, 0.25))
    for one, other in zip(native, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_model_can_move_to_other_pages() -> None:
    model = decoder(torch.float32)
    first, second = (hidden_states(model, CpuAttention(pools(torch.float32), 6, 2, 16, 0.25)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_another_attention_backend_is_served_by_the_loop() -> None:
    model = decoder(torch.float32)
    attention = ReferenceAttention(pools(torch.float32), 6, 2, 16, 0.25)
    assert model._stack is not None
    assert not model._stack.serves(attention)
    assert all(states.isfinite().all() for states in hidden_states(model, attention))


def test_weights_that_cannot_be_packed_leave_the_loop() -> None:
    assert decoder(torch.float32, intermediate_size=40)._stack is None, "gates that don't fill whole vectors"
    assert decoder(torch.float32, native=False)._stack is None


def test_tokens_other_than_planned_are_refused() -> None:
    model, attention = decoder(torch.float32), CpuAttention(pools(torch.float32), 6, 2, 16, 0.25)
    attention.plan(steps()[0])
    with pytest.raises(AttentionError, match="planned for 17 tokens, not 4"):
        model.forward(torch.arange(4), torch.arange(4), attention)
