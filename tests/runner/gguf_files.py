"""Writes small GGUF files from transformers models, as llama.cpp's converters lay them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K of architecture llama."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path,
    model: Any,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    arch: str | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: str = "",
) -> Path:
    """`model` (transformers) as a GGUF. `metadata` adds keys (`{arch}`: the architecture), None drops one."""
    config = model.config
    arch = arch or {"mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "{arch}.block_count": config.num_hidden_layers,
        "{arch}.context_length": config.max_position_embeddings,
        "{arch}.embedding_length": config.hidden_size,
        "{arch}.feed_forward_length": config.intermediate_size,
        "{arch}.attention.head_count": config.num_attention_heads,
        "{arch}.attention.head_count_kv": config.num_key_value_heads,
        "{arch}.attention.key_length": head_dim,
        "{arch}.attention.value_length": head_dim,
        "{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "{arch}.rope.dimension_count": head_dim,
        "tokenizer.ggml.tokens": [f"<{number}>" for number in range(90)],
        "tokenizer.ggml.eos_token_id": 2,
        **(metadata or {}),
    }
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        add_key(writer, key.replace("{arch}", arch), value)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if stem == "lm_head" and tied:
            continue
        array = tensor.float().numpy()
        if stem in OUTSIDE:
            stored = OUTSIDE[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{NAMES[part]}"
            if arch == "llama" and part.endswith(("q_proj", "k_proj")):
                array = permute(array, config.num_attention_heads if "q_proj" in part else config.num_key_value_heads)
        if f"{stored}.{suffix}" != drop:
            add_tensor(writer, f"{stored}.{suffix}", array, quantization)
    for name, array in (extra or {}).items():
        add_tensor(writer, name, array, GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def add_tensor(writer: GGUFWriter, name: str, array: np.ndarray, quantization: GGMLQuantizationType) -> None:
    array = np.ascontiguousarray(array, np.float32)
    if array.ndim < 2 or quantization == GGMLQuantizationType.F32:
        writer.add_tensor(name, array)  # Converters keep vectors in float32.
    elif quantization == GGMLQuantizationType.F16:
        writer.add_tensor(name, array.astype(np.float16))
    else:
        writer.add_tensor(name, quantize(array, quantization), raw_dtype=quantization)
