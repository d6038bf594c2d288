"""What a scheduler class has to do to be run by this process: `--scheduler-cls package.module:Class`.

The process around it (scheduler.process) owns sockets, handshakes, epochs and leases; the class owns requests,
queues and blocks. All calls come from one thread. A scheduler in another language speaks protocol/CONTRACT.md instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from protocol.messages import (
    Control,
    ControlReply,
    Extend,
    GrammarStatus,
    KvStatus,
    Limits,
    Outputs,
    Step,
    StepResult,
    Submit,
)
from scheduler.config import SchedulerConfig


@dataclass(slots=True)
class Stats:
    """Counters (never going down) and levels, read by the process for metrics and its status line."""

    running: int = 0
    waiting: int = 0
    preempted_waiting: int = 0
    free_blocks: int = 0
    usable_blocks: int = 0
    draining_blocks: int = 0
    """Neither free nor held by a request: see `page_release_delay_s`."""
    reserved_blocks: int = 0
    """What the running may hold at most, where admission promises it to them."""
    steps: int = 0
    started: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    replayed_tokens: int = 0
    """Counted when a request enters again; what it hasn't come to when it leaves is taken off."""
    scheduled_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    stale_tokens: int = 0
    failed_steps: int = 0
    culprits: int = 0
    """Requests that ended because they made steps fail."""
    quarantined: int = 0
    evictions: int = 0
    held_passes: dict[str, int] = field(default_factory=dict)
    swapped: int = 0
    swapped_out_blocks: int = 0
    parked: dict[str, int] = field(default_factory=dict)
    queue_flips: int = 0
    draining: bool = False
    new_token_ratio: float | None = None
    forecast_peak_blocks: float | None = None
    queue_seconds: list[float] = field(default_factory=list)
    preemption_counts: list[int] = field(default_factory=list)
    step_tokens: int = 0
    step_rows: int = 0


@dataclass(frozen=True, slots=True)
class Door:
    """When a new request is turned away: `queued` have never run, `limit` (0: none) of them may wait. With `displaces`,
    one with a priority below `least_urgent`, the highest of those queued, takes that one's place."""

    limit: int = 0
    queued: int = 0
    displaces: bool = False
    least_urgent: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A request on its way to another scheduler: what an API would submit to go on with it, and how many runners in a
    row died with it in flight."""

    peer: int
    submit: Submit
    deaths: int = 0


class Scheduler(ABC):
    """Decides, step by step, how many tokens each request computes.

    A peer is a small non-negative integer that names the API process a request came from.
    """

    config: SchedulerConfig
    """What is in force; the process reads the pipeline depth from it."""
    stats: Stats
    epoch: int
    """Set by the process when a runner has granted one; goes into every step, and results of others are ignored."""

    @abstractmethod
    def __init__(self, config: SchedulerConfig, limits: Limits, hash_key: bytes, *, clock: Callable[[], int]) -> None:
        """`clock` gives nanoseconds, for durations only. Raises ValueError for limits nothing can run in."""

    @abstractmethod
    def adopt_inventory(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Start with a warm prefix cache: what the runner's pages hold, least recently used first."""

    @abstractmethod
    def add(self, peer: int, submit: Submit) -> None:
        """Accept a request or answer it with a rejection; either way through `take_outputs`."""

    @abstractmethod
    def abort(self, peer: int, ids: Iterable[int]) -> None:
        """End these requests in whatever state they are. Unknown ids, and those of other peers, are ignored."""

    @abstractmethod
    def drop_peer(self, peer: int) -> int:
        """An API is gone: end all its requests, say nothing. Returns how many there were."""

    def cached_tokens(self, submit: Submit) -> int:
        """With several replicas: how many of a request's leading tokens have KV here. It may be a guess."""
        return 0

    def hand_over(self, most_tokens: int) -> list[HandedOver]:
        """With several replicas, when the runner stays away: the requests with at most so many tokens leave, and nobody
        is told. A class that can't do this keeps them until its runner is back."""
        return []

    def take_in(self, handed_over: HandedOver) -> None:
        """A request that another scheduler has handed over."""
        self.add(handed_over.peer, handed_over.submit)

    def extend(self, peer: int, message: Extend) -> None:
        """More of an open request's prompt. A class without such requests may leave this as it is."""

    def control(self, message: Control) -> ControlReply:
        """An operator's order. A class that takes none says so."""
        body = b'{"code": "unsupported", "message": "this scheduler takes no orders"}'
        return ControlReply(message.nonce, False, body)

    def on_grammar_status(self, status: GrammarStatus) -> None:
        """The runner's word on a grammar that was asked for."""

    def on_kv_status(self, status: KvStatus) -> None:
        """The runner's word on a KV transfer that was asked for."""

    def expire(self) -> None:
        """End what has waited longer than it may. Called regularly, also while no runner is there."""

    def take_orders(self) -> list[msgspec.Struct]:
        """Messages for the runner beside steps (CompileGrammar, FetchKv), to be sent after the last step."""
        return []

    @abstractmethod
    def schedule(self) -> Step | None:
        """One pass: the next step to send, or None if nothing can run. The step counts as in flight from here on."""

    @abstractmethod
    def update(self, result: StepResult) -> None:
        """Apply the result of a step in flight. Stale, repeated and unknown results change nothing."""

    @abstractmethod
    def reset_runner(self, limits: Limits, hash_key: bytes) -> None:
        """A runner lost everything it held (restarted, or another one): void what is in flight, requeue what ran."""

    @abstractmethod
    def take_outputs(self) -> list[tuple[int, Outputs]]:
        """What each peer has to be told since the last call; at most one message per peer."""

    @abstractmethod
    def refresh_stats(self) -> Stats:
        """`stats`, with its levels brought up to date."""

    def door(self) -> Door:
        """When new requests are turned away. The APIs are told, and need not send what would be."""
        return Door()

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Steps whose result is awaited."""

    @property
    def wakes_ns(self) -> int | None:
        """When, by the clock, a pass may do what it can't do now, though nothing comes; None for never."""
        return None

    @property
    @abstractmethod
    def has_requests(self) -> bool:
        """Whether any request is live."""

    @abstractmethod
    def check(self) -> list[str]:
        """Violated invariants as sentences; empty when all is well. Looks at every block: not for a busy loop."""
