"""Small numbers for tenants, to be kept in columns: as many as are needed at once, whatever number ever comes."""

from __future__ import annotations

from collections import OrderedDict

KEPT = 1024
"""Tenants without a request that keep their number, so that what was learned about it is still theirs."""


class Tenants:
    """Counts the live requests of each tenant. A number goes to somebody else only after its owner has been idle, and
    was so for longer than `KEPT` others."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._live: list[int] = []
        self._idle: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        """Tenants that have a number."""
        return len(self._numbers)

    def enter(self, tenant: str) -> int:
        """One more live request; returns the tenant's number, which stays the same for as long as any is live."""
        number = self._numbers.get(tenant)
        if number is None:
            number = self._number_for(tenant)
        self._live[number] += 1
        self._idle.pop(tenant, None)
        return number

    def _number_for(self, tenant: str) -> int:
        if len(self._idle) > self._kept:
            former, _ = self._idle.popitem(last=False)
            number = self._numbers.pop(former)
            self._names[number] = tenant
        else:
            number = len(self._names)
            self._names.append(tenant)
            self._live.append(0)
        self._numbers[tenant] = number
        return number

    def leave(self, tenant: str) -> bool:
        """One live request less. Whether it was the tenant's last."""
        number = self._numbers[tenant]
        self._live[number] -= 1
        if self._live[number]:
            return False
        self._idle[tenant] = None
        return True

    def number(self, tenant: str) -> int:
        """The number of a tenant with a live request. Raises KeyError for one that has none."""
        return self._numbers[tenant]

    def name(self, number: int) -> str:
        """Whose number it is."""
        return self._names[number]
