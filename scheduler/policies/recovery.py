"""How a victim returns: what is kept of a preempted request's KV."""

from __future__ import annotations

from abc import ABC, abstractmethod

from scheduler.blocks import BlockPool
from scheduler.request import Request


class RecoveryPolicy(ABC):
    """Takes a victim's blocks and decides what its return will cost."""

    name: str

    @abstractmethod
    def suspend(self, request: Request, pool: BlockPool) -> int:
        """Give the victim's blocks back to the pool. Returns how many became free."""


class Recompute(RecoveryPolicy):
    """Drop the KV. The blocks keep their hashes, so what nobody overwrites in the meantime is hit on return."""

    name = "recompute"

    def suspend(self, request: Request, pool: BlockPool) -> int:
        freed = pool.release(request.blocks)
        request.blocks = []
        return freed


RECOVERY_POLICIES: dict[str, type[RecoveryPolicy]] = {Recompute.name: Recompute}
