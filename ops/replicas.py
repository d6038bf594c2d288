"""`triptych serve --data-parallel-size N`: what each of several runners is told beside what all of them are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ops.config import Loaded
from protocol.settings import SettingError
from runner.config import RunnerConfig
from scheduler.config import SchedulerConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


def numbers(loaded: Loaded) -> list[int]:
    """The numbers of the replicas; one alone has none. SettingError for addresses that aren't as many."""
    config = loaded.get("scheduler", SchedulerConfig)
    try:
        count = len(config.runner_addresses)
    except ValueError as error:
        raise SettingError(f"--data-parallel-size: {error}") from error
    return list(range(count)) if count > 1 else [-1]


def settings(loaded: Loaded, number: int, count: int) -> dict[str, Any]:
    """A replica's own settings: its number, its address, and on a CPU its share of threads and memory."""
    if number < 0:
        return {}
    runner = loaded.get("runner", RunnerConfig)
    found: dict[str, Any] = {"data_parallel_rank": number}
    if runner.runner_address:
        found["runner_address"] = loaded.get("scheduler", SchedulerConfig).runner_addresses[number]
    if runner.device == "cpu" and runner.backend == "model":
        found["memory_utilization"] = max(round(runner.memory_utilization / count, 4), 0.01)
        processes = count * runner.tensor_parallel_size
        found["num_threads"] = runner.num_threads or max(len(os.sched_getaffinity(0)) // processes, 1)
    return found


def environment(loaded: Loaded, number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """On CUDA, a replica sees its own GPUs only: as many as it has ranks, behind those of the replicas before it.

    SettingError if the environment names fewer GPUs than that.
    """
    runner = loaded.get("runner", RunnerConfig)
    if number < 0 or runner.device != "cuda" or runner.backend != "model":
        return {}
    size = runner.tensor_parallel_size
    wanted: Sequence[int] = range(number * size, (number + 1) * size)
    if VISIBLE not in environ:
        return {VISIBLE: ",".join(map(str, wanted))}
    visible = [name.strip() for name in environ[VISIBLE].split(",") if name.strip()]
    if len(visible) <= wanted[-1]:
        raise SettingError(
            f"--data-parallel-size: replica {number} would use GPUs {wanted[0]} to {wanted[-1]} of those in {VISIBLE}, "
            f"which names {len(visible)}"
        )
    return {VISIBLE: ",".join(visible[index] for index in wanted)}
