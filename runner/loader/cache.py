"""Dequantized weights kept between starts, in a user cache directory. A cache: losing it costs seconds, nothing else.

Entries are keyed by the source file's path, size and modification time and by the rank that they are for, hold fused
parameters as safetensors with the configuration in the header, and appear by atomic rename. One that can't be read is
treated as absent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runner.model.config import ModelConfig
from runner.model.errors import ModelError
from runner.model.parameters import fused_shapes, layout
from runner.model.shard import WHOLE, Shard

log = logging.getLogger(__name__)

# Part of every key: raise it when the layout of parameters or of the configuration changes meaning.
_FORMAT = 1
_MAX_BYTES = 4 << 30
"""Larger models aren't cached: the user's disk is not ours to fill."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """What an entry holds: enough to build the decoder without opening the source."""

    config: ModelConfig
    """Of the whole model, also where the parameters are those of one rank."""
    tokenizer_vocab_size: int
    parameters: dict[str, Tensor]


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/triptych/weights`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "triptych" / "weights"


def entry_path(directory: Path, source: Path, dtype: str, shard: Shard = WHOLE) -> Path:
    """Where the entry for the present state of `source` lies. All its states share the first half of the name."""
    source = source.resolve()
    status = source.stat()
    state = f"{_FORMAT}:{status.st_size}:{status.st_mtime_ns}"
    return directory / f"{_stem(source, dtype, shard)}-{_digest(state)}.safetensors"


def read(path: Path, shard: Shard = WHOLE) -> CachedModel | None:
    """The entry at `path`, its tensors mapped from the file; None if there is none or it is unreadable."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as handle:
            header = (handle.metadata() or {}).get("model", "")
            config, tokenizer_vocab_size = msgspec.json.decode(header, type=tuple[ModelConfig, int])
            parameters = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, msgspec.MsgspecError, ModelError) as error:
        log.warning("ignoring the cached weights in %s: %s", path, error)
        return None
    if {name: tuple(tensor.shape) for name, tensor in parameters.items()} != fused_shapes(layout(config, shard)):
        log.warning("ignoring the cached weights in %s: its tensors are not those of its configuration", path)
        return None
    return CachedModel(config, tokenizer_vocab_size, parameters)


def write(path: Path, model: CachedModel) -> None:
    """Store an entry and drop older states of the same source. A failure is logged: the server runs without it."""
    size = sum(tensor.nbytes for tensor in model.parameters.values())
    if size > _MAX_BYTES:
        log.info("not caching %d bytes of dequantized weights (limit %d)", size, _MAX_BYTES)
        return
    header = msgspec.json.encode((model.config, model.tokenizer_vocab_size)).decode()
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".incomplete-")
        os.close(descriptor)
        save_file(_contiguous(model.parameters), temporary, metadata={"model": header})
        os.replace(temporary, path)
        temporary = None
        for older in path.parent.glob(f"{path.name.rsplit('-', 1)[0]}-*.safetensors"):
            if older != path:
                older.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        log.warning("can't cache the dequantized weights in %s: %s", path.parent, error)
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _contiguous(parameters: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in parameters.items()}


def _stem(source: Path, dtype: str, shard: Shard) -> str:
    part = f":{shard.rank}/{shard.size}" if shard.size > 1 else ""
    return f"{source.stem}-{_digest(f'{source}:{dtype}{part}')}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
