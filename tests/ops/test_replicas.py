"""What `triptych serve --data-parallel-size N` tells each of its processes; nothing of it for N = 1."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

from ops import replicas, serve
from ops.child import Program
from ops.config import Loaded, load
from ops.serve_config import ServeConfig
from protocol.settings import SettingError
from runner.config import RunnerConfig
from scheduler.config import SchedulerConfig
from services.config import ApiConfig

CLASSES = {"serve": ServeConfig, "api": ApiConfig, "scheduler": SchedulerConfig, "runner": RunnerConfig}
FORCED = {"runtime_dir": "/r", "model": "m", "served_model_name": "m", "port": 8000}
PREFIX = "TRIPTYCH_"


def loaded(*flags: str) -> Loaded:
    return load(CLASSES, flags, {}, prog="triptych serve", description="", defaults={"runtime_dir": ""})


def programs(*flags: str, environ: Mapping[str, str] | None = None) -> dict[str, Program]:
    return {one.role: one for one in serve.programs(loaded(*flags), FORCED, environ or {})}


def settings_of(program: Program, *names: str) -> list[str | None]:
    return [program.env.get(PREFIX + name) for name in names]


def test_one_runner_is_told_nothing_of_replicas() -> None:
    found = programs("--device", "cuda")
    assert list(found) == ["runner", "scheduler", "api"]
    runner = found["runner"]
    assert settings_of(runner, "DATA_PARALLEL_RANK", "RUNNER_ADDRESS", "NUM_THREADS") == [None, None, None]
    assert "CUDA_VISIBLE_DEVICES" not in runner.env and runner.group == ""
    config = RunnerConfig(runtime_dir="/r")
    assert (config.address, config.metrics_path) == ("ipc:///r/runner.sock", "/r/runner.metrics.sock")


def test_each_runner_has_its_number_and_the_scheduler_how_many_there_are() -> None:
    found = programs("--data-parallel-size", "3", "--backend", "sim")
    assert list(found) == ["runner-0", "runner-1", "runner-2", "scheduler", "api"]
    assert [settings_of(found[f"runner-{number}"], "DATA_PARALLEL_RANK") for number in range(3)] == [
        ["0"],
        ["1"],
        ["2"],
    ]
    assert {found[f"runner-{number}"].group for number in range(3)} == {"runner"}
    assert settings_of(found["scheduler"], "DATA_PARALLEL_SIZE") == ["3"]
    config = RunnerConfig(runtime_dir="/r", data_parallel_rank=2)
    assert (config.address, config.metrics_path) == ("ipc:///r/runner-2.sock", "/r/runner-2.metrics.sock")
    assert SchedulerConfig(runtime_dir="/r", data_parallel_size=3).runner_addresses[2] == config.address


def test_given_addresses_are_shared_out() -> None:
    found = programs("--runner-address", "tcp://127.0.0.1:7001,tcp://127.0.0.1:7002", "--backend", "sim")
    assert settings_of(found["runner-1"], "RUNNER_ADDRESS") == ["tcp://127.0.0.1:7002"]
    with pytest.raises(SettingError, match="3 replicas .* 2 addresses"):
        programs("--runner-address", "tcp://127.0.0.1:7001,tcp://127.0.0.1:7002", "--data-parallel-size", "3")


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ((), {}, ["0", "1"]),
        (("--tensor-parallel-size", "2"), {}, ["0,1", "2,3"]),
        ((), {"CUDA_VISIBLE_DEVICES": "3,5"}, ["3", "5"]),
        (
            ("--tensor-parallel-size", "2"),
            {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c,GPU-d"},
            ["GPU-a,GPU-b", "GPU-c,GPU-d"],
        ),
    ],
)
def test_each_replica_sees_its_own_gpus(
    flags: Sequence[str], environ: Mapping[str, str], expected: Sequence[str]
) -> None:
    found = programs("--data-parallel-size", "2", "--device", "cuda", *flags, environ=environ)
    assert [found[f"runner-{number}"].env["CUDA_VISIBLE_DEVICES"] for number in (0, 1)] == expected


def test_too_few_gpus_are_an_error_with_the_numbers() -> None:
    with pytest.raises(SettingError, match="replica 1 would use GPUs 2 to 3 .* names 3"):
        programs(
            *("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--device", "cuda"),
            environ={"CUDA_VISIBLE_DEVICES": "0,1,2"},
        )


def test_on_a_cpu_replicas_share_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    found = programs("--data-parallel-size", "2")
    assert settings_of(found["runner-0"], "NUM_THREADS", "MEMORY_UTILIZATION") == ["4", "0.2"]
    assert settings_of(programs("--data-parallel-size", "2", "--num-threads", "3")["runner-0"], "NUM_THREADS") == ["3"]
    split = programs("--data-parallel-size", "2", "--tensor-parallel-size", "3")["runner-1"]
    assert settings_of(split, "NUM_THREADS") == ["1"]


def test_no_two_processes_have_one_metrics_port() -> None:
    flags = ("--metrics-port", "9100", "--data-parallel-size", "3", "--api-processes", "2", "--backend", "sim")
    ports = {role: program.env[PREFIX + "METRICS_PORT"] for role, program in programs(*flags).items()}
    assert ports == {
        "api-1": "9100",
        "scheduler": "9101",
        "runner-0": "9102",
        "api-2": "9103",
        "runner-1": "9104",
        "runner-2": "9105",
    }


def test_replicas_are_numbered_only_where_there_are_several() -> None:
    assert replicas.numbers(loaded()) == [-1] and replicas.numbers(loaded("--data-parallel-size", "2")) == [0, 1]
