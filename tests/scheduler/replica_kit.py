"""A scheduler process with several runners, all of whose ends a test holds in its hands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from protocol.columns import pack_i32
from protocol.messages import Control, ControlReply, Limits, SamplingParams, Submit
from scheduler.core import CoreScheduler
from scheduler.interface import HandedOver
from tests.scheduler.ends import ApiEnd, Chain, RunnerEnd
from tests.scheduler.isolated import default_sample


class AskingEnd(ApiEnd):
    """An API that gives orders too."""

    def __init__(self, context: Any, directory: Path) -> None:
        super().__init__(context, directory)
        self.replies: dict[int, ControlReply] = {}
        receive = self.channel.receive

        def kept(limit: int = 1000) -> list[Any]:
            messages = receive(limit)
            self.replies |= {one.nonce: one for one in messages if isinstance(one, ControlReply)}
            return messages

        self.channel.receive = kept  # type: ignore[method-assign]

    def submit_prompt(self, request_id: int, prompt: Sequence[int], max_tokens: int, **more: Any) -> None:
        """A request with this very prompt; `choice` goes to its parameters."""
        params = SamplingParams(max_tokens, ignore_eos=True, choice=more.pop("choice", 0))
        self.channel.send(Submit(request_id, pack_i32(list(prompt)), params, **more))


class ReplicaChain(Chain):
    """Like `Chain`, with `count` replicas. The runners' samples depend on request and position alone."""

    def __init__(self, directory: Path, count: int = 2, **config: Any) -> None:
        addresses = ",".join(f"ipc://{directory}/runner-{number}.sock" for number in range(count))
        super().__init__(directory, **{"runner_address": addresses, "replica_patience_s": 0.3} | config)
        self.runners: dict[int, RunnerEnd] = {}

    def runner_ends(self) -> list[RunnerEnd]:
        return list(self.runners.values())

    def start_replica(self, number: int, epoch: int = 1, limit: Limits | None = None) -> RunnerEnd:
        """A runner for that replica."""
        name = f"runner-{number}"
        self.runners[number] = RunnerEnd(self.context, self.directory, epoch, limit, name)
        return self.runners[number]

    def stop_replica(self, number: int) -> None:
        """Its runner dies."""
        self.runners.pop(number).channel.close()

    def api(self) -> AskingEnd:
        end = AskingEnd(self.context, self.directory)
        self.apis.append(end)
        return end

    def up(self, count: int, api: ApiEnd) -> None:
        """Wait until so many are said to be up."""
        self.until(lambda: api.status is not None and api.status.replicas_up == count, f"{count} replicas")

    def all_up(self, **limits: Any) -> AskingEnd:
        """Scheduler, runners and one API, all of them ready."""
        count = len(self.config.runner_addresses)
        for number in range(count):
            self.start_replica(number, **limits)
        self.start()
        api = self.api()
        self.up(count, api)
        return api

    def order(self, api: AskingEnd, action: str, **arguments: str) -> Any:
        """An order's answer, as JSON."""
        nonce = int.from_bytes(os.urandom(6), "big")
        api.channel.send(Control(nonce, action, arguments))
        self.until(lambda: nonce in api.replies, f"the answer to {action}")
        return msgspec.json.decode(api.replies[nonce].body)

    def rows(self, number: int) -> set[int]:
        """The requests that a replica's runner has computed in its present session."""
        return {request_id for step in self.runners[number].fake.scheduled for request_id in step}

    def live(self) -> int:
        """Requests that some replica has, as the process counts them."""
        assert self.process is not None and self.process._dispatch is not None
        return len(self.process._dispatch)

    def load(self, number: int) -> float:
        """What a replica has to do, as the process counts it."""
        assert self.process is not None and self.process._dispatch is not None
        return self.process._dispatch.load(number)

    def close(self) -> None:
        for number in list(self.runners):
            self.stop_replica(number)
        super().close()


class Staying(CoreScheduler):
    """A class of somebody's own that hands nothing over and doesn't know what it has cached."""

    def hand_over(self, most_tokens: int) -> list[HandedOver]:
        return []

    def cached_tokens(self, submit: Submit) -> int:
        return 0


MakeReplicas = Callable[..., ReplicaChain]


def words(seed: int, count: int) -> list[int]:
    """A prompt of its own for each seed."""
    return [default_sample(seed, position) for position in range(count)]


@contextmanager
def replicas_in(runtime_dir: Path) -> Iterator[MakeReplicas]:
    """Makes chains there; they are closed when the block ends."""
    chains: list[ReplicaChain] = []

    def start(count: int = 2, **config: Any) -> ReplicaChain:
        chains.append(ReplicaChain(runtime_dir, count, **config))
        return chains[-1]

    yield start
    for chain in chains:
        chain.close()
