"""GGUF files through the `gguf` package: metadata into a `ModelConfig`, tensors dequantized and renamed.

Two conventions differ from Hugging Face's: tensors have other names, and converters store Q and K of architecture
`llama` with each head's rows interleaved. Both are undone here, so that nothing beyond this file knows about them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from runner.loader.checkpoint import Part, whole
from runner.model.config import ModelConfig, clamp_context, union_ids
from runner.model.errors import ModelError
from runner.model.fields import integer, number
from runner.model.parameters import EMBEDDING, FINAL_NORM, HEAD
from runner.model.rope import RopeSpec, yarn_mscale

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTSIDE_BLOCKS = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_IN_BLOCKS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"
_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
_QUANTIZED_DTYPE = "bfloat16"
"""What quantized weights are computed in: wide enough for any activation, half of float32's bytes."""


class GgufCheckpoint:
    """One GGUF file whose headers have been read. See `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError: `missing_file`, `damaged_file` (naming the file), or what `read_config` raises."""
        self.name = str(path)
        if not path.exists():
            raise ModelError("missing_file", f"{path} does not exist")
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise ModelError("damaged_file", f"{path} is no GGUF file, or is incomplete: {error}") from error
        self._stored = {tensor.name: tensor for tensor in self._reader.tensors}
        divisors = self._stored.pop(_ROPE_DIVISORS, None)
        metadata = Metadata(self._reader)
        self.config = read_config(
            metadata,
            tensor_names=self._stored.keys(),
            embedding_rows=int(self._stored["token_embd.weight"].shape[1])
            if "token_embd.weight" in self._stored
            else 0,
            checkpoint_dtype=self._dominant_dtype(),
            rope_divisors=() if divisors is None else tuple(float(x) for x in divisors.data.view(np.float32)),
        )
        self._check_types()
        self._interleaved = metadata.architecture == "llama"
        self.tokenizer_vocab_size = min(metadata.length("tokenizer.ggml.tokens"), self.config.vocab_size)
        if not self.tokenizer_vocab_size:
            self.tokenizer_vocab_size = self.config.vocab_size
        # GGUF lists dimensions fastest first.
        self.shapes = {
            huggingface_name(name): tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._stored.items()
        }

    def tensors(self, parts: Mapping[str, Part] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, or its part, under its Hugging Face name, dequantized to float32 (float16 stays as it is).

        A part of Q or K holds whole heads.
        """
        parts = parts or {}
        for stored in self._stored.values():
            name = huggingface_name(stored.name)
            shape = self.shapes[name]
            part = parts.get(name) or whole(shape)
            rows, columns = part[0], part[1:]
            plain = stored.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
            # Quantized blocks lie along the rows: those of other ranks need not be dequantized, columns must be.
            taken = stored.data.reshape(shape[0], -1)[rows] if len(shape) > 1 else stored.data
            array = taken if plain else dequantize(taken, stored.tensor_type)
            # The file is mapped read-only, and torch wants memory that it could write to.
            array = array if array.flags.writeable else np.array(array)
            if len(shape) > 1:
                tensor = torch.from_numpy(array).reshape(-1, *shape[1:])[(slice(None), *columns)]
            else:
                tensor = torch.from_numpy(array).reshape(shape)[rows]
            if self._interleaved and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
                tensor = halves_first(tensor, (rows.stop - rows.start) // self.config.head_dim)
            yield name, tensor

    def _check_types(self) -> None:
        """Try each storage type on one block, so that one that can't be read is known before anything is allocated."""
        examples = {tensor.tensor_type: tensor.name for tensor in self._stored.values()}
        for kind, name in examples.items():
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError as error:
                raise ModelError(
                    "unsupported_format", f"{self.name}: {name!r} is stored as {kind.name}, which is not supported"
                ) from error

    def _dominant_dtype(self) -> str:
        """The type that most weights have. Vectors don't count: converters keep them in float32."""
        sizes: Counter[str] = Counter()
        for tensor in self._stored.values():
            if len(tensor.shape) > 1:
                sizes[_PLAIN_DTYPES.get(tensor.tensor_type, _QUANTIZED_DTYPE)] += int(tensor.n_elements)
        return sizes.most_common(1)[0][0] if sizes else ""


class Metadata:
    """Typed access to a GGUF file's key-value section. `{arch}` in a key stands for the file's architecture."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = ""
        self.architecture = str(self.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a scalar or string, or `default`."""
        field = self._fields.get(self._full(key))
        return default if field is None else field.contents()

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises ModelError `bad_config` naming the key if it is absent (without a default) or no integer."""
        return integer({self._full(key): self.get(key)}, self._full(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        """As `integer`, for any finite number."""
        return number({self._full(key): self.get(key)}, self._full(key), default)

    def length(self, key: str) -> int:
        """Elements of an array; 0 if it is absent."""
        field = self._fields.get(self._full(key))
        return 0 if field is None else len(field.data)

    def _full(self, key: str) -> str:
        return key.replace("{arch}", self.architecture)


def read_config(
    metadata: Metadata,
    *,
    tensor_names: Any,
    embedding_rows: int,
    checkpoint_dtype: str,
    rope_divisors: tuple[float, ...],
) -> ModelConfig:
    """The configuration in GGUF metadata. Which biases exist, and whether the head is tied, only the tensors tell.

    Raises ModelError: `unsupported_architecture`, `unsupported_rope` or `bad_config`.
    """
    architecture = metadata.architecture
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            "unsupported_architecture",
            f"GGUF architecture {architecture!r} is not supported (supported: {', '.join(_ARCHITECTURES)})",
        )
    if metadata.integer("{arch}.expert_count", 0):
        raise ModelError(
            "unsupported_architecture", f"GGUF architecture {architecture!r} with experts is not supported"
        )
    if metadata.integer("split.count", 1) > 1:
        raise ModelError("unsupported_format", "a GGUF split over several files is not supported: merge it first")
    hidden_size, num_heads = (
        metadata.integer("{arch}.embedding_length"),
        metadata.integer("{arch}.attention.head_count"),
    )
    head_dim = metadata.integer("{arch}.attention.key_length", hidden_size // max(num_heads, 1))
    if (value_dim := metadata.integer("{arch}.attention.value_length", head_dim)) != head_dim:
        raise ModelError("bad_config", f"value heads of {value_dim} beside key heads of {head_dim} are not supported")
    rope = _read_rope(metadata, head_dim, rope_divisors)
    max_context = rope.max_context(metadata.integer("{arch}.context_length"))
    if window := metadata.integer("{arch}.attention.sliding_window", 0):
        max_context = clamp_context(max_context, window)
    return ModelConfig(
        architecture=_ARCHITECTURES[architecture],
        vocab_size=embedding_rows or metadata.integer("{arch}.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=metadata.integer("{arch}.feed_forward_length"),
        num_layers=metadata.integer("{arch}.block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer("{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=metadata.number("{arch}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        max_context=max_context,
        tie_word_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm=architecture == "qwen3",
        eos_token_ids=union_ids(
            *(metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")),
        ),
        checkpoint_dtype=checkpoint_dtype,
    )


def _read_rope(metadata: Metadata, head_dim: int, divisors: tuple[float, ...]) -> RopeSpec:
    theta = metadata.number("{arch}.rope.freq_base", 10_000.0)
    rotary_dim = metadata.integer("{arch}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim and metadata.architecture == "llama":
        # Its interleaving runs over the whole head, so a part of it has no meaning that readers agree on.
        raise ModelError(
            "unsupported_rope", f"GGUF llama with partial RoPE ({rotary_dim} of {head_dim}) is not supported"
        )
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError("bad_config", f"RoPE must rotate an even part of the head: {rotary_dim} of {head_dim}")
    if divisors and len(divisors) != rotary_dim // 2:
        raise ModelError("wrong_shape", f"{_ROPE_DIVISORS} has {len(divisors)} values, RoPE wants {rotary_dim // 2}")
    kind = metadata.get("{arch}.rope.scaling.type") or "none"
    if kind == "none":
        return RopeSpec("default", theta, rotary_dim, divisors=divisors)
    factor = metadata.number("{arch}.rope.scaling.factor")
    if kind == "linear":
        return RopeSpec("linear", theta, rotary_dim, factor=factor, divisors=divisors)
    if kind == "yarn":
        original = metadata.integer("{arch}.rope.scaling.original_context_length")
        attention = metadata.number("{arch}.rope.scaling.attn_factor", 1.0) * yarn_mscale(factor)
        return RopeSpec(
            "yarn",
            theta,
            rotary_dim,
            factor=factor,
            original_max_positions=original,
            beta_fast=metadata.number("{arch}.rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=metadata.number("{arch}.rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention,
            divisors=divisors,
        )
    raise ModelError("unsupported_rope", f"GGUF RoPE scaling {kind!r} is not supported (known: none, linear, yarn)")


def huggingface_name(name: str) -> str:
    """The canonical name of a GGUF tensor; one that has none keeps its own and is reported as unexpected later."""
    if name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_BLOCKS:
        return name
    return f"layers.{match[1]}.{_IN_BLOCKS[match[2]]}.{match[3]}"


def halves_first(tensor: Tensor, heads: int) -> Tensor:
    """Undo the llama converters' row order: pairs (i, i + D/2) of a head stored side by side → first half, second half.

    tensor [heads * D, …] → the same shape.
    """
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
