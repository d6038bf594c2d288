"""The three processes as the explorer turns them: production state machines on an in-memory network and its own clock.

Each `turn` is one turn of the loop that the process runs in production. What a process has taken in since its start is
its `history`: processes are deterministic, so two worlds with the same histories are in the same state.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import zmq

from protocol.columns import pack_i32
from protocol.messages import SamplingParams, Step, StepResult
from protocol.process import EXIT_REPLACED
from protocol.scheduler_links import Stopped
from runner.config import RunnerConfig
from runner.link import SchedulerLink, Work
from runner.loop import Loop
from runner.sim import SimulatedExecutor
from scheduler.config import SchedulerConfig
from scheduler.process import SchedulerProcess
from services.config import ApiConfig
from services.engine import Engine
from services.journal import Call, Generation, Terms
from tests.exploration.determined import Clock, Counter, Ignored, StepLoop, reproducible
from tests.exploration.network import Context, Network, Socket
from tests.exploration.scenarios import Ask, Scenario

SCHEDULER_ADDRESS = "tcp://127.0.0.1:1"
RUNNER_ADDRESS = "tcp://127.0.0.1:2"
LEASE_S = 1.0
API_CONFIG = ApiConfig(scheduler_address=SCHEDULER_ADDRESS, engine_wait_s=3600)


class Violation(AssertionError):
    """Something happened that must never happen. `course` are the choices that led there."""

    course: Sequence[str] = ()


class Process(ABC):
    """What all three have in common. `life` counts the starts."""

    role = ""

    def __init__(self, network: Network, clock: Clock, life: int) -> None:
        self.clock = clock
        self.label = f"{self.role}{life}"
        self.context: Any = Context(network, self.label)
        self.network = network
        self.history = b""
        self.note("start", str(life).encode())

    def note(self, what: str, data: bytes = b"") -> None:
        """Something was taken in: a frame, or the time."""
        digest = blake2b(self.history, digest_size=12)
        digest.update(f"{what}@{self.clock.ticks}:".encode())
        digest.update(data)
        self.history = digest.digest()

    @abstractmethod
    def turn(self) -> None:
        """Take in what has arrived, do what time asks for."""

    def receive(self) -> None:
        """Take in what has arrived."""
        self.turn()

    def check(self) -> None:
        """Raise Violation if the process's books don't agree."""

    def sockets(self) -> list[Socket]:
        """The DEALERs, whose connection events are told to this process."""
        return [c.dealer for c in self.network.connections if c.dealer.owner == self.label and not c.dealer.closed]


class Client:
    """Who made a request, and what it got. A stream is compared token by token as it grows."""

    def __init__(self, ask: Ask, expected: list[int]) -> None:
        self.ask = ask
        self.expected = expected
        self.generation: Generation | None = None
        self.call: Call | None = None
        self.outcome = ""
        self.seen = 0

    @property
    def live(self) -> bool:
        """Whether it waits for more."""
        return self.call is not None and not self.outcome


class Api(Process):
    """An API process with its engine, journal and chain; in place of HTTP handlers, clients that read tokens."""

    role = "api"

    def __init__(self, network: Network, clock: Clock, life: int, scenario: Scenario) -> None:
        super().__init__(network, clock, life)
        self.clients: list[Client] = []
        self.lost, self.repeated = Counter(), Counter()
        self.loop = StepLoop(clock)
        metrics: Any = Ignored()
        metrics.lost_tokens, metrics.duplicate_tokens = self.lost, self.repeated
        generator = random.Random(life)
        with reproducible(f"api {life}"), self.loop.running():
            self.engine = Engine(
                API_CONFIG,
                metrics,
                self.context,
                clock=clock.now,
                wall_ns=lambda: clock.wall_ms() * 1_000_000,
                random_bits=generator.getrandbits,
                on_fatal=self._fatal,
            )
            self.engine.start()
        self.turn()

    @staticmethod
    def _fatal(why: str) -> None:
        raise Violation(f"the API gives up: {why}")

    def submit(self, client: Client) -> None:
        """A client comes."""
        ask = client.ask
        self.note("submit", str(ask).encode())
        with self.loop.running():
            client.call = Call(self.clock.now, label=ask.name)
            params = SamplingParams(ask.outputs, seed=ask.seed, ignore_eos=True)
            client.generation = self.engine.submit(client.call, pack_i32(list(ask.prompt)), params, Terms())
        self.clients.append(client)
        self.turn()

    def abort(self, client: Client) -> None:
        """A client goes."""
        assert client.call is not None
        self.note("abort", client.ask.name.encode())
        client.outcome = "gone"
        client.call.disconnect()
        with self.loop.running():
            self.engine.release(client.call)
        self.turn()

    def turn(self) -> None:
        sockets = self.sockets()
        monitors = [s.monitor for s in sockets if s.monitor is not None and s.monitor.arrived]
        readable = [int(s.getsockopt(zmq.FD)) for s in (*monitors, *(s for s in sockets if s.arrived))]
        self.loop.turn(readable)
        for client in self.clients:
            if client.live:
                self._read(client)
        self.loop.turn([])

    def _read(self, client: Client) -> None:
        generation, call = client.generation, client.call
        assert generation is not None and call is not None
        call.ready.clear()
        generation.pending = False
        tokens = generation.tokens
        if tokens != client.expected[: len(tokens)]:
            raise Violation(f"{client.ask.name} got {tokens}, expected {client.expected}")
        if generation.error is not None:
            raise Violation(f"{client.ask.name} failed: {generation.error}")
        if client.ask.stop_after and len(tokens) >= client.ask.stop_after and not generation.over:
            if not generation.stopped_at:
                self.engine.stop(generation)
        elif generation.finished is not None:
            wanted = client.ask.stop_after or client.ask.outputs
            if len(tokens) < wanted:
                raise Violation(f"{client.ask.name} ended ({generation.finished}) after {tokens}")
            client.outcome = "done"
            with self.loop.running():
                self.engine.release(call)

    def check(self) -> None:
        if self.lost.value or self.repeated.value:
            raise Violation(f"{self.lost.value} tokens lost, {self.repeated.value} repeated")


class SchedulerHost(Process):
    """A scheduler process. `code` is its exit status once it has ended."""

    role = "scheduler"

    def __init__(
        self, network: Network, clock: Clock, life: int, scenario: Scenario, *, takeover: bool = False
    ) -> None:
        super().__init__(network, clock, life)
        self.code: int | None = None
        self.epoch = 0
        metrics: Any = Ignored()
        with reproducible(f"scheduler {life}"):
            self.process = SchedulerProcess(
                scheduler_config(scenario, takeover), self.context, [metrics], clock=clock.now
            )
        self.turn()

    def turn(self) -> None:
        try:
            self.process.links.turn()
        except Stopped as end:
            self.code = end.code
            self.process.links._leave("takeover" if end.code == EXIT_REPLACED else "shutdown", str(end))

    def again(self, result: StepResult) -> None:
        """A result comes a second time."""
        self.note("again", str(result.step_id).encode())
        self.process.on_runner(result)
        self.turn()

    def check(self) -> None:
        links, core = self.process.links, self.process.core
        if links.epoch < self.epoch:
            raise Violation(f"the scheduler's epoch fell from {self.epoch} to {links.epoch}")
        self.epoch = links.epoch
        faults = core.check() if core is not None else []
        if faults:
            raise Violation(f"the scheduler's books: {faults}")

    def leftovers(self) -> list[str]:
        """What it still holds though no request is live anywhere."""
        core: Any = self.process.core
        if core is None:
            return []
        held = core.pool.num_usable - core.pool.num_free
        found = [f"request {request}" for request in core.requests] + ([f"{held} blocks"] if held else [])
        return found + ([f"{core.in_flight} steps in flight"] if core.in_flight else [])


class RunnerHost(Process):
    """A runner process: its link's thread and its computing thread, each turned on its own."""

    role = "runner"

    def __init__(self, network: Network, clock: Clock, life: int, scenario: Scenario) -> None:
        super().__init__(network, clock, life)
        self.granted = 0
        self.executed: set[tuple[int, int]] = set()
        self.executor = SimulatedExecutor(
            runner_config(scenario), clock_ns=clock.now_ns, sleep_until_ns=lambda deadline_ns: None
        )
        with reproducible(f"runner {life}"):
            self.link = SchedulerLink(
                self.context,
                RUNNER_ADDRESS,
                self.executor.limits,
                hash_key=f"key of life {life}".encode(),
                answer=self.executor.answer,
                lease_s=LEASE_S,
                clock=clock.now,
                wall_ms=clock.wall_ms,
            )
        metrics: Any = Ignored()
        self.loop = Loop(self.link, self.executor, metrics, 0.0, clock_ns=clock.now_ns)
        os.close(self.link._wake.fd)  # nobody waits: both threads turn when the explorer says so
        self.link._wake = Ignored()  # type: ignore[assignment]

    @property
    def posted(self) -> bool:
        """Whether the computing thread has handed over something that is not sent yet."""
        return bool(self.link._out)

    def receive(self) -> None:
        """The link's thread takes in what has arrived."""
        self.link.receive()

    def compute(self) -> None:
        """The computing thread does the next thing."""
        self.note("compute")
        item = self.link.next()
        assert item is not None
        if isinstance(item, Work) and self.link.is_current(item):
            self._judge(item.step)
        self.loop.do(item)
        for posted in self.link._out:
            result = getattr(posted, "result", None)
            if result is not None and (result.failure is not None or result.errors):
                raise Violation(f"step {result.step_id} failed: {result.failure or result.errors}")

    def _judge(self, step: Step) -> None:
        if step.epoch < self.granted:
            raise Violation(f"step {step.step_id} of epoch {step.epoch} runs after epoch {self.granted} was granted")
        if (step.epoch, step.step_id) in self.executed:
            raise Violation(f"step {step.step_id} of epoch {step.epoch} runs twice")
        self.executed.add((step.epoch, step.step_id))

    def flush(self) -> None:
        """The link's thread sends what was handed over."""
        self.note("flush")
        self.link.flush()
        if self.link._granted < self.granted:
            raise Violation(f"the granted epoch fell from {self.granted} to {self.link._granted}")
        self.granted = self.link._granted

    def turn(self) -> None:
        self.link.receive()
        self.link.keep_time()


@cache
def scheduler_config(scenario: Scenario, takeover: bool) -> SchedulerConfig:
    """With a lease that ends soon."""
    return SchedulerConfig(
        scheduler_address=SCHEDULER_ADDRESS,
        runner_address=RUNNER_ADDRESS,
        lease_s=LEASE_S,
        runner_silence_s=LEASE_S,
        log_interval_s=1e9,
        pipeline_depth=scenario.depth,
        max_num_seqs=4,
        takeover=takeover,
        **dict(scenario.scheduler),
    )


@cache
def runner_config(scenario: Scenario) -> RunnerConfig:
    """A small strict simulator."""
    return RunnerConfig(
        backend="sim",
        block_size=scenario.block_size,
        sim_num_blocks=scenario.blocks + 1,
        sim_max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=scenario.step_tokens,
        sim_vocab_size=1000,
        sim_step_ms=0,
        sim_token_us=0,
        sim_context_ns=0,
        sim_row_us=0,
    )
