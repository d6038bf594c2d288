"""To which of several replicas a new request goes: where its prefix is cached, unless the load is too uneven.

The rule is that of SGLang's router (`cache_aware`), in tokens instead of requests: docs/replicas.md. It decides from
what its caller says of the replicas and from what it has placed before; same calls, same answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from scheduler.hashing import BlockHasher, CacheKeys

CHUNK_TOKENS = 64
"""Prompts are compared in pieces of this many tokens: a quarter of the digests that blocks of 16 would take."""
BALANCE_STEPS = 8
RECENT_PROMPTS = 4096
"""Prompts of which the replica is remembered for further choices, which come right behind the first."""
ROUND = 1 << 16
"""More than there are replicas."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a replica is chosen. `balance_tokens` 0 stands for what `BALANCE_STEPS` full steps compute."""

    policy: str = "prefix"
    min_match: float = 0.3
    balance_tokens: int = 0
    balance_ratio: float = 1.5


@dataclass(frozen=True, slots=True)
class Standing:
    """One replica at this moment. `load` is the work, in tokens, of all that it has been given and has not ended;
    `free_tokens` what its free blocks hold, `step_tokens` what a step computes at most."""

    number: int
    load: float
    free_tokens: int
    capacity_tokens: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Where a request goes, how many of its leading tokens are known there, and which part of the rule said so."""

    number: int
    known_tokens: int
    why: str


class Affinity:
    """Which prefixes each replica was sent of late: as many pieces as its pool has room for, least recently used go.

    So memory is bounded by the pools' sizes, and what a replica's cache has evicted is forgotten here at about the
    same time. What it computed itself, the outputs, becomes known with the next turn's prompt.
    """

    def __init__(self) -> None:
        self._hasher = BlockHasher(b"placement", 4 * CHUNK_TOKENS)
        self._known: dict[int, OrderedDict[bytes, None]] = {}

    def hashes(self, prompt: bytes, keys: CacheKeys) -> list[bytes]:
        """One digest for each whole piece of a prompt (packed i32), each for all up to its end."""
        found: list[bytes] = []
        self._hasher.extend(self._hasher.root(keys), prompt, found, len(prompt) // (4 * CHUNK_TOKENS))
        return found

    def match(self, replica: int, hashes: Sequence[bytes]) -> int:
        """How many leading pieces of a prompt the replica was sent."""
        known = self._known.get(replica)
        if not known:
            return 0
        return next((index for index, one in enumerate(hashes) if one not in known), len(hashes))

    def add(self, replica: int, hashes: Sequence[bytes], capacity_tokens: int) -> None:
        """A prompt is sent there. The end of a prefix is forgotten before its beginning."""
        known = self._known.setdefault(replica, OrderedDict())
        for one in reversed(hashes):
            known[one] = None
            known.move_to_end(one)
        while len(known) > max(capacity_tokens // CHUNK_TOKENS, 1):
            known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Its cache is empty."""
        self._known.pop(replica, None)

    def size(self, replica: int) -> int:
        """Pieces remembered of one replica."""
        return len(self._known.get(replica, ()))


class Placement:
    """Chooses replicas for requests, and remembers what it has sent where."""

    def __init__(self, rules: Rules) -> None:
        self.affinity = Affinity()
        self._rules = rules
        self._next = 0
        self._latest: OrderedDict[bytes, int] = OrderedDict()

    def choose(
        self,
        prompt: bytes,
        keys: CacheKeys,
        standings: Sequence[Standing],
        *,
        choice: int = 0,
        ask: Callable[[int], int] = lambda number: 0,
        ask_always: bool = False,
    ) -> Chosen:
        """The replica for a prompt, out of one or more that can take it. `ask` looks up how many of its leading tokens
        a replica's cache holds; it is called where nothing is remembered, or `ask_always`. Choices after the first of
        one prompt follow the first, if its replica is among them."""
        hashes, num_tokens = self.affinity.hashes(prompt, keys), len(prompt) >> 2
        whole = blake2b(prompt, digest_size=16).digest()
        chosen = self._follow(whole, standings, num_tokens) if choice else None
        if chosen is None:
            known = {one.number: CHUNK_TOKENS * self.affinity.match(one.number, hashes) for one in standings}
            if ask_always or not any(known.values()):
                known = {number: max(remembered, ask(number)) for number, remembered in known.items()}
            chosen = self._decide(known, num_tokens, standings)
        capacity = next(one.capacity_tokens for one in standings if one.number == chosen.number)
        self.affinity.add(chosen.number, hashes, capacity)
        self._remember(whole, chosen.number)
        return chosen

    def _follow(self, whole: bytes, standings: Sequence[Standing], num_tokens: int) -> Chosen | None:
        number = self._latest.get(whole, -1)
        here = any(standing.number == number for standing in standings)
        return Chosen(number, num_tokens, "choice") if here else None

    def _remember(self, whole: bytes, number: int) -> None:
        self._latest[whole] = number
        self._latest.move_to_end(whole)
        if len(self._latest) > RECENT_PROMPTS:
            self._latest.popitem(last=False)

    def _decide(self, known: Mapping[int, int], num_tokens: int, standings: Sequence[Standing]) -> Chosen:
        rules = self._rules
        if rules.policy == "round-robin":
            first = min(standings, key=lambda one: ((one.number - self._next) % ROUND, one.number))
            self._next = first.number + 1
            return Chosen(first.number, known[first.number], "turn")

        def room(one: Standing) -> bool:
            return one.free_tokens >= num_tokens - known[one.number]

        def by_load(one: Standing) -> tuple[bool, float, int, int]:
            return not room(one), one.load, self.affinity.size(one.number), one.number

        lightest = min(standings, key=by_load)
        if rules.policy == "least-loaded":
            return Chosen(lightest.number, known[lightest.number], "load")
        heaviest, least = max(one.load for one in standings), min(one.load for one in standings)
        bound = rules.balance_tokens or BALANCE_STEPS * max(one.step_tokens for one in standings)
        if heaviest - least > bound and heaviest > rules.balance_ratio * least:
            return Chosen(lightest.number, known[lightest.number], "uneven")
        nearest = min(standings, key=lambda one: (-known[one.number], *by_load(one)))
        if not known[nearest.number] or known[nearest.number] < rules.min_match * num_tokens:
            return Chosen(lightest.number, known[lightest.number], "load")
        if not room(nearest) and room(lightest):
            return Chosen(lightest.number, known[lightest.number], "room")
        return Chosen(nearest.number, known[nearest.number], "prefix")
