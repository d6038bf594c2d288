"""Ranks as processes: how they start, refuse, are lost and end. Whatever happens to one of them happens to all."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import Command, free_port, running_command, wait_until
from safetensors.torch import load_file, save_file

from runner.config import RunnerConfig
from runner.errors import StartError
from runner.parallel.place import Place, place_from_environment
from runner.parallel.watch import EXIT_RANK_LOST
from tests.runner.kit import new, step, tokens_of
from tests.runner.link_kit import Scheduler
from tests.runner.parallel_kit import running_ranks, small_config

TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


def ranks_of(pid: int) -> list[psutil.Process]:
    """Live rank processes below a process, by rank."""
    found = [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in found if "runner.parallel.worker" in child.cmdline()]


def flags(checkpoint: Path, **changes: Any) -> list[str]:
    values = {
        "model": checkpoint,
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "num_threads": 1,
        "num_blocks_override": 64,
        "rank_timeout_s": 2,
        **changes,
    }
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def runner(checkpoint: Path, runtime_dir: Path) -> Iterator[Command]:
    """A runner of two ranks that is ready, in the runtime directory."""
    with running_command("runner", "--runtime-dir", str(runtime_dir), *flags(checkpoint)) as command:
        command.wait_for_log("ready at")
        yield command


def test_ranks_end_with_the_executor_and_meet_on_the_loopback_interface_only(checkpoint: Path) -> None:
    with running_ranks(small_config(checkpoint, tensor_parallel_size=2)):
        (rank,) = ranks_of(os.getpid())
        addresses = {one.laddr.ip for one in rank.net_connections("inet")}
    assert addresses == {"127.0.0.1"}
    assert ranks_of(os.getpid()) == []


def test_a_model_that_cannot_be_split_is_refused_and_the_ranks_end(checkpoint: Path) -> None:
    with (
        pytest.raises(StartError, match="4 query heads can't be split over tensor_parallel_size 3"),
        running_ranks(small_config(checkpoint, tensor_parallel_size=3)),
    ):
        pass
    wait_until(lambda: not ranks_of(os.getpid()), 60, "the ranks' end")


def test_a_pool_that_holds_no_request_is_refused_with_the_numbers_of_a_rank(checkpoint: Path) -> None:
    config = small_config(checkpoint, tensor_parallel_size=2, num_blocks_override=0, kv_cache_memory_bytes=4096)
    numbers = r"rank \d: the KV pool holds 28 tokens \(7 blocks of 4, 512 bytes each; from kv_cache_memory_bytes\)"
    with pytest.raises(StartError, match=numbers), running_ranks(config):
        pass


def test_a_model_that_computes_no_numbers_ends_all_ranks_at_the_start(
    tmp_path: Path, tiny_model: Callable[..., Any], runtime_dir: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with running_command("runner", "--runtime-dir", str(runtime_dir), *flags(tmp_path)) as command:
        assert command.wait(60) != 0
        assert "not finite" in command.log()
        command.assert_no_orphans()


def test_sigterm_ends_all_ranks_in_order_and_leaves_nothing(runner: Command, runtime_dir: Path) -> None:
    assert runner.stop() == 0, runner.log()
    assert "is lost" not in runner.log()
    runner.assert_no_orphans()
    assert list(runtime_dir.iterdir()) == []


def test_ctrl_c_reaches_all_ranks_and_ends_them_in_order(runner: Command) -> None:
    for rank in ranks_of(runner.pid):
        rank.send_signal(signal.SIGINT)
    assert runner.stop(signal.SIGINT) == 0, runner.log()
    runner.assert_no_orphans()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_is_lost_while_nothing_runs_ends_the_runner(runner: Command, signum: signal.Signals) -> None:
    (rank,) = ranks_of(runner.pid)
    rank.send_signal(signum)
    assert runner.wait() == EXIT_RANK_LOST, runner.log()
    assert "a rank is lost" in runner.log()
    runner.assert_no_orphans()


def test_a_rank_that_dies_while_it_loads_ends_the_runner(checkpoint: Path, runtime_dir: Path) -> None:
    with running_command("runner", "--runtime-dir", str(runtime_dir), *flags(checkpoint)) as runner:
        (rank,) = wait_until(lambda: ranks_of(runner.pid), 60, "a rank")
        rank.kill()
        assert runner.wait() == EXIT_RANK_LOST, runner.log()
        runner.assert_no_orphans()


def test_a_rank_that_is_killed_between_steps_ends_the_runner_at_the_next_step(
    runner: Command, runtime_dir: Path
) -> None:
    scheduler = Scheduler(f"ipc://{runtime_dir}/runner.sock")
    epoch = scheduler.welcome().epoch
    scheduler.channel.send(step(1, {1: 3}, epoch=epoch, arrivals=[new(1, [1, 2, 3], [1])]))
    assert tokens_of(scheduler.result()).keys() == {1}
    (rank,) = ranks_of(runner.pid)
    rank.kill()
    scheduler.channel.send(step(2, {1: 1}, epoch=epoch))
    assert runner.wait() == EXIT_RANK_LOST, runner.log()
    scheduler.close()


def test_processes_that_torchrun_starts_are_the_ranks_of_one_runner(checkpoint: Path, runtime_dir: Path) -> None:
    environment = {**TORCHRUN, "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    words = ("runner", "--runtime-dir", str(runtime_dir), *flags(checkpoint))
    with (
        running_command(*words, env={**environment, "RANK": "1", "LOCAL_RANK": "1"}) as other,
        running_command(*words, env={**environment, "RANK": "0", "LOCAL_RANK": "0"}) as first,
    ):
        first.wait_for_log("ready at")
        scheduler = Scheduler(f"ipc://{runtime_dir}/runner.sock")
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(step(1, {1: 3}, epoch=epoch, arrivals=[new(1, [1, 2, 3], [1])]))
        assert tokens_of(scheduler.result()).keys() == {1}
        scheduler.close()
        assert first.stop() == 0, first.log()
        assert other.wait() == 0, other.log()


def test_torchrun_starts_a_runner_and_all_of_it_again_when_a_rank_dies_and_ends_it(
    checkpoint: Path, runtime_dir: Path
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    torchrun += ["--master-port", str(free_port())]
    words = [*torchrun, "-m", "ops.cli", "runner", "--runtime-dir", str(runtime_dir), *flags(checkpoint)]
    log_path = runtime_dir / "log"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with log_path.open("wb") as log:
        process = psutil.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: "ready at" in log_path.read_text(), 60, "a runner that is ready")
        first = {rank.pid: rank for rank in process.children()}
        other = max(first.values(), key=lambda rank: int(rank.environ()["RANK"]))
        other.kill()
        wait_until(lambda: log_path.read_text().count("ready at") == 2, 60, "the runner to be ready again")
        ranks = process.children()
        assert not first.keys() & {rank.pid for rank in ranks}
        scheduler = Scheduler(f"ipc://{runtime_dir}/runner.sock")
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(step(1, {1: 3}, epoch=epoch, arrivals=[new(1, [1, 2, 3], [1])]))
        assert tokens_of(scheduler.result()).keys() == {1}
        scheduler.close()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not any(rank.is_running() for rank in ranks), 60, "the ranks' end")
        assert log_path.read_text().count("is lost") <= 1, "the end was no loss"
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log_path.read_text()}") from None
    finally:
        for one in [process, *process.children()] if process.is_running() else []:
            one.kill()
        process.wait()


def test_more_or_fewer_processes_than_ranks_are_refused_with_both_numbers(checkpoint: Path) -> None:
    config = small_config(checkpoint, tensor_parallel_size=4)
    with pytest.raises(StartError, match=r"2 processes .* tensor_parallel_size is 4"):
        place_from_environment(config, TORCHRUN)
    with pytest.raises(StartError, match="RANK"):
        place_from_environment(config, {**TORCHRUN, "RANK": "first"})


def test_a_process_alone_is_no_rank(checkpoint: Path) -> None:
    config = small_config(checkpoint)
    assert place_from_environment(config, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert place_from_environment(config, {"RANK": "1"}) is None
    two = small_config(checkpoint, tensor_parallel_size=2)
    assert place_from_environment(two, {**TORCHRUN, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}) == Place(1, 2, 3, 4)


def test_the_simulated_runner_has_one_rank() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        RunnerConfig(backend="sim", tensor_parallel_size=2)
