"""Ranks for tests: as threads of the test, which meet in memory, or as the real processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from protocol.messages import Step, StepResult
from runner.config import RunnerConfig
from runner.model.shard import Shard
from runner.parallel.executor import ParallelExecutor
from runner.parallel.place import Place
from runner.parallel.start import start_ranks

T = TypeVar("T")
MEETING_S = 30.0


class ThreadGroup:
    """What a `Group` is to one rank, where every rank is a thread of this process."""

    def __init__(self, place: Place, barrier: threading.Barrier, held: list[Any]) -> None:
        self.place = place
        self.shard = Shard(place.rank, place.size)
        self.device = torch.device("cpu")
        self.is_first = place.rank == 0
        self._barrier = barrier
        self._held = held

    def sum(self, part: Tensor) -> Tensor:
        """In the order of the ranks."""
        parts = self._exchange(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Everything, on the first rank."""
        parts = self._exchange(part)
        if not self.is_first:
            return part
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], 1)

    def share(self, values: Tensor) -> Tensor:
        """The first rank's."""
        (first, *_) = self._exchange(values.clone())
        return values.copy_(first)

    def broadcast(self, payload: bytes = b"") -> bytes:
        """The first rank's."""
        return self._exchange(payload)[0]

    def exchange(self, payload: bytes) -> list[bytes]:
        """Everybody's."""
        return self._exchange(payload)

    def lose(self, what: str) -> None:
        """Nobody waits for this rank any longer."""
        self._barrier.abort()

    def close(self) -> None:
        """As all ranks do together."""
        self._exchange(None)

    def _exchange(self, one: Any) -> list[Any]:
        self._held[self.place.rank] = one
        self._barrier.wait(MEETING_S)
        everybody = list(self._held)
        self._barrier.wait(MEETING_S)
        return everybody


def on_all_ranks(size: int, run: Callable[[Any], T]) -> list[T]:
    """What `run` returns, given its ThreadGroup, on each rank."""
    barrier = threading.Barrier(size)
    held: list[Any] = [None] * size

    def one(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return run(ThreadGroup(Place(rank, size, rank, size), barrier, held))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


class Nobody:
    """No processes to wait for."""

    def expect_end(self) -> None:
        """Nobody will."""

    def wait_ended(self) -> None:
        """They have."""


def small_config(model: Path, **changes: Any) -> RunnerConfig:
    """Settings for a tiny model in float32."""
    values: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "num_threads": 1,
        "rank_timeout_s": 60.0,  # the first rank is the test's own process, which must not end for want of a core
        "block_size": 4,
        "num_blocks_override": 64,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "swap_space_bytes": 1 << 20,
    }
    return RunnerConfig(**{**values, **changes})


class Running:
    """A parallel executor whose other ranks are processes."""

    def __init__(self, executor: ParallelExecutor) -> None:
        self.executor = executor

    def run(self, step: Step) -> StepResult:
        """Execute one step."""
        return self.executor.execute(step, 0)


@contextlib.contextmanager
def running_ranks(config: RunnerConfig) -> Iterator[Running]:
    """Real ranks on this machine, ended at the end."""
    executor = start_ranks(config)
    try:
        yield Running(executor)
    finally:
        executor.close()
