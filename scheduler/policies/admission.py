"""May it enter: the block budget and the watermark. (Slots and tokens are plain limits that the core counts.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum


class AdmissionTest(StrEnum):
    """The four tests of admission, by the name under which they are reported when they bind."""

    TOKENS = "tokens"
    SLOTS = "slots"
    BLOCKS = "blocks"
    WATERMARK = "watermark"


@dataclass(frozen=True, slots=True)
class Candidate:
    """The head of the queue, as admission sees it. All counts are blocks.

    `now` is what its first chunk takes from the free list, `whole` what all its known tokens would take; both include
    cached blocks that are free and would be held.
    """

    now: int
    whole: int


class AdmissionPolicy(ABC):
    """Decides whether a candidate's blocks may be taken. Takes nothing itself."""

    name: str

    @abstractmethod
    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        """The test that holds the candidate back, or None to admit it.

        `free` and `total` count blocks of the pool (`total` with the null block); `others_scheduled` is whether
        anything else is in this step already.
        """


class Optimistic(AdmissionPolicy):
    """Admit when the known tokens fit, keeping a fraction of the pool free for the growth of those that run.

    Future outputs are not reserved: pressure is answered by preemption. The watermark only applies while something
    else is scheduled, so a lone request can always use the whole pool.
    """

    name = "optimistic"

    def __init__(self, watermark: float) -> None:
        self.watermark = watermark

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        needed = max(candidate.whole, candidate.now)
        if needed > free:
            return AdmissionTest.BLOCKS
        if others_scheduled and needed + int(self.watermark * total) > free:
            return AdmissionTest.WATERMARK
        return None


ADMISSION_POLICIES: dict[str, type[Optimistic]] = {Optimistic.name: Optimistic}
