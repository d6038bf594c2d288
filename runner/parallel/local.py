"""The other ranks as child processes on this machine. They meet the first one over the loopback interface only.

The rendezvous is an anonymous file in memory that only this process and its children can open: nothing is left behind
and nobody else can join, whichever way they end.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # C++ classes without stubs

from protocol.settings import ENV_PREFIX
from runner.config import RunnerConfig
from runner.parallel.assignment import Assignment, encode
from runner.parallel.place import Place
from runner.parallel.watch import rank_lost

log = logging.getLogger("triptych.runner")

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
END_GRACE_S = 5.0
PACKAGES = str(Path(__file__).resolve().parents[2])


class LocalRanks:
    """Ranks 1 … of `config`, started at construction. `lost` is called when one ends before `expect_end`."""

    def __init__(self, config: RunnerConfig, lost: Callable[[str], None] = rank_lost) -> None:
        size = config.tensor_parallel_size
        self.place = Place(0, size, 0, size)
        os.environ.update(LOOPBACK)
        memory = os.memfd_create("triptych-ranks")
        self.store: Store = FileStore(f"/proc/self/fd/{memory}", size)
        self._lost = lost
        self._ending = False
        self.processes = [
            start_worker(Assignment(config, Place(rank, size, rank, size), os.getpid(), store_fd=memory), memory)
            for rank in range(1, size)
        ]
        threading.Thread(target=self._watch, name="rank-exits", daemon=True).start()

    def expect_end(self) -> None:
        """From now on it is no loss when a rank ends."""
        self._ending = True

    def wait_ended(self) -> None:
        """Wait until all have ended; those that don't are killed."""
        for process in self.processes:
            try:
                process.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                log.warning("a rank (pid %d) did not end, killing it", process.pid)
                process.kill()
                process.wait()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes, 1):
                selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
            for key, _ in selector.select():
                if not self._ending:
                    self._lost(f"the process of rank {key.data} has ended")
                    return


def start_worker(assignment: Assignment, *descriptors: int) -> subprocess.Popen[bytes]:
    """A process that is told on its standard input which rank it is. Its settings come from nowhere else."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (PACKAGES, environment.get("PYTHONPATH", ""))))
    process = subprocess.Popen(
        [sys.executable, "-m", "runner.parallel.worker"],
        env=environment,
        stdin=subprocess.PIPE,
        pass_fds=descriptors,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(encode(assignment))
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already, which whoever watches it will see
    return process
