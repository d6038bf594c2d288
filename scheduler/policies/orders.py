"""Who is next, as pure functions: from numbers about each waiting request to the positions in serving order.

SGLang's orders. Equal keys keep list order unless a function says otherwise; `priority` is smaller for more urgent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol, TypeVar

#: Orders that need to know what is cached. The first group is too dear for a long queue and gives way to fcfs.
_SHORT_QUEUE_ONLY = frozenset({"lpm", "hrrn"})
CACHE_AWARE = _SHORT_QUEUE_ONLY | {"dfs-weight", "shortest-prefill"}
CACHE_AGNOSTIC = frozenset({"fcfs", "lof", "random", "routing-key"})

Key = TypeVar("Key", contravariant=True)


class Waiting(NamedTuple):
    """A waiting request. Counts are tokens.

    `matched` of its `prompt_len + output_len` known tokens are cached (`output_len` isn't 0 for one that comes back).
    `entry` orders by when it joined the queue, `seen_processed` is the count of prefilled tokens at that moment.
    `deferred`: an earlier waiter shares its prefix, see `defer_sharers`. `path`: the nodes of its cached prefix from
    the root on, for `dfs_weight`.
    """

    id: str = ""
    prompt_len: int = 0
    output_len: int = 0
    matched: int = 0
    max_new: int = 0
    priority: int = 0
    entry: float = 0.0
    routing_key: str | None = None
    seen_processed: int = 0
    deferred: bool = False
    path: tuple[Hashable, ...] = ()

    @property
    def uncached(self) -> int:
        """Tokens to compute before the next output, at least one."""
        return max(self.prompt_len + self.output_len - self.matched, 1)


Order = list[int]


def _sorted(waiting: Sequence[Waiting], key: Callable[[Waiting], tuple[float | str, ...]]) -> Order:
    return sorted(range(len(waiting)), key=lambda index: key(waiting[index]))


def fcfs(waiting: Sequence[Waiting], *, by_priority: bool = False) -> Order:
    """First come, first served: list order. By priority: the most urgent first, then the earliest entry."""
    if not by_priority:
        return list(range(len(waiting)))
    return _sorted(waiting, lambda request: (request.priority, request.entry))


def longest_prefix(waiting: Sequence[Waiting]) -> Order:
    """The longest cached prefix first; deferred requests last."""
    return _sorted(waiting, lambda request: (math.inf if request.deferred else -request.matched,))


def longest_output(waiting: Sequence[Waiting], *, by_priority: bool = False) -> Order:
    """The most allowed output first, so that the long ones don't trail at the end."""
    return _sorted(waiting, lambda request: (request.priority if by_priority else 0, -request.max_new))


def shuffled(waiting: Sequence[Waiting], random: Random) -> Order:
    """Any order, decided by `random` alone."""
    order = list(range(len(waiting)))
    random.shuffle(order)
    return order


def by_routing_key(waiting: Sequence[Waiting], running_keys: Iterable[str | None]) -> Order:
    """Requests whose routing key runs already first, the most frequent key before others; then by key, none first.

    While no key runs, list order.
    """
    running = Counter(key for key in running_keys if key)
    if not running:
        return fcfs(waiting)

    def rank(request: Waiting) -> tuple[bool, int, str]:
        key = request.routing_key or ""
        return (key not in running, -running[key], key)

    return _sorted(waiting, rank)


def highest_response_ratio(waiting: Sequence[Waiting], processed: int) -> Order:
    """The longest wait per token to compute first; deferred requests last, equal ones by id.

    The wait is counted in tokens that the server has prefilled meanwhile (`processed`: its counter now). Outputs that
    a request brings back don't count as work; one with all of its prompt cached goes first.
    """

    def rank(request: Waiting) -> tuple[float | str, ...]:
        left = request.prompt_len - request.matched
        if request.deferred:
            return (math.inf, request.id)
        if left <= 0:
            return (-math.inf, request.id)
        return (-(processed - request.seen_processed) / left, request.id)

    return _sorted(waiting, rank)


def shortest_prefill(waiting: Sequence[Waiting]) -> Order:
    """The fewest tokens to compute first, then the earliest entry; deferred requests last, in the same order."""
    return _sorted(waiting, lambda request: (request.deferred, request.uncached, request.entry))


def dfs_weight(waiting: Sequence[Waiting], age: Callable[[Hashable], float] | None = None) -> Order:
    """Depth first through the tree of cached prefixes, the subtree with most waiting requests first.

    A node's own requests come after those of its children, so what is wanted next is what was used last. Equally
    heavy siblings go by `age`, smaller first; without it, by the order in which waiting requests mention them.
    """
    weight = Counter(node for request in waiting for node in request.path)
    if age is None:
        age = {node: float(seen) for seen, node in enumerate(weight)}.__getitem__
    older = age
    after_children = (math.inf, 0.0)

    def rank(index: int) -> tuple[tuple[float, float], ...]:
        return (*((-weight[node], older(node)) for node in waiting[index].path), after_children)

    return sorted(range(len(waiting)), key=rank)


def chunk_limit(budget: int, page_size: int, remaining: int, works: Iterable[int]) -> int | None:
    """Most tokens for a prompt under way with `remaining` to go, so that shorter waiters fit beside it.

    `works`: tokens that waiters have to compute, shortest first. Only whole ones get room, in pages, as long as a page
    is left for the prompt. None: nobody gets room, no limit. Part of the shortest-prefill order.
    """
    reserved = 0
    for work in works:
        paged = -(-work // page_size) * page_size
        if work >= remaining or reserved + paged > budget - page_size:
            break
        reserved += paged
    return budget - reserved if reserved else None


class PrefixIndex(Protocol[Key]):
    """A set of sequences that knows how much of another one it has. What a sequence is, is the index's matter."""

    def matched(self, key: Key) -> int:
        """Tokens in the longest common prefix with anything inserted."""

    def insert(self, key: Key) -> None:
        """Add a sequence."""


class ChainIndex:
    """A prefix index over chains of block hashes, in which each hash stands for all blocks up to its own."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: set[bytes] = set()

    def matched(self, key: Sequence[bytes]) -> int:
        """Tokens in the leading blocks that are known."""
        for count, block_hash in enumerate(key):
            if block_hash not in self._known:
                return count * self._block_size
        return len(key) * self._block_size

    def insert(self, key: Sequence[bytes]) -> None:
        """Make all blocks of a chain known."""
        self._known.update(key)


def defer_sharers(
    keys: Sequence[Key], matched: Sequence[int], queue: PrefixIndex[Key], *, check: int = 32, share: int = 32
) -> list[bool]:
    """Which waiting requests should let an earlier one with the same prefix go first, to hit what it leaves.

    `matched[i]` tokens of request i are cached already; beyond `check` of them it is served as it is (-1: all are).
    `queue` starts empty and collects those that aren't deferred; sharing `share` tokens with it defers a request.
    """
    deferred = []
    for key, cached in zip(keys, matched, strict=True):
        defer = False
        if cached <= check:
            defer = queue.matched(key) >= share
            if not defer:
                queue.insert(key)
        deferred.append(defer)
    return deferred


def active_policy(
    policy: str,
    num_waiting: int,
    *,
    has_cache: bool = True,
    limit: int = 128,
    short_queue_only: Container[str] = _SHORT_QUEUE_ONLY,
) -> str:
    """The order in force for one pass: `policy`, or fcfs in its place.

    An order that looks at the cache gives way when there is none, and `short_queue_only` ones when more than `limit`
    wait. Raises ValueError for an unknown policy, and for shortest-prefill without a cache.
    """
    if policy not in CACHE_AWARE | CACHE_AGNOSTIC:
        raise ValueError(
            f"unknown queue policy {policy!r}; there are {', '.join(sorted(CACHE_AWARE | CACHE_AGNOSTIC))}"
        )
    if policy in CACHE_AWARE and not has_cache:
        if policy == "shortest-prefill":
            raise ValueError("queue policy 'shortest-prefill' needs the prefix cache, which is off")
        return "fcfs"
    if policy in short_queue_only and num_waiting > limit:
        return "fcfs"
    return policy


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What orders look at besides the queue. Each uses only its own fields."""

    by_priority: bool = False
    processed: int = 0
    running_keys: Sequence[str | None] = ()
    random: Random = field(default_factory=lambda: Random(0))
    age: Callable[[Hashable], float] | None = None


def arrange(policy: str, waiting: Sequence[Waiting], around: Surroundings) -> Order:
    """The order of an *active* policy. Priorities count in fcfs and lof only."""
    match policy:
        case "fcfs":
            return fcfs(waiting, by_priority=around.by_priority)
        case "lof":
            return longest_output(waiting, by_priority=around.by_priority)
        case "lpm":
            return longest_prefix(waiting)
        case "dfs-weight":
            return dfs_weight(waiting, around.age)
        case "hrrn":
            return highest_response_ratio(waiting, around.processed)
        case "shortest-prefill":
            return shortest_prefill(waiting)
        case "routing-key":
            return by_routing_key(waiting, around.running_keys)
        case "random":
            return shuffled(waiting, around.random)
    raise ValueError(f"unknown queue policy {policy!r}")
