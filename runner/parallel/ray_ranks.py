"""The other ranks where Ray places them. Ray decides on hosts and GPUs, and carries the assignments; nothing else.

Each rank is the same process as everywhere, started by an actor that holds its resources. Every host of the cluster
needs this installation at the same path, and the model at the path that the settings name.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # C++ classes without stubs

from runner.config import RunnerConfig
from runner.errors import StartError
from runner.parallel.assignment import Assignment, decode, encode
from runner.parallel.local import END_GRACE_S, PACKAGES, start_worker
from runner.parallel.place import Place
from runner.parallel.watch import rank_lost

log = logging.getLogger("triptych.runner")

PLACEMENT_TIMEOUT_S = 300.0


class RankActor:
    """Holds one rank's resources, and runs its process (the first rank's actor only holds)."""

    def where(self) -> tuple[str, str]:
        """The node, and which of its GPUs this actor holds (empty: none)."""
        import ray

        gpus = ray.get_gpu_ids()
        return ray.get_runtime_context().get_node_id(), str(gpus[0]) if gpus else ""

    def run(self, assignment: bytes) -> int:
        """Run a rank until it ends; its exit code."""
        told = decode(assignment)
        here = Assignment(told.config, told.place, os.getpid(), store_host=told.store_host, store_port=told.store_port)
        return start_worker(here).wait()


class RayRanks:
    """Ranks 1 … of `config`, placed and started at construction; this process is rank 0, and Ray keeps its resources
    on this host for it. StartError if Ray is not there or has no room."""

    def __init__(self, config: RunnerConfig, lost: Callable[[str], None] = rank_lost) -> None:
        self._ray = ray = _connect()
        self._lost = lost
        self._ending = False
        size = config.tensor_parallel_size
        self._bundles = _reserve(ray, size, "GPU" if config.device == "cuda" else "CPU")
        actors = [self._actor(config, index) for index in range(size)]
        self._actors = actors
        try:
            found = ray.get([actor.where.remote() for actor in actors])
        except ray.exceptions.RayError as error:
            raise StartError(f"Ray can't start the ranks: {error}") from error
        nodes = [node for node, _ in found]
        host = ray.util.get_node_ip_address()
        self.store: Store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        per_node = Counter(nodes)
        self.place = Place(0, size, int(found[0][1] or 0), per_node[nodes[0]])
        self._runs = []
        for rank in range(1, size):
            # An actor sees its own GPU only, so that is number 0 there.
            place = Place(rank, size, 0, per_node[nodes[rank]])
            told = Assignment(config, place, 0, store_host=host, store_port=self.store.port)
            self._runs.append(actors[rank].run.remote(encode(told)))
        log.info("Ray has placed %d ranks on %d hosts", size, len(per_node))
        threading.Thread(target=self._watch, name="rank-exits", daemon=True).start()

    def expect_end(self) -> None:
        """From now on it is no loss when a rank ends."""
        self._ending = True

    def wait_ended(self) -> None:
        """Wait until the ranks have ended, and give their resources back."""
        self._ray.wait(self._runs, num_returns=len(self._runs), timeout=END_GRACE_S)
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._bundles)
        self._ray.shutdown()

    def _actor(self, config: RunnerConfig, index: int) -> Any:
        strategies = self._ray.util.scheduling_strategies
        where = strategies.PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=index)
        gpus = 1 if config.device == "cuda" else 0
        actor_class = self._ray.remote(num_cpus=1 - gpus, num_gpus=gpus, scheduling_strategy=where)(RankActor)
        return actor_class.remote()

    def _watch(self) -> None:
        ended, _ = self._ray.wait(self._runs, num_returns=1)
        if ended and not self._ending:
            self._lost("the process of a rank that Ray placed has ended")


def _connect() -> Any:
    """Ray, connected to the cluster at RAY_ADDRESS or else to one on this host."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise StartError(f"distributed_executor_backend ray: {error}; pip install 'triptych[ray]'") from error
    signals = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(signum) for signum in signals]
    try:
        ray.init(
            runtime_env={"env_vars": {"PYTHONPATH": PACKAGES}}, logging_level=logging.WARNING, include_dashboard=False
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartError(f"distributed_executor_backend ray: {error}") from error
    finally:
        for signum, handler in zip(signals, handlers, strict=True):
            signal.signal(signum, handler)  # Ray brings its own, which would end this process without ceremony
    return ray


def _reserve(ray: Any, size: int, resource: str) -> Any:
    """A placement group with one `resource` for each rank, the first of them on this host."""
    here = f"node:{ray.util.get_node_ip_address()}"
    bundles = [{resource: 1.0, here: 0.001}, *({resource: 1.0} for _ in range(size - 1))]
    group = ray.util.placement_group(bundles, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=PLACEMENT_TIMEOUT_S)
    if not ready:
        ray.util.remove_placement_group(group)
        raise StartError(
            f"Ray has no room for {size} ranks with a {resource} each within {PLACEMENT_TIMEOUT_S:g} s "
            f"(the cluster has {ray.cluster_resources().get(resource, 0):g}, host {socket.gethostname()})"
        )
    return group
