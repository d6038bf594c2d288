"""Rotary variants: the tables equal transformers' at near and far positions, and nothing unknown is run unscaled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runner.model.errors import ModelError
from runner.model.rope import RopeSpec, cos_sin_table, inverse_frequencies, parse_rope

POSITIONS = [0, 1, 4095, 8192, 100_000]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def reference_table(rope: dict[str, Any], head_dim: int, max_positions: int) -> torch.Tensor:
    """transformers' cos and sin at POSITIONS, the halves side by side."""
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=dict(rope),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([POSITIONS]))
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "default", "rope_theta": 1_000_000.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 1e6},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    ],
    ids=lambda rope: "-".join(f"{k}={v}" for k, v in rope.items()),
)
def test_the_table_equals_the_reference_at_near_and_far_positions(rope: dict[str, Any], head_dim: int) -> None:
    rope = {"rope_theta": 10_000.0, **rope}
    spec = parse_rope({"rope_parameters": rope}, head_dim, 4096)
    table = cos_sin_table(spec, POSITIONS[-1] + 1)
    assert table.dtype == torch.float32 and table.shape == (POSITIONS[-1] + 1, head_dim)
    torch.testing.assert_close(table[POSITIONS], reference_table(rope, head_dim, 4096), rtol=0, atol=2e-6)


def test_dynamic_scaling_leaves_the_table_alone_within_the_trained_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    scaled = parse_rope({"rope_parameters": rope}, 64, 4096)
    plain = RopeSpec("default", 10_000.0, 64)
    torch.testing.assert_close(cos_sin_table(scaled, 4096), cos_sin_table(plain, 4096), rtol=0, atol=0)
    assert not torch.equal(inverse_frequencies(scaled, 4097), inverse_frequencies(plain, 4097))


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500_000, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": "500000.0", "rope_scaling": {"rope_type": "llama3", "type": "linear", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000, **LLAMA3}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "llama3", "rope_theta": "5e5", **LLAMA3}},
    ],
)
def test_old_and_new_spellings_mean_the_same(config: dict[str, Any]) -> None:
    expected = RopeSpec(
        "llama3",
        500_000.0,
        64,
        factor=8.0,
        original_max_positions=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert parse_rope(config, 64, 131_072) == expected


def test_the_pretraining_length_beside_the_rope_parameters_wins() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    inside = parse_rope({"rope_scaling": rope}, 64, 8192)
    beside = parse_rope({"rope_scaling": rope, "original_max_position_embeddings": 2048}, 64, 8192)
    neither = parse_rope({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 64, 8192)
    assert [spec.original_max_positions for spec in (inside, beside, neither)] == [1024, 2048, 8192]


@pytest.mark.parametrize("empty", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": {}}])
def test_no_scaling_is_the_default_variant(empty: dict[str, Any]) -> None:
    assert parse_rope({"rope_theta": 10000, **empty}, 64, 2048) == RopeSpec("default", 10_000.0, 64)


@pytest.mark.parametrize(
    "config",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotary_rotates_the_leading_part_with_frequencies_of_that_part(config: dict[str, Any]) -> None:
    spec = parse_rope(config, 64, 2048)
    assert spec.rotary_dim == 32
    expected = [10_000.0 ** (-2 * pair / 32) for pair in range(16)]
    torch.testing.assert_close(inverse_frequencies(spec, 2048), torch.tensor(expected), rtol=1e-6, atol=0)


def test_divisors_slow_each_frequency_down() -> None:
    plain, divided = RopeSpec("default", 10_000.0, 4), RopeSpec("default", 10_000.0, 4, divisors=(1.0, 8.0))
    expected = inverse_frequencies(plain, 16) / torch.tensor([1.0, 8.0])
    assert torch.equal(inverse_frequencies(divided, 16), expected)


@pytest.mark.parametrize("kind", ["banana", "longrope", "su", "mrope", "proportional"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_variant_is_refused_by_name(kind: str, key: str) -> None:
    with pytest.raises(ModelError, match=repr(kind)) as caught:
        parse_rope({"rope_scaling": {key: kind, "factor": 2.0}}, 64, 2048)
    assert caught.value.code == "unsupported_rope"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_theta": "many"}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"partial_rotary_factor": 0.01}, "even part"),
    ],
)
def test_a_wrong_number_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        parse_rope(config, 64, 2048)
    assert caught.value.code == "bad_config"


def test_rope_parameters_per_layer_type_are_refused() -> None:
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ModelError, match="full_attention"):
        parse_rope({"rope_parameters": nested}, 64, 2048)


@pytest.mark.parametrize(
    ("rope", "max_context"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", **LLAMA3}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
    ],
)
def test_scaling_stretches_the_context_as_its_kind_means_it(rope: dict[str, Any], max_context: int) -> None:
    assert parse_rope({"rope_parameters": rope}, 64, 4096).max_context(4096) == max_context
