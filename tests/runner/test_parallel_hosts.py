"""Ranks on two hosts: two network namespaces with a cable between them, each with a `torchrun` of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import MARK_ENV, ROOT, wait_until

from protocol.security import LinkSecurity, write_keys
from tests.runner.kit import new, step, tokens_of
from tests.runner.link_kit import Scheduler

FIRST, SECOND = "10.213.77.1", "10.213.77.2"
"""The ends of the cable between the hosts."""
OUTSIDE, SERVED = "10.213.78.1", "10.213.78.2"
"""The ends of the cable over which the scheduler, which is outside, reaches the first one."""
PORT = "29511"


@dataclass
class Hosts:
    """Two namespaces. Commands in them are killed at the end, with all that they started."""

    names: tuple[str, str]
    directory: Path
    mark: str

    def start(self, host: int, *words: str) -> psutil.Popen:
        """`python …` on a host, its output in `log(host)`."""
        with self.log_path(host).open("wb") as log:
            return psutil.Popen(
                ["ip", "netns", "exec", self.names[host], sys.executable, *words],
                cwd=ROOT,
                env={**os.environ, MARK_ENV: self.mark, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"},
                stdout=log,
                stderr=log,
            )

    def log_path(self, host: int) -> Path:
        return self.directory / f"log-{host}"

    def log(self, host: int) -> str:
        """What the host's command has printed."""
        return self.log_path(host).read_text("utf-8", "replace")

    def pull_the_cable(self) -> None:
        """The hosts hear nothing of each other any more, and no connection is closed."""
        ip("-n", self.names[0], "link", "set", "cable", "down")

    def alive(self) -> list[psutil.Process]:
        """Processes that a command has started and that run still."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK_ENV) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(runtime_dir: Path) -> Iterator[Hosts]:
    names = (f"tt{os.getpid()}a", f"tt{os.getpid()}b")
    outside = f"tt{os.getpid()}"
    made = Hosts(names, runtime_dir, outside)
    try:
        if shutil.which("ip") is None:
            pytest.skip("there is no `ip` command to make network namespaces with")
        try:
            for name in names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            ip("link", "add", outside, "type", "veth", "peer", "name", "served", "netns", names[0])
            for name, device, address in (
                (names[0], "cable", FIRST),
                (names[1], "cable", SECOND),
                (names[0], "served", SERVED),
            ):
                ip("-n", name, "address", "add", f"{address}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
            ip("address", "add", f"{OUTSIDE}/24", "dev", outside)
            ip("link", "set", outside, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
        yield made
    finally:
        for process in made.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for words in (("link", "delete", outside), *(("netns", "delete", name) for name in names)):
            subprocess.run(["ip", *words], check=False, capture_output=True)


def start_both(hosts: Hosts, tmp_path: Path, tiny_model: Callable[..., Any]) -> str:
    """A runner with one rank on each host; where it serves."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    address = f"tcp://{SERVED}:5777"
    model = ("--model", str(tmp_path / "model"), "--dtype", "float32", "--num-blocks-override", "64")
    ranks = ("--tensor-parallel-size", "2", "--rank-timeout-s", "2", "--num-threads", "1")
    for host in (0, 1):
        where = ("--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "1")
        torchrun = ("-m", "torch.distributed.run", *where, "--master-addr", FIRST, "--master-port", PORT)
        link = ("--runtime-dir", str(hosts.directory / f"run-{host}"), "--runner-address", address)
        keys = ("--curve-key-file", str(hosts.directory / "key"))
        hosts.start(host, *torchrun, "-m", "ops.cli", "runner", *model, *ranks, *link, *keys)
    wait_until(lambda: "ready at" in hosts.log(0) or not hosts.alive(), 90, "a runner that is ready")
    return address


def test_ranks_on_two_hosts_serve_a_scheduler_over_tcp_and_end_when_the_cable_is_pulled(
    hosts: Hosts, tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    write_keys(str(hosts.directory / "key"))
    address = start_both(hosts, tmp_path, tiny_model)
    assert "ready at" in hosts.log(0), hosts.log(0) + hosts.log(1)
    scheduler = Scheduler(address, security=LinkSecurity.of(str(hosts.directory / "key"), False))
    try:
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(step(1, {1: 3}, epoch=epoch, arrivals=[new(1, [1, 2, 3], [1])]))
        assert tokens_of(scheduler.result()).keys() == {1}
        hosts.pull_the_cable()
        wait_until(lambda: "a rank is lost" in hosts.log(0), 60, "the first rank to notice")
        wait_until(lambda: "a rank is lost" in hosts.log(1), 60, "the second rank to notice")
    finally:
        scheduler.close()
