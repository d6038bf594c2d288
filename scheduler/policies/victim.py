"""Who leaves under pressure: which running request gives its blocks back when another can't get one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.blocks import BlockPool
from scheduler.policies.retraction import Memory, Retraction, Running, retract
from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class VictimOptions:
    """What victim policies can be told. `until_fit`: decoding rows that lack blocks make as many leave at once as it
    takes, before any of them is served."""

    until_fit: bool = False


class VictimPolicy(ABC):
    """Chooses among running requests. The one that needs the block is a candidate like the others."""

    name: str

    def __init__(self, options: VictimOptions | None = None) -> None:
        self.options = options or VictimOptions()

    def retract(self, running: Sequence[Running], memory: Memory, page_size: int) -> Retraction | None:
        """Release decoding rows, in order of admission, until the rest can go on. None: not this policy's way."""
        return None

    @abstractmethod
    def choose(self, candidates: Sequence[Request], pool: BlockPool) -> Request:
        """The victim. `candidates` are in order of admission; there is at least one."""


class LastAdmitted(VictimPolicy):
    """The newest in the running order: it has usually computed least."""

    name = "last-admitted"

    def choose(self, candidates: Sequence[Request], pool: BlockPool) -> Request:
        return candidates[-1]


class LeastUrgent(VictimPolicy):
    """The largest priority number, the latest arrival among equals; `until_fit` the least progress among equals."""

    name = "priority"

    def retract(self, running: Sequence[Running], memory: Memory, page_size: int) -> Retraction | None:
        return retract(running, memory, page_size, by_priority=True) if self.options.until_fit else None

    def choose(self, candidates: Sequence[Request], pool: BlockPool) -> Request:
        return max(candidates, key=lambda request: (request.priority, request.arrival))


class LeastProgress(VictimPolicy):
    """Fewest outputs, then the longest prompt, then the newest: what has least to lose and most to give."""

    name = "least-progress"

    def retract(self, running: Sequence[Running], memory: Memory, page_size: int) -> Retraction | None:
        return retract(running, memory, page_size) if self.options.until_fit else None

    def choose(self, candidates: Sequence[Request], pool: BlockPool) -> Request:
        return min(candidates, key=lambda request: (request.num_outputs, -request.num_prompt, -request.arrival))


class MostRecoverable(VictimPolicy):
    """Whose departure frees most blocks: only those count whose last holder it is. The newest among equals."""

    name = "most-recoverable"

    def choose(self, candidates: Sequence[Request], pool: BlockPool) -> Request:
        return max(candidates, key=lambda request: (pool.count_recoverable(request.blocks), request.arrival))


VICTIM_POLICIES: dict[str, type[VictimPolicy]] = {
    policy.name: policy for policy in (LastAdmitted, LeastUrgent, LeastProgress, MostRecoverable)
}
