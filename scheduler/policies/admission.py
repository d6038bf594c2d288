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

from scheduler.policies.prefill_budget import Candidate as Offer
from scheduler.policies.prefill_budget import PrefillBudget, Runner
from scheduler.policies.ratio import RatioController

UNBOUNDED = 1 << 40


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
    cached blocks that are free and would be held (`reused` of them). `total_tokens` is where its output limit ends it,
    `matched_tokens` what it need not compute.
    """

    now: int
    whole: int
    known_tokens: int = 0
    total_tokens: int = 0
    matched_tokens: int = 0
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, as columns [R]: `held` blocks; `prompt`, `known` and most possible (`total`) tokens of each row."""

    held: npt.NDArray[np.int32]
    prompt: npt.NDArray[np.int32]
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

    def begin(self, running: Running, free: int) -> None:
        """A pass is about to admit beside these rows; `free` blocks are there."""

    @abstractmethod
    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        """The test that holds the candidate back, or None to admit it.

        `free` and `total` count blocks of the pool (`total` with the null block); `others_scheduled` is whether
        anything else is in this step already.
        """

    @abstractmethod
    def lacking(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> int:
        """Blocks that would have to become free for `test` to let the candidate in; 0 or less if none."""

    def admitted(self, candidate: Candidate) -> None:
        """The candidate has entered in this pass."""

    def stepped(self) -> None:
        """A step was built without preempting anyone."""

    def preempted(self, survivors: Running) -> None:
        """Somebody was preempted for want of blocks; these rows are left."""

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
        if self.lacking(candidate, free, total, others_scheduled) > 0:
            return AdmissionTest.WATERMARK
        return None

    def lacking(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> int:
        reserve = int(self.options.watermark * total) if others_scheduled else 0
        return max(candidate.whole, candidate.now) + reserve - free


class Predictive(AdmissionPolicy):
    """Admit when the candidate's own future fits beside a learned share of everyone else's (SGLang's budget).

    The arithmetic is `prefill_budget`'s, the share `ratio`'s: it decays while nothing is preempted and jumps up when
    something is. With nothing else in the batch there is nobody to share with: then what fits may enter.
    """

    name = "predictive"

    def __init__(self, options: AdmissionOptions) -> None:
        super().__init__(options)
        self._controller = RatioController(options.conservativeness)
        self._running: tuple[Running, int] | None = None
        self._budget: PrefillBudget | None = None

    @property
    def ratio(self) -> float:  # type: ignore[override]
        return self._controller.value

    def begin(self, running: Running, free: int) -> None:
        self._running, self._budget = (running, free), None

    def _opened(self) -> PrefillBudget:
        """The budget of this pass; made when somebody is first offered, since most passes admit nobody."""
        if self._budget is not None:
            return self._budget
        assert self._running is not None, "begin comes first"
        (running, free), size = self._running, self.options.block_size
        unallocated = int(np.maximum(running.known - running.held * size, 0).sum())
        lengths = zip(running.prompt.tolist(), running.known.tolist(), running.total.tolist(), strict=True)
        self._budget = PrefillBudget(
            available=free * size - unallocated,
            page_size=size,
            ratio=self._controller.value,
            max_prefill_tokens=UNBOUNDED,
            running=[Runner(prompt, known - prompt, total - prompt) for prompt, known, total in lengths],
        )
        return self._budget

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        if candidate.whole > free:
            return AdmissionTest.BLOCKS
        size = self.options.block_size
        offer = Offer(
            tokens=candidate.known_tokens,
            matched=candidate.matched_tokens,
            max_new=candidate.total_tokens - candidate.known_tokens,
            pinned=candidate.reused * size,
        )
        granted = self._opened().offer(offer).extend > 0
        return None if granted or not others_scheduled else AdmissionTest.BLOCKS

    def lacking(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> int:
        size = self.options.block_size
        future = min(candidate.total_tokens - candidate.known_tokens, self.options.clip_max_new_tokens)
        wanted = candidate.whole * size + future + size
        return max(candidate.whole - free, -int((self._opened().rem_total - wanted) // size) + 1)

    def stepped(self) -> None:
        self._controller.decay()

    def preempted(self, survivors: Running) -> None:
        decoded = int((survivors.known - survivors.prompt).sum())
        allowed = int((survivors.total - survivors.prompt).sum())
        self._controller.retract(decoded, allowed, len(survivors.known))

    def idle(self) -> None:
        self._controller.reset()


class Credit(AdmissionPolicy):
    """Reserve all that a request can ever hold, ⌈(P + N - 1)/B⌉ blocks, as a credit; pages are taken as tokens come.

    Active credits never exceed the pool, so nobody is ever preempted. What the prefix cache would save is not counted.
    What those that don't run hold (sessions between two parts, transfers) counts: the free blocks must cover all that
    the running may still take.
    """

    name = "credit"

    def __init__(self, options: AdmissionOptions) -> None:
        super().__init__(options)
        self._active = 0
        self._to_come = 0

    def begin(self, running: Running, free: int) -> None:
        credits = -(-(running.total - 1) // self.options.block_size)
        self._active = int(credits.sum())
        self._to_come = int((credits - running.held).sum())

    def _credit(self, candidate: Candidate) -> int:
        return -(-(candidate.total_tokens - 1) // self.options.block_size)

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        return AdmissionTest.BLOCKS if self.lacking(candidate, free, total, others_scheduled) > 0 else None

    def lacking(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> int:
        over = self._active + self._credit(candidate) - (total - 1)
        return max(over, self._to_come + self._yet_to_take(candidate) - free)

    def _yet_to_take(self, candidate: Candidate) -> int:
        known = -(-candidate.known_tokens // self.options.block_size)
        return max(self._credit(candidate) - known + candidate.whole, candidate.now)

    def admitted(self, candidate: Candidate) -> None:
        self._active += self._credit(candidate)
        self._to_come += self._yet_to_take(candidate) - candidate.now


ADMISSION_POLICIES: dict[str, Callable[[AdmissionOptions], AdmissionPolicy]] = {
    policy.name: policy for policy in (Optimistic, Predictive, Credit)
}
