"""From a path to a decoder that is ready to run: open, check everything, then allocate and fill.

Formats live beside this file (`huggingface`, `gguf`); here is only what is the same for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from runner.loader import cache
from runner.loader.checkpoint import Checkpoint
from runner.loader.checks import check_tensors
from runner.loader.gguf import GgufCheckpoint
from runner.loader.huggingface import HuggingFaceCheckpoint
from runner.model.config import ModelConfig
from runner.model.decoder import Decoder, Peers
from runner.model.errors import ModelError
from runner.model.parameters import ParameterSet, layout
from runner.model.shard import WHOLE, Shard
from runner.ops import Ops

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO = "auto"
_DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A decoder with its weights, and what the rest of the runner needs to know about the model."""

    config: ModelConfig
    """Of what is loaded here: with several ranks, this rank's heads and inner width."""
    decoder: Decoder
    dtype: torch.dtype
    tokenizer_vocab_size: int
    """Ids at or beyond this are padding of the head: never sample them, never count them in a normaliser."""
    weight_bytes: int
    """Of the weights, as they were loaded."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence, generation config first."""
        return self.config.eos_token_ids


def load_model(
    path: str | Path,
    dtype: str,
    ops: Ops | Callable[[torch.dtype], Ops],
    *,
    max_model_len: int | None = None,
    device: torch.device | str = "cpu",
    cache_dir: Path | None = None,
    peers: Peers | None = None,
) -> LoadedModel:
    """Load a GGUF file or a Hugging Face directory.

    `dtype`: `auto` (the checkpoint's own; bfloat16 for quantized weights), `bfloat16`, `float32` or `float16`.
    `ops`: the operations to pack weights for and run with, or a function that makes them for the resulting dtype.
    `max_model_len`: longest sequence, in tokens, that will be run; the model's own limit if None. It also fixes the
    frequencies of dynamic NTK RoPE. `cache_dir`: where dequantized GGUF weights stay between starts; None keeps none.
    `peers`: the ranks over which the model is split; only this rank's part is read.
    Raises ModelError, before anything is allocated, for whatever the checkpoint's configuration and headers tell.
    """
    path = Path(path)
    if dtype != AUTO and dtype not in DTYPES:
        raise ModelError("bad_config", f"dtype {dtype!r} is not one of {', '.join((AUTO, *DTYPES))}")
    if not path.exists():
        raise ModelError("missing_file", f"model {path} does not exist")
    is_gguf = path.is_file()
    shard = peers.shard if peers is not None else WHOLE
    entry = cache.entry_path(cache_dir, path, dtype, shard) if is_gguf and cache_dir is not None else None
    cached = cache.read(entry, shard) if entry is not None else None
    source: Checkpoint | cache.CachedModel
    source = cached or (GgufCheckpoint(path) if is_gguf else HuggingFaceCheckpoint(path))
    config, tokenizer_vocab_size = source.config, source.tokenizer_vocab_size
    local = shard.local(config)
    max_positions, compute_dtype = _max_positions(config, max_model_len), _compute_dtype(config, dtype)
    if isinstance(source, cache.CachedModel):
        parameters = {name: tensor.to(device) for name, tensor in source.parameters.items()}
    else:
        parameters = _read(source, shard, compute_dtype, device)
        if entry is not None:
            cache.write(entry, cache.CachedModel(config, tokenizer_vocab_size, parameters))
    weight_bytes = sum(tensor.nbytes for tensor in parameters.values())  # the decoder empties the dict
    decoder = Decoder(local, parameters, ops(compute_dtype) if callable(ops) else ops, max_positions, peers)
    return LoadedModel(local, decoder, compute_dtype, tokenizer_vocab_size, weight_bytes)


def _compute_dtype(config: ModelConfig, asked: str) -> torch.dtype:
    stored = config.checkpoint_dtype
    if asked == AUTO:
        return DTYPES.get(stored, DTYPES[_DEFAULT_DTYPE])
    if asked == "float16" and stored == "bfloat16":
        log.warning(
            "running a bfloat16 model in float16: activations beyond 65504 become infinite. "
            "Prefer bfloat16, or float32 where the device lacks it"
        )
    return DTYPES[asked]


def _max_positions(config: ModelConfig, max_model_len: int | None) -> int:
    if max_model_len is None:
        return config.max_context
    if not 1 <= max_model_len <= config.max_context:
        raise ModelError(
            "bad_config",
            f"max_model_len must be between 1 and the model's {config.max_context} tokens, not {max_model_len}",
        )
    return max_model_len


def _read(
    checkpoint: Checkpoint, shard: Shard, dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """A rank's fused parameters from a checkpoint, each tensor written exactly once."""
    slots = layout(checkpoint.config, shard)
    check_tensors(slots, checkpoint.shapes, checkpoint.name)
    parameters = ParameterSet(slots, dtype, device)
    # `disable=None`: a progress bar on a terminal, nothing in a log file.
    tensors = checkpoint.tensors({name: slot.part for name, slot in slots.items()})
    for name, tensor in tqdm(tensors, "Loading weights", len(slots), disable=None, unit="tensor"):
        parameters.write(name, tensor)
    return parameters.complete()
