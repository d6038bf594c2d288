"""How the ranks of a runner come to be: started here as processes, started by `torchrun`, or placed by Ray.

Wherever they run, the first rank is the process that the scheduler knows.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # C++ classes without stubs
from torch.distributed.rendezvous import rendezvous

from runner.config import RunnerConfig
from runner.errors import StartError
from runner.executor import Executor
from runner.parallel.executor import Others, ParallelExecutor, follow, lead
from runner.parallel.group import Group
from runner.parallel.place import Place, place_from_environment
from runner.parallel.team import AgreedStartError, Ranks, Team

log = logging.getLogger("triptych.runner")

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""How long ranks on other hosts may take to appear."""


class Started(Others, Protocol):
    """The other ranks, and how the first one meets them."""

    place: Place
    store: Store


class StartedTogether:
    """Ranks of which somebody else takes care, `torchrun` for one."""

    def __init__(self, place: Place) -> None:
        self.place = place
        try:
            store, _, _ = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
        except (RuntimeError, ValueError) as error:
            raise StartError(f"rank {place.rank} can't meet the others: {error}") from error
        # A torchrun that starts ranks again may keep the store, and in it the addresses of those that died.
        self.store: Store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def expect_end(self) -> None:
        pass

    def wait_ended(self) -> None:
        pass


def start_ranks(config: RunnerConfig) -> ParallelExecutor:
    """The first rank's executor, with all others loaded and waiting. StartError if they don't come to that."""
    others = _others(config)
    group = Group(others.place, others.store, rank_device(config, others.place), config.rank_timeout_s)
    try:
        executor = _load(rank_config(config, others.place), Ranks(group))
    except StartError as error:
        others.expect_end()
        if isinstance(error, AgreedStartError):
            group.close()
        raise
    return lead(executor, group, others)


def _others(config: RunnerConfig) -> Started:
    place = place_from_environment(config)
    if place is not None:
        return StartedTogether(place)
    if config.distributed_executor_backend == "ray":
        from runner.parallel.ray_ranks import RayRanks  # ray is an optional package

        return RayRanks(config)
    from runner.parallel.local import LocalRanks

    return LocalRanks(config)


def run_rank(config: RunnerConfig, place: Place, store: Store) -> int:
    """Be another rank than the first, from loading to the end. Exit code: 0 if told to end, 1 if it could not start."""
    group = Group(place, store, rank_device(config, place), config.rank_timeout_s)
    try:
        executor = _load(rank_config(config, place), Ranks(group))
    except AgreedStartError:
        group.close()
        return 1  # the first rank says why
    except StartError as error:
        log.error("can't start: %s", error)
        os._exit(1)  # the others may be waiting for this rank: they end with it
    follow(executor, group)
    return 0


def _load(config: RunnerConfig, team: Team) -> Executor:
    """One rank's own executor."""
    if config.device == "cuda":
        from runner.cuda.load import load_device_executor

        return load_device_executor(config, team)
    from runner.model_executor import load_executor

    return load_executor(config, team)


def rank_config(config: RunnerConfig, place: Place) -> RunnerConfig:
    """One rank's settings: the ranks of a host share its cores."""
    if config.num_threads:
        return config
    return dataclasses.replace(config, num_threads=max(1, len(os.sched_getaffinity(0)) // place.local_size))


def rank_device(config: RunnerConfig, place: Place) -> torch.device:
    """Where a rank's tensors are: on a GPU of its own, if any. StartError if the host has too few."""
    if config.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise StartError(f"rank {place.rank} is number {place.local_rank} of its host's, which has {count} GPUs")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device
