"""Who leaves under pressure: which running request gives its blocks back when another can't get one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from scheduler.blocks import BlockPool
from scheduler.request import Request


class VictimPolicy(ABC):
    """Chooses among running requests. The one that needs the block is a candidate like the others."""

    name: str

    @abstractmethod
    def choose(self, candidates: Sequence[Request], pool: BlockPool) -> Request:
        """The victim. `candidates` are in order of admission; there is at least one."""


class LastAdmitted(VictimPolicy):
    """The newest in the running order: it has usually computed least."""

    name = "last-admitted"

    def choose(self, candidates: Sequence[Request], pool: BlockPool) -> Request:
        return candidates[-1]


class LeastUrgent(VictimPolicy):
    """The largest priority number, the latest arrival among equals."""

    name = "priority"

    def choose(self, candidates: Sequence[Request], pool: BlockPool) -> Request:
        return max(candidates, key=lambda request: (request.priority, request.arrival))


class LeastProgress(VictimPolicy):
    """Fewest outputs, then the longest prompt, then the newest: what has least to lose and most to give."""

    name = "least-progress"

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
