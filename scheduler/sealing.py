"""Which blocks become findable, under which hash, and by which step: the prefix cache's side of running requests.

A block is sealed once all of its tokens are known and computed or in flight. Until the step that fills it is back, it
is remembered with that step's number, so that a step that fails takes its blocks out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from scheduler.hashing import BlockHasher, CacheKeys
from scheduler.request import Request
from scheduler.table import SlotArray

if TYPE_CHECKING:
    from scheduler.core import CoreScheduler


class Sealing:
    """Hashes requests' blocks and registers them. Made anew for a runner that holds nothing."""

    def __init__(self, core: CoreScheduler, hash_key: bytes) -> None:
        self._core = core
        self._hasher = BlockHasher(hash_key, 4 * core.block_size)
        self._filled: list[tuple[int, bytes]] = []
        self._registered: deque[tuple[int, int, bytes]] = deque()

    def find_hit(self, request: Request) -> list[int]:
        """Cached blocks for the request's leading tokens. At least one token is left to compute, and those that tell
        what is owed of the prompt."""
        core = self._core
        if not core.config.enable_prefix_caching:
            return []
        limit = (request.told if request.owes_prompt else request.num_tokens) - 1
        limit //= core.block_size
        self._hash_up_to(request, limit)
        return core.pool.longest_hit(request.hashes, limit)

    def count_cached(self, data: bytes, keys: CacheKeys) -> int:
        """How many leading tokens of `data` (packed i32) are cached. Costs one hash more than it finds blocks."""
        hashes: list[bytes] = []
        root, cached = self._hasher.root(keys), self._core.pool.cached
        for count in range(len(data) // (4 * self._core.block_size)):
            self._hasher.extend(root, data, hashes, count + 1)
            if hashes[count] not in cached:
                return count * self._core.block_size
        return len(hashes) * self._core.block_size

    def _hash_up_to(self, request: Request, num_blocks: int) -> None:
        if len(request.hashes) < num_blocks:
            root = self._hasher.root(request.cache_keys)
            self._hasher.extend(root, request.data, request.hashes, num_blocks)

    def count_sealed(self, blocks: list[int]) -> int:
        """How many of a request's leading blocks are findable already."""
        hash_of = self._core.pool.hash_of
        return next((index for index, block in enumerate(blocks) if hash_of[block] is None), len(blocks))

    def seal_full(self, slots: SlotArray) -> None:
        """Make findable the blocks of these rows whose tokens are all known and computed (or in flight)."""
        core = self._core
        table = core.table
        full = np.minimum(table.computed[slots], table.known[slots]) // core.block_size
        due = full > table.sealed[slots]
        if not np.count_nonzero(due):
            return
        slots, full = slots[due], full[due]
        sealed = table.sealed[slots].tolist()
        table.sealed[slots] = full
        table.flush_many(slots)
        if not core.config.enable_prefix_caching:
            return
        for slot, start, upto in zip(slots.tolist(), sealed, full.tolist(), strict=True):
            request = table.request[slot]
            assert request is not None
            self.seal(request, start, upto)

    def seal(self, request: Request, start: int, upto: int) -> None:
        """Make findable the blocks from `start` to `upto` of a request, all of whose tokens are in its data."""
        core = self._core
        pool, step_id = core.pool, core.step_id + 1
        self._hash_up_to(request, upto)
        for block, block_hash in zip(request.blocks[start:upto], request.hashes[start:upto], strict=True):
            if pool.hash_of[block] is None:
                pool.register(block, block_hash)
                self._filled.append((block, block_hash))
                self._registered.append((step_id, block, block_hash))

    @property
    def settled(self) -> bool:
        """Whether the runner has been told of all blocks filled so far, and has filled them."""
        return not (self._filled or self._registered)

    def take_back(self, blocks: Iterable[int]) -> None:
        """The next step will not fill these blocks after all."""
        mine, unsent = set(blocks), self._core.step_id + 1
        undone = {block for step_id, block, _ in self._registered if step_id == unsent and block in mine}
        for block in undone:
            self._core.pool.forget(block)
        self._registered = deque(entry for entry in self._registered if entry[1] not in undone)
        self._filled = [entry for entry in self._filled if entry[0] not in undone]

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody else shall read these blocks."""
        for block in blocks:
            self._core.pool.forget(block)
        self._filled = self.filled()

    def filled(self) -> list[tuple[int, bytes]]:
        """(block, hash) of what is full since the last step was sent. A block that was given to somebody else since it
        was sealed holds that content no longer, and isn't among them."""
        hash_of = self._core.pool.hash_of
        return [(block, block_hash) for block, block_hash in self._filled if hash_of[block] == block_hash]

    def step_sent(self) -> None:
        """A step that tells of all blocks filled so far is on its way."""
        self._filled = []

    def step_done(self, step_id: int) -> None:
        """What this step and those before it were to fill is filled."""
        while self._registered and self._registered[0][0] <= step_id:
            self._registered.popleft()

    def step_failed(self, step_id: int) -> None:
        """What this step and those behind it were to fill can't be trusted."""
        pool = self._core.pool
        for filled_by, block, block_hash in self._registered:
            if filled_by >= step_id and pool.hash_of[block] == block_hash:
                pool.forget(block)
        self._registered = deque(entry for entry in self._registered if entry[0] < step_id)
        self._filled.clear()

    def forget_all(self) -> int:
        """Forget all cached content. Returns how many hashes there were."""
        forgotten = len(self._core.pool.cached)
        self._core.pool.reset_cache()
        self._filled.clear()
        self._registered.clear()
        return forgotten
