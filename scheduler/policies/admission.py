"""May it enter: the block budget, the watermark, and what is set aside for the future of those that run.

Slots and tokens are plain limits that the core counts. Policies differ in how much of the future they reserve:
nothing (`optimistic`), a learned share (`predictive`), all of it (`credit`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from scheduler.policies.ratio import RatioController


class AdmissionTest(StrEnum):
    """The four tests of admission, by the name under which they are reported when they bind."""

    TOKENS = "tokens"
    SLOTS = "slots"
    BLOCKS = "blocks"
    WATERMARK = "watermark"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiter, as admission sees it. Counts are blocks unless they say tokens.

    `now` is what its first chunk takes from the free list, `whole` what all its known tokens would take; both include
    cached blocks that are free and would be held. `total_tokens` is where its output limit ends it.
    """

    now: int
    whole: int
    known_tokens: int = 0
    total_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, as columns [R]: `held` blocks, `computed`, `known` and `total` tokens of each row."""

    held: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    known: npt.NDArray[np.int32]
    total: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """What admission can be told."""

    block_size: int
    watermark: float = 0.0
    conservativeness: float = 1.0
    clip_max_new_tokens: int = 4096


class AdmissionPolicy(ABC):
    """Decides whether a candidate's blocks may be taken. Takes nothing itself."""

    name: str
    ratio: float | None = None
    """The share of their remaining limit that running requests are expected to use, where the policy has one."""

    def __init__(self, options: AdmissionOptions) -> None:
        self.options = options

    def begin(self, running: Running) -> None:
        """A pass is about to admit beside these rows."""

    @abstractmethod
    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        """The test that holds the candidate back, or None to admit it.

        `free` and `total` count blocks of the pool (`total` with the null block); `others_scheduled` is whether
        anything else is in this step already.
        """

    def admitted(self, candidate: Candidate) -> None:
        """The candidate has entered in this pass."""

    def stepped(self) -> None:
        """A step was built without preempting anyone."""

    def preempted(self, survivors: Running, prompt: npt.NDArray[np.int32]) -> None:
        """Somebody was preempted for want of blocks; these rows are left. `prompt` tokens [R] of each."""

    def idle(self) -> None:
        """Nothing is live."""


class Optimistic(AdmissionPolicy):
    """Admit when the known tokens fit, keeping a fraction of the pool free for the growth of those that run.

    Future outputs are not reserved: pressure is answered by preemption. The watermark only applies while something
    else is scheduled, so a lone request can always use the whole pool.
    """

    name = "optimistic"

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        needed = max(candidate.whole, candidate.now)
        if needed > free:
            return AdmissionTest.BLOCKS
        if others_scheduled and needed + int(self.options.watermark * total) > free:
            return AdmissionTest.WATERMARK
        return None


class Predictive(Optimistic):
    """Admit when the candidate's own future fits beside a learned share of everyone else's (SGLang's budget).

    free > Σ running(prompt not yet allocated + min(remaining, clip)·ratio) + its prompt + min(its limit, clip) + page.
    The ratio decays while nothing is preempted and jumps up when something is: see RatioController.
    """

    name = "predictive"

    def __init__(self, options: AdmissionOptions) -> None:
        super().__init__(options)
        self._controller = RatioController(options.conservativeness)
        self._reserved = 0.0

    @property
    def ratio(self) -> float:  # type: ignore[override]
        return self._controller.value

    def begin(self, running: Running) -> None:
        size, clip = self.options.block_size, self.options.clip_max_new_tokens
        unallocated = np.maximum(running.known - running.held * size, 0)
        remaining = np.minimum(running.total - running.known, clip)
        self._reserved = float(unallocated.sum() + remaining.sum() * self._controller.value)

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        bound = super().test(candidate, free, total, others_scheduled)
        if bound is not None or not others_scheduled:
            return bound
        size = self.options.block_size
        if candidate.whole * size + self._future(candidate) + size >= free * size - self._reserved:
            return AdmissionTest.BLOCKS
        return None

    def _future(self, candidate: Candidate) -> int:
        return min(candidate.total_tokens - candidate.known_tokens, self.options.clip_max_new_tokens)

    def admitted(self, candidate: Candidate) -> None:
        size = self.options.block_size
        self._reserved += (candidate.whole - candidate.now) * size + self._future(candidate) + size

    def stepped(self) -> None:
        self._controller.decay()

    def preempted(self, survivors: Running, prompt: npt.NDArray[np.int32]) -> None:
        decoded, allowed = int((survivors.known - prompt).sum()), int((survivors.total - prompt).sum())
        self._controller.retract(decoded, allowed, len(prompt))

    def idle(self) -> None:
        self._controller.reset()


class Credit(AdmissionPolicy):
    """Reserve all that a request can ever hold, ⌈(P + N - 1)/B⌉ blocks, as a credit; pages are taken as tokens come.

    Active credits never exceed the pool, so nobody is ever preempted. What the prefix cache would save is not counted.
    """

    name = "credit"

    def __init__(self, options: AdmissionOptions) -> None:
        super().__init__(options)
        self._active = 0

    def begin(self, running: Running) -> None:
        size = self.options.block_size
        self._active = int((-(-(running.total - 1) // size)).sum())

    def _credit(self, candidate: Candidate) -> int:
        return -(-(candidate.total_tokens - 1) // self.options.block_size)

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        if self._active + self._credit(candidate) > total - 1 or candidate.now > free:
            return AdmissionTest.BLOCKS
        return None

    def admitted(self, candidate: Candidate) -> None:
        self._active += self._credit(candidate)


ADMISSION_POLICIES: dict[str, Callable[[AdmissionOptions], AdmissionPolicy]] = {
    policy.name: policy for policy in (Optimistic, Predictive, Credit)
}
