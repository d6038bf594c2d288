"""May it enter: the block budget, the watermark, and what is set aside for the future of those that run.

Slots and tokens are plain limits that the core counts. Policies differ in how much of the future they reserve:
nothing (`optimistic`), a learned share (`predictive`), all of it (`credit`); in `scheduler.policies.forecast`, what the
batch is likely to hold at its fullest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from scheduler.policies.peak import Outlook
from scheduler.policies.prefill_budget import Candidate as Offer
from scheduler.policies.prefill_budget import Chunk, PrefillBudget, Runner, Verdict
from scheduler.policies.ratio import RatioController
from scheduler.policies.urgent import tokens_needed


class AdmissionTest(StrEnum):
    """The tests of admission, by the name under which they are reported when they bind.

    The last two are the credit's: all is promised to others, or would be there but for pages that still drain.
    """

    TOKENS = "tokens"
    SLOTS = "slots"
    BLOCKS = "blocks"
    WATERMARK = "watermark"
    CREDITS = "credits"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiter, as admission sees it. Counts are blocks unless they say tokens.

    `now` is what its first chunk takes from the free list, `whole` what all its known tokens would take; both include
    cached blocks that are free and would be held (`reused` of them). `prompt_tokens` of the known ones aren't outputs,
    `total_tokens` is where the output limit ends it, `matched_tokens` what it need not compute. `tenant` is a number,
    as in `Running`; -1 is none.
    """

    now: int
    whole: int
    prompt_tokens: int = 0
    known_tokens: int = 0
    total_tokens: int = 0
    matched_tokens: int = 0
    reused: int = 0
    tenant: int = -1


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, as columns [R]: `held` blocks; `prompt`, `known` and most possible (`total`) tokens of each row;
    the number of its `tenant`; `entered`, which is larger the later it was let in."""

    held: npt.NDArray[np.int32]
    prompt: npt.NDArray[np.int32]
    known: npt.NDArray[np.int32]
    total: npt.NDArray[np.int32]
    tenant: npt.NDArray[np.int32]
    entered: npt.NDArray[np.int32]

    def runners(self) -> list[Runner]:
        """The rows one by one, as the estimate of outputs sees them."""
        lengths = zip(self.prompt.tolist(), self.known.tolist(), self.total.tolist(), strict=True)
        return [Runner(prompt, known - prompt, total - prompt) for prompt, known, total in lengths]


@dataclass(frozen=True, slots=True)
class Leaving:
    """Running rows that make room for somebody, and the blocks that come free with them."""

    rows: Running
    freed: int


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """What admission can be told."""

    block_size: int
    watermark: float = 0.0
    conservativeness: float = 1.0
    clip_max_new_tokens: int = 4096
    confidence: float = 0.95
    memory: int = 1000


class AdmissionPolicy(ABC):
    """Decides whether a candidate's blocks may be taken. Takes nothing itself."""

    name: str
    ratio: float | None = None
    """The share of their remaining limit that running requests are expected to use, where the policy has one."""
    outlook: Outlook | None = None
    """What the last test went by, where the policy looks ahead. An object that stays as it is."""

    def __init__(self, options: AdmissionOptions) -> None:
        self.options = options

    sizes_prompts = False
    """Whether the policy decides how much of a prompt is computed, one under way included: see `resume`, `extent`."""
    reserves = False
    """Whether who is let in gets a promise instead of pages: it is served from its place among those that run, in this
    very pass if its turn comes."""
    draining = 0
    """Pages of ended requests that aren't free yet; set before `begin`."""
    counts_decodes = False
    """Whether `stepped` wants to know what was in the step."""

    def begin(self, running: Running, free: int, tokens: int, decoding: int) -> None:
        """A pass is about to admit beside these rows; `free` blocks are there.

        With `sizes_prompts` the rows are those that decode, and `tokens` are what a step may compute, `decoding` of
        them for rows that decode in it.
        """

    @abstractmethod
    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        """The test that holds the candidate back, or None to admit it.

        `free` and `total` count blocks of the pool (`total` with the null block); `others_scheduled` is whether
        anything else is in this step already.
        """

    def extent(self, count: int) -> int:
        """Of the `count` tokens that the step could compute of the candidate just let in, those that it shall."""
        return count

    def resume(self, prompt: Chunk, limit: int | None) -> int:
        """Tokens that a prompt under way computes in this pass, at most `limit`."""
        raise TypeError(f"admission by {self.name!r} sizes no prompts")

    @abstractmethod
    def lacking(
        self, candidate: Candidate, free: int, total: int, others_scheduled: bool, leaving: Leaving | None = None
    ) -> int:
        """Blocks that would have to become free for `test` to let the candidate in; 0 or less if none.

        With `leaving`: if these rows had left already (`free` counts their blocks).
        """

    def refusal(self, total_tokens: int, usable: int) -> str:
        """Why a request of at most `total_tokens` can never be let into `usable` blocks; empty if it can."""
        return ""

    def reserved(self, running: Running) -> int:
        """Blocks that are promised to these rows, those that they hold included; 0 for a policy that promises none."""
        return 0

    def need(self, candidate: Candidate) -> float:
        """Tokens of expected outputs that would have to go for an urgent candidate, beside what it lacks in blocks."""
        return 0.0

    def relief(self, running: Running) -> list[float]:
        """What each of these rows would take off such a need."""
        return [0.0] * len(running.known)

    def admitted(self, candidate: Candidate) -> None:
        """The candidate has entered in this pass."""

    def left(self, leaving: Leaving) -> None:
        """These rows have made room in this pass."""

    def stepped(self, *, decoded: bool) -> None:
        """A step was built without preempting anyone for want of blocks; `decoded`: rows decode in it."""

    def preempted(self, survivors: Running) -> None:
        """Requests were preempted for want of blocks, all of them at once; these rows are left."""

    def finished(self, tenant: int, outputs: int, *, at_limit: bool) -> None:
        """A request has ended after `outputs` (1 or more); `at_limit`: not of itself, it would have gone on."""

    def idle(self) -> None:
        """Nothing is live."""

    def inherit(self, replaced: AdmissionPolicy) -> None:
        """This policy comes after another: whatever that one has learned may be taken over."""


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

    def lacking(
        self, candidate: Candidate, free: int, total: int, others_scheduled: bool, leaving: Leaving | None = None
    ) -> int:
        reserve = int(self.options.watermark * total) if others_scheduled else 0
        return max(candidate.whole, candidate.now) + reserve - free


class Predictive(AdmissionPolicy):
    """Admit when the candidate's own future fits beside a learned share of everyone else's (SGLang's budget).

    The arithmetic is `prefill_budget`'s, the share `ratio`'s: it decays while rows decode and nothing is preempted, and
    jumps up when something is. The same budget says how much of a prompt is computed. With nothing else in the batch
    there is nobody to share with: then what fits may enter.
    """

    name = "predictive"
    sizes_prompts = True
    counts_decodes = True

    def __init__(self, options: AdmissionOptions) -> None:
        super().__init__(options)
        self._controller = RatioController(options.conservativeness)
        self._running: tuple[Running, int, int, int] | None = None
        self._budget: PrefillBudget | None = None
        self._granted: int | None = None

    @property
    def ratio(self) -> float:  # type: ignore[override]
        return self._controller.value

    def begin(self, running: Running, free: int, tokens: int, decoding: int) -> None:
        self._running, self._budget = (running, free, tokens, decoding), None

    def _opened(self) -> PrefillBudget:
        """The budget of this pass; made when somebody is first offered, since most passes admit nobody."""
        if self._budget is not None:
            return self._budget
        assert self._running is not None, "begin comes first"
        (running, free, tokens, decoding), size = self._running, self.options.block_size
        # Rows that decode in this step have taken their blocks: what mixed rows are charged is there already.
        self._budget = PrefillBudget(
            available=free * size + decoding,
            page_size=size,
            ratio=self._controller.value,
            max_prefill_tokens=tokens,
            running=running.runners(),
            chunk_size=max(tokens, size),  # a step smaller than a page must get a prompt on, too
            mixed_decode_tokens=decoding,
            clip=self.options.clip_max_new_tokens,
        )
        return self._budget

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        self._granted = None
        if candidate.whole > free:
            return AdmissionTest.BLOCKS
        budget, size = self._opened(), self.options.block_size
        if others_scheduled and budget.state is Verdict.OTHER:
            return AdmissionTest.TOKENS
        grant = budget.offer(
            Offer(
                tokens=candidate.known_tokens,
                matched=candidate.matched_tokens,
                max_new=candidate.total_tokens - candidate.prompt_tokens,
                output_len=candidate.known_tokens - candidate.prompt_tokens,
                pinned=candidate.reused * size,
            )
        )
        if grant.extend > 0:
            self._granted = grant.extend
        elif others_scheduled:
            return AdmissionTest.TOKENS if grant.verdict is Verdict.OTHER else AdmissionTest.BLOCKS
        return None

    def extent(self, count: int) -> int:
        return count if self._granted is None else min(count, self._granted)

    def resume(self, prompt: Chunk, limit: int | None) -> int:
        return self._opened().offer_chunk(prompt, limit=limit).extend

    def lacking(
        self, candidate: Candidate, free: int, total: int, others_scheduled: bool, leaving: Leaving | None = None
    ) -> int:
        budget, size = self._opened(), self.options.block_size
        missing = candidate.whole - free
        if not others_scheduled:
            return missing
        room = budget.rem_total
        if leaving is not None:
            room += leaving.freed * size + sum(self.relief(leaving.rows))
        to_come = min(candidate.total_tokens - candidate.known_tokens, self.options.clip_max_new_tokens)
        return max(missing, -int((room - candidate.whole * size - to_come - size) // size) + 1)

    def need(self, candidate: Candidate) -> float:
        to_come = min(candidate.total_tokens - candidate.prompt_tokens, self.options.clip_max_new_tokens)
        return tokens_needed(candidate.known_tokens, candidate.matched_tokens, to_come, self._opened().rem_total)

    def relief(self, running: Running) -> list[float]:
        return [self._opened().expected(runner) for runner in running.runners()]

    def left(self, leaving: Leaving) -> None:
        self._opened().preempted(leaving.rows.runners(), leaving.freed * self.options.block_size)

    def stepped(self, *, decoded: bool) -> None:
        if decoded:
            self._controller.decay()

    def preempted(self, survivors: Running) -> None:
        decoded = int((survivors.known - survivors.prompt).sum())
        allowed = int((survivors.total - survivors.prompt).sum())
        self._controller.retract(decoded, allowed, len(survivors.known))

    def idle(self) -> None:
        self._controller.reset()


class Credit(AdmissionPolicy):
    """Reserve all that a request can ever hold, ⌈(P + N - 1)/B⌉ blocks, as a credit; pages are taken as tokens come.

    Active credits and draining pages never exceed the pool, so nobody is ever preempted, and who could ask for more
    than the pool is refused at the door. What the prefix cache would save is not counted.
    What those that don't run hold (sessions between two parts, transfers) counts: the free blocks must cover all that
    the running may still take.
    """

    name = "credit"
    reserves = True

    def __init__(self, options: AdmissionOptions) -> None:
        super().__init__(options)
        self._active = 0
        self._to_come = 0

    def begin(self, running: Running, free: int, tokens: int, decoding: int) -> None:
        self._active, self._to_come = self._credits(running)

    def _credits(self, running: Running) -> tuple[int, int]:
        """All that these rows can ever hold, and what of it they may still take; in blocks."""
        credits = -(-(running.total - 1) // self.options.block_size)
        return int(credits.sum()), int((credits - running.held).sum())

    def _credit(self, candidate: Candidate) -> int:
        return -(-(candidate.total_tokens - 1) // self.options.block_size)

    def refusal(self, total_tokens: int, usable: int) -> str:
        credit = -(-(total_tokens - 1) // self.options.block_size)
        if credit <= usable:
            return ""
        return f"prompt and outputs may take {credit} blocks; the pool has {usable}, and all of them must be reserved"

    def reserved(self, running: Running) -> int:
        return self._credits(running)[0]

    def test(self, candidate: Candidate, free: int, total: int, others_scheduled: bool) -> AdmissionTest | None:
        over = self._active + self._credit(candidate) - (total - 1)
        if over > 0:
            return AdmissionTest.CREDITS
        if over + self.draining > 0:
            return AdmissionTest.DRAINING
        return AdmissionTest.BLOCKS if self._to_come + self._yet_to_take(candidate) > free else None

    def lacking(
        self, candidate: Candidate, free: int, total: int, others_scheduled: bool, leaving: Leaving | None = None
    ) -> int:
        active, to_come = self._credits(leaving.rows) if leaving is not None else (0, 0)
        over = self._active - active + self._credit(candidate) + self.draining - (total - 1)
        return max(over, self._to_come - to_come + self._yet_to_take(candidate) - free)

    def _yet_to_take(self, candidate: Candidate) -> int:
        known = -(-candidate.known_tokens // self.options.block_size)
        return max(self._credit(candidate) - known + candidate.whole, candidate.now)

    def admitted(self, candidate: Candidate) -> None:
        self._active += self._credit(candidate)
        self._to_come += self._yet_to_take(candidate) - candidate.now

    def left(self, leaving: Leaving) -> None:
        active, to_come = self._credits(leaving.rows)
        self._active -= active
        self._to_come -= to_come
