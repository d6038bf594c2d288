"""What a checkpoint of any format offers to the loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

from runner.model.config import ModelConfig


class Checkpoint(Protocol):
    """An opened checkpoint: its headers have been read and its files are known to be whole; data comes by `tensors`."""

    @property
    def name(self) -> str:
        """For messages: the file or directory."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer_vocab_size(self) -> int:
        """Ids the tokenizer knows; at most `config.vocab_size`."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Canonical name → shape of every tensor that `tensors` will yield."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, on the CPU, in its own dtype. May alias the file: copy before keeping."""
        ...
