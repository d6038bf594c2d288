"""What the decoder must know about a model: sizes, flags, rotary variant, end tokens. Not how weights are stored.

`ModelConfig` is format-neutral; `from_huggingface` reads `config.json` and `generation_config.json`. Metadata of GGUF
files is read in `runner/loader/gguf.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runner.model.errors import ModelError
from runner.model.fields import integer, number
from runner.model.rope import RopeSpec, parse_rope

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer: RMSNorm, rotary attention with grouped heads, gated SiLU feed-forward."""

    architecture: str
    vocab_size: int
    """Rows of the embedding and of the head. The tokenizer may know fewer ids; the rest is padding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_context: int
    """Longest sequence, in tokens, for which this decoder computes what the model means."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = ""
    """`bfloat16`, `float16`, `float32`, or empty where the configuration doesn't say."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "head_dim",
            "max_context",
        ):
            if getattr(self, name) < 1:
                raise ModelError("bad_config", f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                "bad_config", f"{self.num_heads} query heads can't share {self.num_kv_heads} key/value heads evenly"
            )

    @property
    def attention_scale(self) -> float:
        """The factor on q·k before the softmax."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class _Family:
    """What a Hugging Face architecture's class assumes where `config.json` is silent."""

    default_kv_heads: int | None = None
    """None: as many as query heads."""
    default_head_dim: int | None = None
    """None: hidden size / query heads."""
    default_max_positions: int = 32768
    qkv_bias: bool = False
    """Biases on q, k and v whatever `attention_bias` says."""
    attention_bias_flag: bool = False
    mlp_bias_flag: bool = False
    qk_norm: bool = False
    window: Literal["never", "always", "flagged"] = "never"
    """When `sliding_window` counts. `flagged`: only with `use_sliding_window`, from layer `max_window_layers` on."""


FAMILIES = {
    "LlamaForCausalLM": _Family(default_max_positions=2048, attention_bias_flag=True, mlp_bias_flag=True),
    "MistralForCausalLM": _Family(default_kv_heads=8, default_max_positions=131072, window="always"),
    "Qwen2ForCausalLM": _Family(default_kv_heads=32, qkv_bias=True, window="flagged"),
    "Qwen3ForCausalLM": _Family(
        default_kv_heads=32, default_head_dim=128, attention_bias_flag=True, qk_norm=True, window="flagged"
    ),
}
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def from_huggingface(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The configuration in a parsed `config.json`, with the end tokens of `generation_config.json` if there is one.

    Raises ModelError: `unsupported_architecture` names what isn't supported, `bad_config` the field that is wrong.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    config = _flatten(config)
    _refuse_what_changes_results(config)

    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    num_layers = integer(config, "num_hidden_layers")
    if num_heads < 1:
        raise ModelError("bad_config", f"num_attention_heads must be at least 1, not {num_heads}")
    head_dim = integer(config, "head_dim", family.default_head_dim or hidden_size // num_heads)
    max_positions = integer(config, "max_position_embeddings", family.default_max_positions)
    rope = parse_rope(config, head_dim, max_positions)
    attention_bias = family.attention_bias_flag and bool(config.get("attention_bias", False))
    generation = generation or {}
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", family.default_kv_heads or num_heads),
        head_dim=head_dim,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        max_context=_max_context(config, family, rope, max_positions, num_layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias_flag and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        eos_token_ids=union_ids(generation.get("eos_token_id"), config.get("eos_token_id")),
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch."),
    )


def union_ids(*sources: int | Iterable[int] | None) -> tuple[int, ...]:
    """Every id of `sources` once, in order of first appearance. A source is one id, several, or None.

    Raises ModelError `bad_config` for anything that is no token id.
    """
    found: dict[int, None] = {}
    for source in sources:
        for value in () if source is None else source if isinstance(source, Iterable) else (source,):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ModelError("bad_config", f"eos_token_id must hold token ids, not {value!r}")
            found[value] = None
    return tuple(found)


def clamp_context(max_context: int, window: int) -> int:
    """`max_context` shortened to a sliding window of `window` tokens, within which the window hides nothing."""
    if window < 1:
        raise ModelError("bad_config", f"sliding_window must be at least 1, not {window}")
    if max_context > window:
        log.warning(
            "the model attends within a sliding window of %d tokens, which is not supported beyond its length: "
            "the context is limited to %d tokens instead of %d",
            window,
            window,
            max_context,
        )
    return min(max_context, window)


def _architecture(config: Mapping[str, Any]) -> str:
    """The name of a supported architecture; looks into a nested `text_config` only where the top is silent."""
    for source in (config, config.get("text_config") or {}):
        names = source.get("architectures") or []
        for name in names:
            if name in FAMILIES:
                return str(name)
        if names:
            raise ModelError(
                "unsupported_architecture",
                f"architecture {names[0]!r} is not supported (supported: {', '.join(FAMILIES)})",
            )
        if (kind := source.get("model_type")) is not None and kind in _BY_MODEL_TYPE:
            return _BY_MODEL_TYPE[kind]
    raise ModelError(
        "unsupported_architecture",
        f"config.json names no supported architecture (model_type {config.get('model_type')!r}; "
        f"supported: {', '.join(FAMILIES)})",
    )


def _flatten(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's own settings win over those around them; what only the outer level says still holds."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def _refuse_what_changes_results(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError("bad_config", f"hidden_act {activation!r} is not supported (supported: silu)")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelError("unsupported_format", f"weights quantized with {method!r} are not supported")


def _max_context(
    config: Mapping[str, Any], family: _Family, rope: RopeSpec, max_positions: int, num_layers: int
) -> int:
    """Tokens the model is meant for: the trained length times what its rotary scaling adds, within any window."""
    context = rope.max_context(max_positions)
    if config.get("sliding_window") is None or family.window == "never":
        return context
    if family.window == "flagged":
        layer_types = config.get("layer_types")
        if layer_types is not None:
            windowed = "sliding_attention" in layer_types
        else:
            windowed = integer(config, "max_window_layers", 28) < num_layers
        if not (config.get("use_sliding_window", False) and windowed):
            return context
    return clamp_context(context, integer(config, "sliding_window"))
