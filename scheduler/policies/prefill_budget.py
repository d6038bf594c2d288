"""What one prefill pass may take: memory now, memory to come, prompt tokens, and room for one unfinished chunk.

SGLang's arithmetic of admission. Counts only: the caller allocates, and says what is available.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

#: Most output tokens that the estimate counts for one request. It may still generate more.
CLIP_MAX_NEW_TOKENS = 4096

#: Spare tokens per live request in the simulation of completions.
_RESERVE = 1


class Verdict(StrEnum):
    """Whether a pass may go on with the next candidate, and what binds if not."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    """Memory: the pool can't take more."""
    OTHER = "other"
    """The pass is full: prompt tokens, chunk, or number of requests."""


class Runner(NamedTuple):
    """A running request, as the estimate sees it."""

    input_len: int
    output_len: int
    max_new: int
    ignore_eos: bool = False


class Candidate(NamedTuple):
    """A waiting request. All counts are tokens.

    `tokens` are all known ones: the prompt and, for one that comes back, its `output_len` outputs. `matched` of them
    are cached, and `pinned` of those are evictable as long as this request doesn't hold them. A request that simulated
    completions may not count as ending early has `ignore_eos`.
    """

    tokens: int
    matched: int = 0
    max_new: int = 0
    output_len: int = 0
    ignore_eos: bool = False
    pinned: int = 0


class Chunk(NamedTuple):
    """A prompt under way: `computed` of its `tokens` are done."""

    tokens: int
    computed: int
    max_new: int


class Grant(NamedTuple):
    """The answer to a candidate: `extend` tokens to compute now (0: not admitted), and a verdict.

    A candidate that isn't admitted is told what holds it back; with one that is, the verdict is about the *next*.
    """

    verdict: Verdict
    extend: int = 0
    unfinished: bool = False


class PrefillBudget:
    """The budgets of one pass. Offer the chunk under way first, then candidates in queue order.

    `rem_total` and `cur_rem` are what memory has left with and without the outputs to come, `rem_input` the prompt
    tokens and `rem_chunk` those of chunked prefill (None: off). Any of them may go below zero: the verdict then stops
    the pass.
    """

    def __init__(
        self,
        *,
        available: int,
        page_size: int,
        ratio: float,
        max_prefill_tokens: int,
        running: Sequence[Runner] = (),
        chunk_size: int | None = None,
        mixed_decode_tokens: int = 0,
        max_requests: int | None = None,
        truncation_align: int | None = None,
        one_chunk: bool = True,
        simulate_completions: bool = False,
        clip: int = CLIP_MAX_NEW_TOKENS,
    ) -> None:
        """`available`: tokens of the pool that are free or evictable. `ratio`: expected share of outputs to come.

        `mixed_decode_tokens` decode rows share the step. `one_chunk`: no prompt is cut while another is unfinished.
        `simulate_completions`: requests that ignore the end token are tested against simulated completions; only
        right without a prefix cache, where a completion frees all that the request occupied. `clip`: most outputs that
        are counted for one request.
        """
        self.available = available
        self.page_size = page_size
        self.ratio = ratio
        self._clip = clip
        self.rem_input = max_prefill_tokens - mixed_decode_tokens
        self.rem_chunk = None if chunk_size is None else chunk_size - mixed_decode_tokens
        self._current_offset: float = mixed_decode_tokens
        self._total_offset: float = mixed_decode_tokens + sum(self.expected(runner) for runner in running)
        self._running = list(running)
        self._max_requests = max_requests
        self._align = truncation_align
        self._one_chunk = one_chunk
        self._simulate = simulate_completions
        self._admitted: list[Runner] = []
        self._unfinished = False
        self._completions: list[tuple[float, int]] | None = None

    @property
    def rem_total(self) -> float:
        """Tokens of memory left after the expected outputs of everybody."""
        return self.available - self._total_offset

    @property
    def cur_rem(self) -> float:
        """Tokens of memory left for what is allocated at once."""
        return self.available - self._current_offset

    @property
    def state(self) -> Verdict:
        """Whether anything more can be offered."""
        if self.rem_total <= 0 or self.cur_rem <= 0:
            return Verdict.NO_TOKEN
        if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0):
            return Verdict.OTHER
        return Verdict.CONTINUE

    def expected(self, runner: Runner) -> float:
        """Output tokens that a running request is expected to add: its clipped remainder, scaled unless it must."""
        remaining = min(runner.max_new - runner.output_len, self._clip)
        return remaining * (1.0 if runner.ignore_eos else self.ratio)

    def preempted(self, victims: Iterable[Runner], freed: int) -> None:
        """Running requests left, and `freed` tokens became available: no more outputs are expected of them."""
        for victim in victims:
            self._total_offset -= self.expected(victim)
            self._running.remove(victim)
        self.available += freed

    # --- the chunk under way ------------------------------------------------------------------------------------

    def offer_chunk(self, chunk: Chunk, *, limit: int | None = None) -> Grant:
        """Continue the unfinished prompt. It always gets something to do while `rem_chunk` isn't used up.

        `limit` caps it further. A chunk that doesn't finish the prompt ends at a page border if there is one to reach.
        Raises ValueError when chunking is off.
        """
        if self.rem_chunk is None:
            raise ValueError("a chunk is under way although chunked prefill is off")
        room = min(self.rem_chunk, int(self.rem_total))
        if room <= 0:  # its memory only comes back once it finishes, so it must not wait for memory
            room = self.rem_chunk
        if limit is not None:
            room = min(room, limit)
        extend = chunk.tokens - chunk.computed
        if extend > room:
            self._unfinished = True
            aligned = (chunk.computed + room) // self.page_size * self.page_size - chunk.computed
            extend = aligned if aligned > 0 else max(room, 0)
        self._charge(Runner(chunk.tokens, 0, chunk.max_new), extend, reserve_output=not self._unfinished)
        return Grant(self.state, extend, self._unfinished)

    # --- candidates ---------------------------------------------------------------------------------------------

    def offer(self, candidate: Candidate) -> Grant:
        """Admit a candidate, whole or cut, or say what binds. Nothing changes when it isn't admitted."""
        if self._max_requests is not None and len(self._admitted) >= self._max_requests:
            return Grant(Verdict.OTHER)
        if candidate.ignore_eos and self._simulate:
            return self._offer_endless(candidate)
        extend = candidate.tokens - candidate.matched
        to_come = min(max(candidate.max_new - candidate.output_len, 0), self._clip)
        whole = extend + to_come + self.page_size
        if whole >= self.rem_total:
            return Grant(Verdict.NO_TOKEN)
        if self.rem_chunk is None and self._admitted and self._in_pages(extend) >= self.rem_input:
            return Grant(Verdict.OTHER)
        if whole >= self.rem_total - candidate.pinned:
            return Grant(Verdict.NO_TOKEN)
        return self._admit(candidate, extend)

    def _offer_endless(self, candidate: Candidate) -> Grant:
        """A request that runs to its limit. Its chunk isn't rounded: without a cache there is nothing to align to."""
        extend = candidate.tokens - candidate.matched
        now = self._in_pages(extend) + self.page_size
        if now > min(self.cur_rem, self.rem_total):
            return Grant(Verdict.NO_TOKEN)
        self._expect_completion(candidate)
        if not self._survives_completions(self.cur_rem - now):
            return Grant(Verdict.NO_TOKEN)
        return self._admit(candidate, extend, whole_pages=False)

    def _admit(self, candidate: Candidate, extend: int, *, whole_pages: bool = True) -> Grant:
        runner = Runner(
            candidate.tokens - candidate.output_len, candidate.output_len, candidate.max_new, candidate.ignore_eos
        )
        cut = self.rem_chunk is not None and self._in_pages(extend) > self.rem_chunk
        if cut:
            extend = self._cut(whole_pages)
            if extend <= 0:
                return Grant(Verdict.OTHER)
            self._unfinished = True
        self.available -= candidate.pinned
        self._charge(runner, extend, reserve_output=not cut)
        return Grant(self.state, extend, cut)

    def _cut(self, whole_pages: bool) -> int:
        """Tokens of a prompt that doesn't fit the chunk: whole pages, whole alignment units; 0 if there is no room."""
        if self.rem_chunk is None or (self._one_chunk and self._unfinished):
            return 0
        if not whole_pages:
            return max(self.rem_chunk, 0)
        room = self.rem_chunk // self.page_size * self.page_size
        return room // self._align * self._align if self._align else room

    def _charge(self, runner: Runner, extend: int, *, reserve_output: bool) -> None:
        """A cut prompt reserves no output: its last chunk will. One page is slack for the allocator's rounding."""
        paged = self._in_pages(extend)
        self._current_offset += paged + self.page_size
        self._total_offset += paged + self.page_size
        if reserve_output:
            self._total_offset += min(runner.max_new, self._clip)
        self.rem_input -= paged
        if self.rem_chunk is not None:
            self.rem_chunk -= paged
        self._admitted.append(runner)

    def _in_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    # --- simulated completions ----------------------------------------------------------------------------------

    def _expect_completion(self, candidate: Candidate) -> None:
        """Add the candidate to the expected completions, (tokens left, tokens occupied), fewest left first.

        A late entry goes before the last one even if it outlasts it. That only makes the test stricter.
        """
        mine = Runner(
            candidate.tokens - candidate.output_len, candidate.output_len, candidate.max_new, candidate.ignore_eos
        )
        if self._completions is None:
            everybody = (self._completion(runner) for runner in [mine, *self._running, *self._admitted])
            self._completions = sorted((each for each in everybody if each[0] > 0), key=lambda each: each[0])
            return
        entry = self._completion(mine)
        if entry[0] > 0:
            last = max(len(self._completions) - 1, 0)
            place = next((index for index, (left, _) in enumerate(self._completions) if entry[0] <= left), last)
            self._completions.insert(place, entry)

    def _completion(self, runner: Runner) -> tuple[float, int]:
        left = runner.max_new * (1.0 if runner.ignore_eos else self.ratio) - runner.output_len
        return left, runner.input_len + runner.output_len

    def _survives_completions(self, free: float) -> bool:
        """Whether memory lasts until each completion, with everybody who is left growing by a token a step."""
        assert self._completions is not None
        live = len(self._completions)
        for left, occupied in self._completions:
            if free - left * live <= _RESERVE * live:
                return False
            free += occupied
            live -= 1
        return True
