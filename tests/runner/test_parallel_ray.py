"""Ranks that Ray places: the same runner, started by actors. Skipped where the optional `ray` package is missing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import running_command, wait_until

from tests.runner.kit import new, step, tokens_of
from tests.runner.link_kit import Scheduler

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed (pip install 'triptych[ray]')")
needs_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="Ray gives each of two ranks a core of its own")


def flags(checkpoint: Path, runtime_dir: Path) -> list[str]:
    where = ["--model", str(checkpoint), "--runtime-dir", str(runtime_dir), "--dtype", "float32"]
    ranks = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--num-threads", "1"]
    return [*where, *ranks, "--num-blocks-override", "64"]


@needs_ray
@needs_cores
def test_ranks_that_ray_places_serve_are_missed_when_lost_and_end_with_the_runner(
    tmp_path: Path, runtime_dir: Path, tiny_model: Callable[..., Any]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    environment = {"RAY_TMPDIR": str(runtime_dir), "OMP_NUM_THREADS": "1"}
    with running_command("runner", *flags(tmp_path / "model", runtime_dir / "run"), env=environment) as runner:
        runner.wait_for_log("ready at", 120)
        scheduler = Scheduler(f"ipc://{runtime_dir}/run/runner.sock")
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(step(1, {1: 3}, epoch=epoch, arrivals=[new(1, [1, 2, 3], [1])]))
        assert tokens_of(scheduler.result()).keys() == {1}
        (rank,) = (one for one in runner.orphans() if "runner.parallel.worker" in one.cmdline())
        assert rank.parent() not in [psutil.Process(runner.pid), None]
        rank.kill()
        assert runner.wait(60) != 0 and "a rank is lost" in runner.log()
        scheduler.close()
        wait_until(lambda: not runner.orphans(), 60, "the end of all that Ray started")


@needs_ray
@needs_cores
def test_a_stop_ends_the_ranks_that_ray_placed_in_order(
    tmp_path: Path, runtime_dir: Path, tiny_model: Callable[..., Any]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    environment = {"RAY_TMPDIR": str(runtime_dir), "OMP_NUM_THREADS": "1"}
    with running_command("runner", *flags(tmp_path / "model", runtime_dir / "run"), env=environment) as runner:
        runner.wait_for_log("ready at", 120)
        assert runner.stop(deadline_s=60) == 0, runner.log()
        assert "is lost" not in runner.log()
        wait_until(lambda: not runner.orphans(), 60, "the end of all that Ray started")


def test_without_ray_the_runner_says_what_to_install(
    tmp_path: Path, runtime_dir: Path, tiny_model: Callable[..., Any]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "ray.py").write_text("raise ImportError(\"No module named 'ray'\")\n")
    environment = {"PYTHONPATH": str(missing)}
    with running_command("runner", *flags(tmp_path / "model", runtime_dir / "run"), env=environment) as runner:
        assert runner.wait(60) == 1
        assert "No module named 'ray'; pip install 'triptych[ray]'" in runner.log()
