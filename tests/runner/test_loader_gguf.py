"""GGUF files: tiny ones written as the converters write them give the logits of the model they came from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from runner.loader import LoadedModel, ModelError, load_model
from runner.loader.gguf import halves_first
from runner.ops import TorchOps
from tests.runner.gguf_files import permute, write_gguf

PROMPT = list(range(3, 60))


def load(path: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    return load_model(path, dtype, TorchOps(), **options)


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(path)
    return caught.value


@pytest.fixture
def assert_equals(paged_rows: Callable[..., Any]) -> Callable[..., None]:
    def check(model: LoadedModel, reference: Any, tolerance: float = 1e-4) -> None:
        got = paged_rows(model.decoder, 1, len(PROMPT)).step({0: PROMPT})[0]
        with torch.inference_mode():
            wanted = reference(torch.tensor([PROMPT])).logits[0]
        scale = wanted.abs().amax()
        torch.testing.assert_close(got / scale, wanted / scale, rtol=0, atol=tolerance)

    return check


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("llama", {"head_dim": 20}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_a_float32_file_gives_the_logits_of_its_model(
    family: str, overrides: dict[str, Any], tiny_model: Callable[..., Any], tmp_path: Path, assert_equals: Any
) -> None:
    reference = tiny_model(family, **overrides)
    model = load(write_gguf(tmp_path / "tiny.gguf", reference), "auto")
    assert model.dtype == torch.float32
    assert_equals(model, reference)


@pytest.mark.parametrize(
    ("quantization", "auto"),
    [
        (GGMLQuantizationType.F16, torch.float16),
        (GGMLQuantizationType.BF16, torch.bfloat16),
        (GGMLQuantizationType.Q8_0, torch.bfloat16),
    ],
)
def test_every_storage_type_is_read_and_auto_is_the_one_it_implies(
    quantization: GGMLQuantizationType,
    auto: torch.dtype,
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    assert_equals: Any,
) -> None:
    # Sizes that are multiples of a quantization block.
    reference = tiny_model("llama", hidden_size=32, intermediate_size=64, tie_word_embeddings=True)
    path = write_gguf(tmp_path / "tiny.gguf", reference, quantization=quantization)
    assert load(path, "auto").dtype == auto
    assert_equals(load(path), reference, tolerance=0.1)


def test_an_unreadable_quantization_is_refused_with_tensor_and_type(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tiny_model("llama", hidden_size=32, intermediate_size=64)
    path = write_gguf(tmp_path / "tiny.gguf", reference, quantization=GGMLQuantizationType.Q8_0)
    # Every type that can be written here can be read, so the reader forgets one.
    monkeypatch.delitem(quants._type_traits, GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    error = refused(path)
    assert error.code == "unsupported_format" and "is stored as Q8_0" in str(error)


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        (LINEAR, {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0}),
        (
            YARN,
            {"{arch}.rope.scaling.type": "yarn", "{arch}.rope.scaling.factor": 4.0}
            | {"{arch}.rope.scaling.original_context_length": 32},
        ),
        ({"rope_type": "default", "rope_theta": 10_000.0}, {"{arch}.rope.scaling.type": "none"}),
    ],
    ids=lambda value: value.get("rope_type", ""),
)
def test_rope_scaling_is_read_from_the_metadata(
    rope: dict[str, Any], metadata: dict[str, Any], tiny_model: Callable[..., Any], tmp_path: Path, assert_equals: Any
) -> None:
    reference = tiny_model("llama", rope_parameters=rope)
    assert_equals(load(write_gguf(tmp_path / "tiny.gguf", reference, metadata=metadata)), reference)


def test_llama3_scaling_comes_as_a_tensor_of_divisors(
    tiny_model: Callable[..., Any], tmp_path: Path, assert_equals: Any
) -> None:
    reference = tiny_model("llama", rope_parameters=LLAMA3, head_dim=16)
    scaled = reference.model.rotary_emb.inv_freq
    plain = 1.0 / (500_000.0 ** (torch.arange(0, 16, 2).float() / 16))
    divisors = (plain / scaled).numpy()
    assert (divisors > 1).any()
    path = write_gguf(tmp_path / "tiny.gguf", reference, extra={"rope_freqs.weight": divisors})
    assert_equals(load(path), reference)


def test_divisors_of_the_wrong_number_are_refused(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(3, np.float32)}
    error = refused(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), extra=extra))
    assert error.code == "wrong_shape" and "rope_freqs.weight has 3 values, RoPE wants 4" in str(error)


@pytest.mark.parametrize(
    ("metadata", "code", "named"),
    [
        ({"{arch}.rope.scaling.type": "longrope", "{arch}.rope.scaling.factor": 4.0}, "unsupported_rope", "'longrope'"),
        ({"{arch}.rope.scaling.type": "linear"}, "bad_config", "llama.rope.scaling.factor"),
        ({"{arch}.rope.dimension_count": 4}, "unsupported_rope", "4 of 8"),
        ({"{arch}.expert_count": 8}, "unsupported_architecture", "experts"),
        ({"{arch}.attention.value_length": 16}, "bad_config", "16 beside key heads of 8"),
        ({"{arch}.block_count": None}, "bad_config", "llama.block_count"),
        ({"{arch}.embedding_length": "wide"}, "bad_config", "llama.embedding_length"),
        ({"{arch}.attention.layer_norm_rms_epsilon": None}, "bad_config", "layer_norm_rms_epsilon"),
        ({"split.count": 2}, "unsupported_format", "merge"),
        ({"{arch}.block_count": 3}, "missing_tensor", "'layers.2.self_attn.q_proj.weight'"),
        ({"{arch}.block_count": 1}, "unexpected_tensor", "'layers.1."),
        ({"{arch}.feed_forward_length": 49}, "wrong_shape", "[48, 32], the configuration wants [49, 32]"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(
    metadata: dict[str, Any], code: str, named: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    error = refused(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), metadata=metadata))
    assert (error.code, named in str(error)) == (code, True), error


def test_an_unsupported_architecture_is_refused_by_name(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    error = refused(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), arch="mamba"))
    assert error.code == "unsupported_architecture" and "'mamba'" in str(error)


def test_missing_and_unknown_tensors_are_named(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    error = refused(write_gguf(tmp_path / "a.gguf", tiny_model("llama"), drop="blk.1.ffn_down.weight"))
    assert error.code == "missing_tensor" and "'layers.1.mlp.down_proj.weight'" in str(error)
    error = refused(
        write_gguf(tmp_path / "b.gguf", tiny_model("llama"), extra={"blk.0.ffn_up_exps.weight": np.ones(3)})
    )
    assert error.code == "unexpected_tensor" and "'blk.0.ffn_up_exps.weight'" in str(error)


@pytest.mark.parametrize("keep", [0, 3, 100, -50_000, -1])
def test_a_truncated_file_is_named(keep: int, tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    error = refused(path)
    assert error.code == "damaged_file" and str(path) in str(error)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GIF89a" * 100)
    error = refused(path)
    assert error.code == "damaged_file" and str(path) in str(error)


def test_end_ids_are_those_of_every_kind_of_end(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert load(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), metadata=metadata)).eos_token_ids == (2, 7)


def test_a_head_wider_than_the_token_list_reports_both_sizes(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = load(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama")))
    assert (model.vocab_size, model.tokenizer_vocab_size) == (96, 90)
    model = load(write_gguf(tmp_path / "bare.gguf", tiny_model("llama"), metadata={"tokenizer.ggml.tokens": None}))
    assert (model.vocab_size, model.tokenizer_vocab_size) == (96, 96)


def test_a_sliding_window_limits_the_context(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    metadata = {"{arch}.attention.sliding_window": 50}
    assert load(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), metadata=metadata)).config.max_context == 50


def test_interleaved_rows_come_back_in_halves() -> None:
    rows = torch.arange(12)
    stored = torch.from_numpy(permute(rows.numpy(), 2))
    assert stored.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(halves_first(stored, 2), rows)


def test_the_real_file_is_read_with_its_configuration(smollm2_float32: LoadedModel) -> None:
    config = smollm2_float32.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (
        30,
        576,
        9,
        3,
        64,
    )
    assert config.tie_word_embeddings and config.rope.theta == 100_000.0 and config.max_context == 8192
    assert smollm2_float32.vocab_size == smollm2_float32.tokenizer_vocab_size == 49152
    assert smollm2_float32.eos_token_ids == (2,)
