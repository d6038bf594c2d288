"""Which part of a model one rank of a tensor-parallel runner holds. Arithmetic over a `ModelConfig`, no tensors.

Attention is split by heads, the feed-forward by its inner width, the head by rows of the vocabulary. The embedding and
the norms are whole on every rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from runner.model.config import ModelConfig
from runner.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. Spans are (first, end) of what it holds."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise ModelError `cant_split`, with the numbers, if this model can't be cut into `size` equal parts."""
        for what, count in (
            ("query heads", config.num_heads),
            ("intermediate_size", config.intermediate_size),
        ):
            if count % self.size:
                raise ModelError(
                    "cant_split",
                    f"{count} {what} can't be split over tensor_parallel_size {self.size}: {_divisors(config)}",
                )
        if config.num_kv_heads % self.size and self.size % config.num_kv_heads:
            raise ModelError(
                "cant_split",
                f"{config.num_kv_heads} key/value heads can be neither split nor repeated evenly over "
                f"tensor_parallel_size {self.size}: {_divisors(config)}",
            )
        if config.vocab_size < self.size:
            raise ModelError("cant_split", f"{config.vocab_size} token ids are fewer than {self.size} ranks")

    def heads(self, config: ModelConfig) -> tuple[int, int]:
        """Query heads."""
        return self._even(config.num_heads)

    def kv_heads(self, config: ModelConfig) -> tuple[int, int]:
        """Key/value heads; with fewer of them than ranks, several ranks hold the same one."""
        first = self.rank * config.num_kv_heads // self.size
        return first, first + max(1, config.num_kv_heads // self.size)

    def inner(self, config: ModelConfig) -> tuple[int, int]:
        """Columns of the feed-forward's inside."""
        return self._even(config.intermediate_size)

    def vocab(self, config: ModelConfig) -> tuple[int, int]:
        """Rows of the head. Parts differ by one row where the vocabulary can't be divided."""
        return self.rank * config.vocab_size // self.size, (self.rank + 1) * config.vocab_size // self.size

    def vocab_widths(self, config: ModelConfig) -> list[int]:
        """How many rows of the head each rank holds."""
        spans = [Shard(rank, self.size).vocab(config) for rank in range(self.size)]
        return [end - first for first, end in spans]

    def local(self, config: ModelConfig) -> ModelConfig:
        """The configuration of what this rank computes: its heads and its inner width. Raises as `check`."""
        if self.size == 1:
            return config
        self.check(config)
        first, end = self.kv_heads(config)
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=end - first,
            intermediate_size=config.intermediate_size // self.size,
        )

    def _even(self, count: int) -> tuple[int, int]:
        share = count // self.size
        return self.rank * share, (self.rank + 1) * share


WHOLE = Shard()


def _divisors(config: ModelConfig) -> str:
    """Which sizes would do, in words."""
    found = [size for size in range(2, config.num_heads + 1) if _splits(config, size)]
    return f"this model takes {', '.join(map(str, [1, *found]))}"


def _splits(config: ModelConfig, size: int) -> bool:
    kv = config.num_kv_heads
    even = not (config.num_heads % size or config.intermediate_size % size)
    return even and not (kv % size and size % kv) and config.vocab_size >= size
