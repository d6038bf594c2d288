"""Tiny random checkpoints of every supported architecture: our logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.loader import load_model
from runner.ops import TorchOps

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LENGTHS = [1, 15, 16, 17, 60]


def with_theta(rope: dict[str, Any], theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_theta": theta, **rope}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-coarse-eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama-theta": ("llama", {"rope_parameters": with_theta({"rope_type": "default"}, 500_000.0)}),
    "llama-linear": ("llama", {"rope_parameters": with_theta({"rope_type": "linear", "factor": 4.0})}),
    "llama-dynamic": ("llama", {"rope_parameters": with_theta({"rope_type": "dynamic", "factor": 4.0})}),
    "llama-llama3": (
        "llama",
        {"rope_parameters": with_theta({**LLAMA3, "original_max_position_embeddings": 32}, 500_000.0)},
    ),
    "llama-yarn": ("llama", {"rope_parameters": with_theta(YARN)}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-wide-heads": ("mistral", {"head_dim": 24, "sliding_window": None}),
    "mistral-within-its-window": ("mistral", {"sliding_window": 80}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": with_theta(YARN, 1_000_000.0)}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-attention-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-default-head-dim": ("qwen3", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_the_reference(
    variant: str, tiny_model: Callable[..., Any], paged_rows: Callable[..., Any], tmp_path: Path
) -> None:
    family, overrides = VARIANTS[variant]
    reference = tiny_model(family, **overrides)
    reference.save_pretrained(tmp_path)
    # A limit within the trained length, at which dynamic scaling is defined to be none.
    model = load_model(tmp_path, "auto", TorchOps(), max_model_len=min(80, reference.config.max_position_embeddings))
    assert model.dtype == torch.float32

    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    logits, outputs = paged_rows(model.decoder, len(prompts), 80).generate(prompts, 12)
    for prompt, output, got in zip(prompts, outputs, logits, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt + output])).logits[0]
        scale = wanted.abs().amax()
        torch.testing.assert_close(got / scale, wanted[: len(prompt)] / scale, rtol=0, atol=1e-4)
        assert output == wanted[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_dynamic_scaling_past_the_trained_length_equals_the_reference_at_the_served_length(
    tiny_model: Callable[..., Any], paged_rows: Callable[..., Any], tmp_path: Path
) -> None:
    rope = with_theta({"rope_type": "dynamic", "factor": 4.0})
    reference = tiny_model("llama", max_position_embeddings=32, rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", TorchOps(), max_model_len=100)
    prompt = torch.randint(0, 96, (100,), generator=torch.Generator().manual_seed(6)).tolist()
    got = paged_rows(model.decoder, 1, 100).step({0: prompt})[0]
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).logits[0]
    scale = wanted.abs().amax()
    torch.testing.assert_close(got / scale, wanted / scale, rtol=0, atol=1e-4)
