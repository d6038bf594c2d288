"""Hugging Face directories: `config.json`, safetensors in one file or in shards with an index. No pickle, ever."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runner.loader.checkpoint import Part, whole
from runner.loader.checks import canonical, ignorable
from runner.model.config import from_huggingface
from runner.model.errors import ModelError
from runner.model.parameters import EMBEDDING, HEAD, abbreviate

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: its file, its name there, and its header."""

    file: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str


class HuggingFaceCheckpoint:
    """A directory whose headers have been read and checked against its index. See `Checkpoint`."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError that names the file (`missing_file`, `damaged_file`, `unsupported_format`) or tensor, or
        what `from_huggingface` raises."""
        self.name = str(directory)
        generation_file = directory / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else None
        self.config = from_huggingface(_read_json(directory / "config.json"), generation)
        self._places = _locate(directory)
        if not self.config.checkpoint_dtype and EMBEDDING in self._places:
            self.config = dataclasses.replace(self.config, checkpoint_dtype=self._places[EMBEDDING].dtype)
        if self.config.tie_word_embeddings and HEAD in self._places:
            self._set_tied_head_aside()
        self.shapes = {name: place.shape for name, place in self._places.items()}
        self.tokenizer_vocab_size = min(tokenizer_size(directory) or self.config.vocab_size, self.config.vocab_size)

    def tensors(self, parts: Mapping[str, Part] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, or its part, once, file by file; whole ones as views of the mapped file."""
        parts = parts or {}
        by_file = sorted(self._places.items(), key=lambda item: item[1].file)
        for file, items in groupby(by_file, key=lambda item: item[1].file):
            with _open(file) as handle:
                for name, place in items:
                    part = parts.get(name)
                    if part is None or part == whole(place.shape):
                        yield name, handle.get_tensor(place.stored_name)
                    else:
                        yield name, handle.get_slice(place.stored_name)[part]

    def _set_tied_head_aside(self) -> None:
        """The configuration says that the embedding is the head; a stored head is a copy, or a mistake to point out."""
        head = self._places.pop(HEAD)
        embedding = self._places.get(EMBEDDING)
        if embedding is None:
            return
        with _open(head.file) as first, _open(embedding.file) as second:
            same = torch.equal(first.get_tensor(head.stored_name), second.get_tensor(embedding.stored_name))
        if not same:
            log.warning(
                "%s holds an %r that differs from the embedding, but config.json ties them: the embedding is used",
                head.file,
                head.stored_name,
            )


def tokenizer_size(directory: Path) -> int | None:
    """Ids that `tokenizer.json` knows (its highest id + 1), or None if there is no such file."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        parsed = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (msgspec.DecodeError, OSError) as error:
        raise ModelError("damaged_file", f"{path}: {error}") from error
    vocab = parsed.model.vocab
    highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return max(highest, *(token.id for token in parsed.added_tokens), -1) + 1


class _AddedToken(msgspec.Struct):
    id: int


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerFile(msgspec.Struct):
    """The two parts of tokenizer.json that hold ids; the rest is skipped while parsing."""

    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError("missing_file", f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ModelError("damaged_file", f"{path} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError("damaged_file", f"{path} must hold a JSON object")
    return content


def _open(file: Path) -> Any:
    """A safetensors handle. Opening checks that the file is as long as its header says."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ModelError("missing_file", f"{file} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise ModelError("damaged_file", f"{file} is damaged or incomplete: {error}") from error


def _locate(directory: Path) -> dict[str, _Place]:
    """Canonical name → place of every tensor that carries weights. With an index, only its files count."""
    index_file = directory / INDEX
    if index_file.exists():
        weight_map = _read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError("damaged_file", f"{index_file} has no weight_map from tensor names to files")
        files = sorted(set(weight_map.values()))
        if outside := [file for file in files if Path(file).name != file]:
            raise ModelError("damaged_file", f"{index_file} names files elsewhere: {abbreviate(outside)}")
    else:
        weight_map, files = None, [_single_file(directory)]

    if lost := [file for file in files if not (directory / file).exists()]:
        raise ModelError("missing_file", f"{directory} lacks {abbreviate(lost)}, which {INDEX} names")
    places: dict[str, _Place] = {}
    for file in files:
        for name, place in _headers(directory / file).items():
            if weight_map is not None and weight_map.get(name, file) != file:
                continue  # A copy that the index gives to another shard.
            if weight_map is not None and name not in weight_map and not ignorable(name):
                raise ModelError("unexpected_tensor", f"{directory / file} holds {name!r}, which {INDEX} does not name")
            if ignorable(name):
                continue
            if canonical(name) in places:
                raise ModelError("duplicate_tensor", f"{directory} holds {canonical(name)!r} twice")
            places[canonical(name)] = place
    if weight_map is not None:
        _check_index(directory, weight_map, places)
    return places


def _check_index(directory: Path, weight_map: dict[str, str], places: dict[str, _Place]) -> None:
    for name, file in weight_map.items():
        if canonical(name) not in places and not ignorable(name):
            raise ModelError("missing_tensor", f"{directory / file} lacks {name!r}, which {INDEX} says it holds")


def _single_file(directory: Path) -> str:
    """The one weights file of a directory without an index."""
    candidates = sorted(path.name for path in directory.glob("*.safetensors"))
    if SINGLE in candidates:
        return SINGLE
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ModelError(
            "missing_file", f"{directory} holds {abbreviate(candidates)} but no {INDEX} that says what counts"
        )
    if pickles := sorted(path.name for path in directory.glob("*.bin")):
        raise ModelError(
            "unsupported_format",
            f"{directory} holds only pickled weights ({abbreviate(pickles)}): convert to safetensors",
        )
    raise ModelError("missing_file", f"{directory} holds no .safetensors file")


def _headers(file: Path) -> dict[str, _Place]:
    """Stored name → place for each tensor of a file, from its header. Raises ModelError for non-float types."""
    found: dict[str, _Place] = {}
    with _open(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
            part = handle.get_slice(name)
            dtype = part.get_dtype()
            if dtype not in _DTYPES and not ignorable(name):
                raise ModelError(
                    "unsupported_format", f"{file}: tensor {name!r} is stored as {dtype}, which is not supported"
                )
            found[name] = _Place(file, name, tuple(part.get_shape()), _DTYPES.get(dtype, ""))
    return found
