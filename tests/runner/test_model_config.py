"""Reading config.json: flags and their class defaults, end ids, windows, and refusals that name what is wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from runner.model.config import FAMILIES, ModelConfig, from_huggingface, union_ids
from runner.model.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def parsed(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return from_huggingface({**LLAMA, **changes}, generation)


def refused(**changes: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        parsed(**changes)
    return caught.value


def test_what_the_file_leaves_out_is_what_the_architecture_assumes() -> None:
    config = parsed()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert not (
        config.tie_word_embeddings or config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm
    )
    assert config.rope.theta == 10_000.0
    assert config.max_context == 2048


def test_the_defaults_are_those_of_the_transformers_classes() -> None:
    import transformers

    for architecture, family in FAMILIES.items():
        default = getattr(transformers, architecture).config_class()
        minimal = {
            key: getattr(default, key) for key in LLAMA if key not in ("architectures", "max_position_embeddings")
        }
        ours = from_huggingface({**minimal, "architectures": [architecture]})
        assert ours.num_kv_heads == default.num_key_value_heads
        head_dim = getattr(default, "head_dim", None) or default.hidden_size // default.num_attention_heads
        assert ours.head_dim == head_dim
        assert ours.tie_word_embeddings == default.tie_word_embeddings
        assert ours.rms_norm_eps == default.rms_norm_eps
        assert ours.rope.theta == default.rope_parameters["rope_theta"]
        assert family.default_max_positions == default.max_position_embeddings


def test_qwen2_has_biases_on_q_k_and_v_only_whatever_the_file_says() -> None:
    config = parsed(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, attention_bias=False)
    assert config.qkv_bias and not config.output_bias and not config.qk_norm


def test_mistral_ignores_a_bias_flag_its_class_does_not_have() -> None:
    config = parsed(architectures=["MistralForCausalLM"], num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias)


def test_the_model_type_stands_in_for_missing_architectures() -> None:
    assert parsed(architectures=None, model_type="mistral", num_key_value_heads=2).architecture == "MistralForCausalLM"


def test_a_nested_text_config_is_read_and_its_flags_win() -> None:
    nested = {**LLAMA, "tie_word_embeddings": True, "hidden_size": 32}
    config = from_huggingface({"text_config": nested, "tie_word_embeddings": False, "eos_token_id": 5})
    assert config.tie_word_embeddings
    assert config.hidden_size == 32
    assert config.eos_token_ids == (5,)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MixtralForCausalLM", "LlavaForConditionalGeneration"])
def test_an_unsupported_architecture_is_refused_by_name(name: str) -> None:
    error = refused(architectures=[name], text_config=LLAMA)
    assert error.code == "unsupported_architecture" and repr(name) in str(error)


def test_a_config_without_any_architecture_is_refused_with_its_model_type() -> None:
    error = refused(architectures=None, model_type="mamba")
    assert error.code == "unsupported_architecture" and "'mamba'" in str(error)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "4 query heads can't share 3"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    error = refused(**changes)
    assert error.code == "bad_config" and named in str(error)


def test_quantized_weights_are_refused_by_method() -> None:
    error = refused(quantization_config={"quant_method": "awq", "bits": 4})
    assert error.code == "unsupported_format" and "'awq'" in str(error)


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, {}, (2,)),
        (2, {"eos_token_id": [2, 7]}, (2, 7)),
        (2, {"eos_token_id": [7, 9]}, (7, 9, 2)),
        ([2, 3], {"eos_token_id": 3}, (3, 2)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, None, ()),
    ],
)
def test_end_ids_are_the_union_with_the_generation_config_first(own: Any, generation: Any, expected: Any) -> None:
    assert parsed(generation, eos_token_id=own).eos_token_ids == expected


@pytest.mark.parametrize("wrong", [True, -1, 2.0, [2, "3"]])
def test_an_end_id_that_is_no_token_id_is_refused(wrong: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        union_ids(wrong)


@pytest.mark.parametrize(
    ("changes", "max_context"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, 512),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 2048),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 2048),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 512}, 2048),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}, 2048),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "use_sliding_window": True}, 2048),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "use_sliding_window": True}
            | {"max_window_layers": 1},
            512,
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 512, "use_sliding_window": True}
            | {"layer_types": ["full_attention", "sliding_attention"]},
            512,
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 512, "use_sliding_window": True}
            | {"max_window_layers": 0, "layer_types": ["full_attention", "full_attention"]},
            2048,
        ),
    ],
)
def test_a_sliding_window_in_use_limits_the_context_with_a_warning(
    changes: dict[str, Any], max_context: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parsed(num_key_value_heads=2, **changes).max_context == max_context
    assert bool(caplog.records) == (max_context == 512)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_from_its_old_and_new_key(key: str) -> None:
    assert parsed(**{key: "bfloat16"}).checkpoint_dtype == "bfloat16"
