"""Which rank this process is, as far as the environment tells. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from runner.config import RunnerConfig
from runner.errors import StartError

_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands: its number among all ranks, and among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def place_from_environment(config: RunnerConfig, environ: Mapping[str, str] = os.environ) -> Place | None:
    """Where `torchrun`, or whoever sets the same variables, has put this process; None if nobody has.

    StartError if the number of processes is not the configured number of ranks, or the variables are no numbers.
    """
    if not environ.keys() >= _VARIABLES:
        return None
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank, local_size = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError as error:
        raise StartError(f"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: {error}") from None
    if size != config.tensor_parallel_size:
        raise StartError(
            f"{size} processes were started together (WORLD_SIZE), but tensor_parallel_size is "
            f"{config.tensor_parallel_size}"
        )
    return Place(rank, size, local_rank, local_size) if size > 1 else None
