"""A runner's view of the contract: executes steps over pages of token ids and names the first rule that one breaks.

No tensors and no sockets: a page holds the ids that were written to it, so a read of anything that is unwritten,
overwritten or somebody else's is seen at the step that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from protocol.columns import F32, i32, pack_i32, pack_u64, u64
from protocol.messages import (
    Limits,
    NewRequest,
    PromptLogprobs,
    RowError,
    SamplingParams,
    Step,
    StepFailure,
    StepResult,
    TokenLogprobs,
)

HASH_BYTES = 16
History = tuple[str, tuple[int, ...]]


class Violation(AssertionError):
    """The scheduler under test broke a rule of the contract."""


@dataclass(slots=True)
class Asked:
    """What an API asked for: the truth that steps and outputs are compared with."""

    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    emitted: int = 0
    incarnation: int = -1


@dataclass(slots=True)
class Resident:
    """A request on the runner: its known tokens, how many of them have KV, and where."""

    id: int
    incarnation: int
    tokens: list[int]
    num_prompt: int
    computed: int
    pages: list[int]
    asked: Asked
    told: int = 0
    dead: bool = False


@dataclass(slots=True)
class Seen:
    """One executed step, for tests to look at: tokens per request, and who arrived with how much computed."""

    epoch: int
    step_id: int
    counts: dict[int, int]
    arrived: dict[int, int] = field(default_factory=dict)
    sampled: list[int] = field(default_factory=list)


def _told(row: Resident, count: int) -> list[PromptLogprobs]:
    """What the next `count` tokens of a row tell of its prompt: of each its negative position."""
    first, end = max(row.computed + 1, row.told), min(row.computed + count + 1, row.num_prompt)
    if row.asked.params.prompt_logprobs < 0 or first >= end:
        return []
    own = -np.arange(first, end, dtype=F32)
    return [PromptLogprobs(row.id, row.incarnation, first, own.tobytes(), pack_i32([1] * len(own)))]


class Judge:
    """Executes the steps of one runner. `token(id, position)` is what a request samples at a position."""

    def __init__(
        self, limits: Limits, asked: Mapping[int, Asked], token: Callable[[int, int], int], hash_key: bytes = b""
    ) -> None:
        self.limits = limits
        self.hash_key = hash_key
        self.epoch = 0
        self.steps: list[Seen] = []
        self.residents: dict[int, Resident] = {}
        self.inventory: dict[int, bytes] = {}
        self._asked = asked
        self._token = token
        self._size = limits.block_size
        self._pages: list[list[int | None]] = [[None] * self._size for _ in range(limits.num_blocks)]
        self._history: list[History | None] = [None] * limits.num_blocks
        self._holders = [0] * limits.num_blocks
        self._of_hash: dict[bytes, History] = {}
        self._void: set[int] = set()
        self._void_pages: set[int] = set()
        self._last_step = 0

    def welcome(self, epoch: int) -> tuple[bytes, bytes]:
        """A scheduler takes over: residents go, pages stay. Returns the inventory's two columns."""
        self.epoch = epoch
        self.residents.clear()
        self._holders = [0] * self.limits.num_blocks
        self._void.clear()
        self._last_step = 0
        return pack_i32(list(self.inventory)), b"".join(self.inventory.values())

    def preempted(self) -> set[int]:
        """Requests that have been here in this epoch, aren't now, and have tokens to go."""
        been = {request_id for seen in self.steps if seen.epoch == self.epoch for request_id in seen.counts}
        return {request_id for request_id in been - self.residents.keys() if not self._is_complete(request_id)}

    def _is_complete(self, request_id: int) -> bool:
        asked = self._asked[request_id]
        sampled = sum(request_id in seen.sampled for seen in self.steps)
        return asked.emitted + sampled >= asked.params.max_tokens

    # --- one step -------------------------------------------------------------------------------------------

    def execute(
        self, step: Step, failure: StepFailure | None = None, row_errors: Mapping[int, tuple[str, str]] | None = None
    ) -> StepResult:
        """Check the step, run it, and make its result; with `failure` it fails instead. Raises Violation."""
        self._check_envelope(step)
        for request_id in u64(step.left).tolist():
            self._forget(request_id)
        ids, counts = u64(step.ids).tolist(), i32(step.num_tokens).tolist()
        self._grow(step, ids)  # first: a new request may share a page that a row grows by and fills in this very step
        for new in step.new:
            self._arrive(new)
        self._check_map(ids, counts)
        failure = failure or self._counts_on_void(step)
        seen = Seen(
            step.epoch, step.step_id, dict(zip(ids, counts, strict=True)), {n.id: n.num_computed for n in step.new}
        )
        self.steps.append(seen)
        if failure is not None:
            self._fail(step, ids)
            return StepResult(step.epoch, step.step_id, failure=failure)
        rows = [(self.residents[i], count) for i, count in seen.counts.items() if i not in self._void]
        rows = [(row, count) for row, count in rows if not row.dead]
        prompts = [part for row, count in rows for part in _told(row, count)]
        for row, count in rows:
            self._write(row, count)
        for row, _ in rows:
            self._read(row)
        result = replace(self._sample(step, seen, row_errors or {}), prompt_logprobs=prompts)
        self._record_filled(step)
        return result

    def _check_envelope(self, step: Step) -> None:
        self._require(step.epoch == self.epoch, f"step {step.step_id} has epoch {step.epoch}, {self.epoch} is granted")
        self._require(step.step_id > self._last_step, f"step {step.step_id} after step {self._last_step}")
        self._last_step = step.step_id
        self._require(not step.swap_out and not step.swap_in, "a swap, though the limits say host_blocks = 0")

    def _check_map(self, ids: list[int], counts: list[int]) -> None:
        limits = self.limits
        self._require(len(ids) == len(counts), f"{len(ids)} ids and {len(counts)} numbers of tokens")
        self._require(len(set(ids)) == len(ids), f"an id is scheduled twice: {ids}")
        self._require(all(count > 0 for count in counts), f"a row without tokens: {counts}")
        total, most = sum(counts), limits.max_num_batched_tokens
        self._require(total <= most, f"{total} tokens in a step, the runner takes {most}")
        self._require(len(ids) <= limits.max_num_seqs, f"{len(ids)} rows, the runner takes {limits.max_num_seqs}")
        here = len(self.residents)
        self._require(here <= limits.max_num_seqs, f"{here} residents, the runner has {limits.max_num_seqs} slots")
        unknown = [i for i in ids if i not in self.residents and i not in self._void]
        self._require(not unknown, f"computes {unknown}, which never arrived or have left")

    def _arrive(self, new: NewRequest) -> None:
        asked = self._asked.get(new.id)
        where = f"new request {new.id}"
        if asked is None:
            raise Violation(f"{where} was never asked for")
        self._require(new.id not in self.residents, f"{where} is here already and did not leave")
        self._require(
            new.incarnation > asked.incarnation, f"{where}: incarnation {new.incarnation} after {asked.incarnation}"
        )
        asked.incarnation = new.incarnation
        tokens, pages = i32(new.tokens).tolist(), i32(new.block_ids).tolist()
        known = [*asked.prompt, *(self._token(new.id, j) for j in range(len(asked.prompt), len(tokens)))]
        self._require(new.num_prompt == len(asked.prompt), f"{where}: {new.num_prompt} prompt tokens")
        self._require(tokens == known, f"{where}: its tokens are not its prompt and outputs")
        self._require(new.params == asked.params, f"{where}: its sampling parameters have changed")
        self._require(
            0 <= new.num_computed < len(tokens) and new.num_computed % self._size == 0,
            f"{where}: {new.num_computed} of {len(tokens)} tokens computed, in pages of {self._size}",
        )
        owes = asked.params.prompt_logprobs >= 0 and new.prompt_logprobs_from < new.num_prompt
        self._require(
            not owes or new.num_computed < max(new.prompt_logprobs_from, 1),
            f"{where}: {new.num_computed} tokens from pages, and the log-probabilities before "
            f"{new.prompt_logprobs_from} are known: those between would never be told",
        )
        cached = new.num_computed // self._size
        self._require(len(pages) >= cached, f"{where}: {len(pages)} pages for {new.num_computed} computed tokens")
        self._require(len(set(pages)) == len(pages), f"{where} holds a page twice: {pages}")
        self._void.discard(new.id)
        self._check_pages(pages)
        self._hand_over(pages[cached:], where)
        for page in pages[:cached]:
            self._holders[page] += 1
        self.residents[new.id] = Resident(
            *(new.id, new.incarnation, tokens, new.num_prompt, new.num_computed, pages, asked),
            max(new.prompt_logprobs_from, 1),
        )

    def _grow(self, step: Step, ids: list[int]) -> None:
        rows, counts = i32(step.grow_rows).tolist(), i32(step.grow_counts).tolist()
        pages = i32(step.grow_blocks).tolist()
        self._require(len(rows) == len(counts), f"{len(rows)} growing rows and {len(counts)} counts")
        self._require(len(set(rows)) == len(rows), f"a row grows twice: {rows}")
        self._require(all(0 <= row < len(ids) for row in rows), f"growing rows {rows} of {len(ids)}")
        self._require(sum(counts) == len(pages), f"{len(pages)} pages to grow by, the counts say {sum(counts)}")
        self._check_pages(pages)
        for row, count in zip(rows, counts, strict=True):
            taken, pages = pages[:count], pages[count:]
            resident = self.residents.get(ids[row])
            if resident is None:  # void since a step that failed
                self._clear(taken)
                self._void_pages.update(taken)
                continue
            self._hand_over(taken, f"request {resident.id}")
            resident.pages += taken

    def _check_pages(self, pages: list[int]) -> None:
        self._require(0 not in pages, "the null page is handed out")
        outside = [page for page in pages if not 0 < page < self.limits.num_blocks]
        self._require(not outside, f"pages {outside} of a pool of {self.limits.num_blocks}")

    def _hand_over(self, pages: list[int], who: str) -> None:
        taken = [page for page in pages if self._holders[page]]
        self._require(not taken, f"{who} is given pages {taken}, which a live request holds")
        self._clear(pages)
        for page in pages:
            self._holders[page] += 1

    def _clear(self, pages: list[int]) -> None:
        for page in pages:
            self._pages[page] = [None] * self._size
            self._history[page] = None
            self._void_pages.discard(page)
            self.inventory.pop(page, None)

    def _forget(self, request_id: int) -> None:
        self._void.discard(request_id)
        resident = self.residents.pop(request_id, None)
        if resident is not None:
            for page in resident.pages:
                self._holders[page] -= 1

    # --- computing ------------------------------------------------------------------------------------------

    def _write(self, row: Resident, count: int) -> None:
        size, end = self._size, row.computed + count
        who = f"request {row.id}"
        self._require(end <= len(row.tokens), f"{who} computes {end} tokens and knows {len(row.tokens)}")
        last = row.num_prompt + row.asked.params.max_tokens
        self._require(end < last, f"{who} computes its last token (of {last}), which nothing follows")
        self._require(end <= self.limits.max_model_len, f"{who} computes {end} tokens, past the context")
        self._require(end <= len(row.pages) * size, f"{who} computes {end} tokens in {len(row.pages)} pages")
        for position in range(row.computed, end):
            page = row.pages[position // size]
            self._pages[page][position % size] = row.tokens[position]
            if position % size == size - 1:
                self._history[page] = (row.asked.salt, tuple(row.tokens[: position + 1]))
        row.computed = end

    def _read(self, row: Resident) -> None:
        """What the row attends to is its own history, written by itself or, in whole pages, by an equal one."""
        size = self._size
        for index, page in enumerate(row.pages[: -(-row.computed // size)]):
            want = row.tokens[index * size : min((index + 1) * size, row.computed)]
            if self._pages[page][: len(want)] != want:
                raise Violation(f"request {row.id} reads page {page} ({self._pages[page]}), its history is {want}")
            if len(want) == size:
                history = (row.asked.salt, tuple(row.tokens[: (index + 1) * size]))
                self._require(self._history[page] == history, f"request {row.id} reads page {page} of another history")

    def _sample(self, step: Step, seen: Seen, row_errors: Mapping[int, tuple[str, str]]) -> StepResult:
        done: list[Resident] = []
        errors: list[RowError] = []
        for request_id in seen.counts:
            row = self.residents.get(request_id)
            if row is None or row.dead or row.computed < len(row.tokens):
                continue
            if request_id in row_errors:
                errors.append(RowError(request_id, row.incarnation, *row_errors[request_id]))
                row.dead = True
                continue
            done.append(row)
        for row in done:
            row.tokens.append(self._token(row.id, len(row.tokens)))
        seen.sampled = [row.id for row in done]
        return StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            ids=pack_u64([row.id for row in done]),
            incarnations=pack_i32([row.incarnation for row in done]),
            positions=pack_i32([len(row.tokens) - 1 for row in done]),
            tokens=pack_i32([row.tokens[-1] for row in done]),
            logprobs=[
                TokenLogprobs(row.id, len(row.tokens) - 1, -0.5, 1) for row in done if row.asked.params.logprobs >= 0
            ],
            errors=errors,
        )

    def _record_filled(self, step: Step) -> None:
        pages, hashes = i32(step.filled_blocks).tolist(), step.filled_hashes
        self._require(len(hashes) == HASH_BYTES * len(pages), f"{len(pages)} filled pages, {len(hashes)} hash bytes")
        self._check_pages(pages)
        for index, page in enumerate(pages):
            if page in self._void_pages:
                continue
            block_hash = hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]
            history = self._history[page]
            if history is None:
                raise Violation(f"page {page} is called filled and holds {self._pages[page]}")
            known = self._of_hash.setdefault(block_hash, history)
            self._require(known == history, f"one hash for two histories: {block_hash.hex()}")
            self.inventory[page] = block_hash

    # --- failure --------------------------------------------------------------------------------------------

    def _counts_on_void(self, step: Step) -> StepFailure | None:
        for new in step.new:
            cached = i32(new.block_ids).tolist()[: new.num_computed // self._size]
            if self._void_pages.intersection(cached):
                return StepFailure("voided_page", f"request {new.id} counts on pages whose step failed")
        return None

    def _fail(self, step: Step, ids: list[int]) -> None:
        """The step wrote nothing that may be trusted, and the runner has forgotten its rows."""
        for request_id in ids:
            resident = self.residents.get(request_id)
            if resident is not None:
                self._void_pages.update(resident.pages[resident.computed // self._size :])
                self._forget(request_id)
            self._void.add(request_id)
        self._void_pages.update(i32(step.filled_blocks).tolist())
        for page in self._void_pages:
            self._pages[page] = [None] * self._size
            self._history[page] = None
            self.inventory.pop(page, None)

    @staticmethod
    def _require(holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)
