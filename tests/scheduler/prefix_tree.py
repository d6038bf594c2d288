"""A plain prefix tree over token ids, in whole pages, with locks and eviction: the cache behind recorded decisions.

For tests only: slow, obvious, and without any KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Tokens = tuple[int, ...]


class Key(NamedTuple):
    """Tokens in a namespace. Namespaces never share."""

    tokens: Tokens
    space: str | None = None


class Node:
    """A run of whole pages below its parent. `order` is when its place among its siblings was taken."""

    def __init__(self, tokens: Tokens, order: int) -> None:
        self.tokens = tokens
        self.order = order
        self.children: dict[tuple[str | None, Tokens], Node] = {}
        self.locks = 0


class PrefixTree:
    """Cached sequences. A match that ends inside a node splits it, so that matched tokens are always whole nodes."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node((), 0)
        self._orders = 0

    def path(self, key: Key) -> list[Node]:
        """The nodes of the longest cached prefix, from the top."""
        node, tokens, path = self.root, key.tokens, []
        while len(tokens) >= self.page_size:
            slot = (key.space, tokens[: self.page_size])
            child = node.children.get(slot)
            if child is None:
                break
            same = self._common(child.tokens, tokens)
            if same < len(child.tokens):
                child = node.children[slot] = self._split(child, same, key.space)
            path.append(child)
            node, tokens = child, tokens[same:]
        return path

    def matched(self, key: Key) -> int:
        """Tokens of the longest cached prefix."""
        return sum(len(node.tokens) for node in self.path(key))

    def insert(self, key: Key) -> None:
        """Cache a sequence, up to its last whole page."""
        path = self.path(key)
        node = path[-1] if path else self.root
        have = sum(len(each.tokens) for each in path)
        rest = key.tokens[have : len(key.tokens) // self.page_size * self.page_size]
        if rest:
            self._orders += 1
            node.children[key.space, rest[: self.page_size]] = Node(rest, self._orders)

    def lock(self, path: Sequence[Node]) -> None:
        """A request holds these nodes, from the root on: they can't be evicted."""
        for node in path:
            node.locks += 1

    @staticmethod
    def unlocked(path: Sequence[Node]) -> int:
        """Tokens in those nodes that nobody holds."""
        return sum(len(node.tokens) for node in path if not node.locks)

    def evictable(self) -> int:
        """Tokens in all nodes that nobody holds."""
        total, below = 0, list(self.root.children.values())
        while below:
            node = below.pop()
            total += 0 if node.locks else len(node.tokens)
            below += node.children.values()
        return total

    def _common(self, left: Tokens, right: Tokens) -> int:
        """Tokens in the common prefix, rounded down to pages."""
        same = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )
        return same // self.page_size * self.page_size

    def _split(self, node: Node, at: int, space: str | None) -> Node:
        """Put a new node with the first `at` tokens in the old one's place; returns it."""
        upper = Node(node.tokens[:at], node.order)
        upper.locks = node.locks
        node.tokens = node.tokens[at:]
        upper.children[space, node.tokens[: self.page_size]] = node
        return upper
