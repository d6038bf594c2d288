"""Who leaves under pressure: which running request gives its blocks back when another can't get one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from scheduler.request import Request
from scheduler.table import RowTable


class VictimPolicy(ABC):
    """Chooses among the running requests. The one that needs the block is a candidate like the others."""

    name: str

    @abstractmethod
    def choose(self, table: RowTable) -> Request:
        """The victim. There is at least one running request."""


class LastAdmitted(VictimPolicy):
    """The newest in the running order: it has usually computed least."""

    name = "last-admitted"

    def choose(self, table: RowTable) -> Request:
        request: Request | None = table.request[int(table.order[-1])]
        assert request is not None
        return request


class LeastUrgent(VictimPolicy):
    """The largest priority number, the latest arrival among equals."""

    name = "priority"

    def choose(self, table: RowTable) -> Request:
        return max(table.requests(), key=lambda request: (request.priority, request.arrival))


VICTIM_POLICIES: dict[str, type[VictimPolicy]] = {policy.name: policy for policy in (LastAdmitted, LeastUrgent)}
