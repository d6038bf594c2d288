"""A request as the scheduler sees it, and the one door through which its state changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.columns import pack_i32
from protocol.messages import NewRequest, RequestStatus, SamplingParams
from scheduler.hashing import CacheKeys
from scheduler.timeline import Timeline

if TYPE_CHECKING:
    from scheduler.policies.peak import Outlook

S = RequestStatus

_FINISHED = frozenset(status for status in S if status.is_finished)

#: From each live state, where a request may go. Terminal states lead nowhere.
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    S.WAITING: frozenset({S.RUNNING, S.WAITING_FOR_GRAMMAR, S.WAITING_FOR_REMOTE_KV}) | _FINISHED,
    S.WAITING_FOR_GRAMMAR: frozenset({S.WAITING}) | _FINISHED,
    S.WAITING_FOR_REMOTE_KV: frozenset({S.WAITING}) | _FINISHED,
    S.WAITING_FOR_INPUT: frozenset({S.WAITING}) | _FINISHED,
    S.RUNNING: frozenset({S.PREEMPTED, S.WAITING_FOR_INPUT}) | _FINISHED,
    S.PREEMPTED: frozenset({S.RUNNING, S.WAITING_FOR_GRAMMAR}) | _FINISHED,
} | {status: frozenset[RequestStatus]() for status in _FINISHED}


class IllegalTransition(RuntimeError):
    """A state change that the table doesn't have: a bug in the scheduler, never a client's fault."""


@dataclass(slots=True, eq=False)
class Request:
    """One request: logical progress (tokens) apart from physical residency (slot, blocks).

    `data` holds the known tokens as packed little-endian i32: the prompt, then outputs. While a request is RUNNING
    the outputs of its last, partial block live in the row table instead and are flushed here when the block is
    sealed or the request leaves the table.
    """

    id: int
    peer: int
    params: SamplingParams
    data: bytearray
    num_prompt: int
    max_total: int
    priority: int = 0
    arrival: int = 0
    label: str = ""
    cache_keys: CacheKeys = ()
    tenant: str = ""
    routing_key: str = ""
    kv_source: str = ""
    open: bool = False
    quarantined: bool = False
    """Whether it may have made a step fail, and runs apart until that is known."""
    status: RequestStatus = S.WAITING

    slot: int = -1
    incarnation: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    told: int = 0
    """Of prompt log-probabilities, if it asks for them: its API has those of the tokens before this index."""
    kept: int = 0
    """Tokens whose KV a request that isn't running still has: in `blocks`, or in `host_blocks` if it was swapped."""
    host_blocks: list[int] = field(default_factory=list)

    arrival_ns: int = 0
    arrival_processed: int = 0
    queued_ns: int = 0
    deadline_ns: int = 0
    expires_ns: int = 0
    first_admitted_ns: int = 0
    first_token_ns: int = 0
    timely: bool = False
    """Whether the first token came within its objective."""
    num_cached: int = -1
    num_preemptions: int = 0
    num_bypassed: int = 0
    num_replayed: int = 0
    high_water: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """Passes for which each admission test kept the request at the head of the queue; the latest test comes last."""
    held_ns: dict[str, int] = field(default_factory=dict)
    """How long each has, up to `held_since_ns`: from then on it is the latest one, None if the request isn't held."""
    held_since_ns: int | None = None
    outlook: Outlook | None = None
    """What the forecast said when it last kept the request out."""
    end_code: str = ""
    end_message: str = ""
    stop_token: int = -1
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def num_tokens(self) -> int:
        """Tokens in `data`: all known ones unless the request is RUNNING."""
        return len(self.data) >> 2

    @property
    def num_outputs(self) -> int:
        """Outputs in `data`; for a RUNNING request it may lag by what the table holds of its last block."""
        return self.num_tokens - self.num_prompt

    @property
    def held_by(self) -> str:
        """The test that held it back most recently; empty if none has."""
        return next(reversed(self.held), "") if self.held else ""

    @property
    def owes_prompt(self) -> bool:
        """Whether its API is still to be told log-probabilities of its prompt."""
        return self.params.prompt_logprobs >= 0 and self.told < self.num_prompt

    def held_back(self, test: str, now_ns: int) -> None:
        """One more pass at the head of the queue without entering, because of `test`."""
        self.let_go(now_ns)
        self.held[test] = self.held.pop(test, 0) + 1
        self.held_since_ns = now_ns

    def let_go(self, now_ns: int) -> None:
        """Nothing holds the request any more; the time goes to the test that did."""
        if self.held_since_ns is not None:
            self.held_ns[self.held_by] = self.held_ns.get(self.held_by, 0) + now_ns - self.held_since_ns
            self.held_since_ns = None

    def held_ms(self, now_ns: int) -> dict[str, float]:
        """How long each admission test has held the request, until now."""
        spent = {test: self.held_ns.get(test, 0) for test in self.held}
        if self.held_since_ns is not None:
            spent[self.held_by] += now_ns - self.held_since_ns
        return {test: round(ns / 1e6, 3) for test, ns in spent.items()}

    def introduced(self, num_computed: int) -> NewRequest:
        """What tells a runner all about it; the KV of its first `num_computed` tokens is in its blocks."""
        return NewRequest(
            id=self.id,
            incarnation=self.incarnation,
            tokens=bytes(self.data),
            num_prompt=self.num_prompt,
            num_computed=num_computed,
            block_ids=pack_i32(self.blocks),
            params=self.params,
            prompt_logprobs_from=self.told,
        )

    def transition(self, to: RequestStatus) -> None:
        """Change state. Raises IllegalTransition, naming both states, if the table doesn't allow it."""
        if to not in TRANSITIONS[self.status]:
            raise IllegalTransition(f"request {self.id}: {self.status.name} -> {to.name} is not a transition")
        self.status = to
