"""What a checkpoint of any format offers to the loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from runner.model.config import ModelConfig

Part = tuple[slice, ...]
"""What to take of a tensor: a slice with both ends for each dimension."""


def whole(shape: Sequence[int]) -> Part:
    """The part that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


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

    def tensors(self, parts: Mapping[str, Part] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, on the CPU, in its own dtype. May alias the file: copy before keeping.

        Of a tensor that `parts` names, only that part is read and yielded.
        """
        ...
