"""The block pool and prefix cache, as bookkeeping only: ids, reference counts and hashes, never memory.

Block 0 is the null block and is never handed out. The free list is ordered: at its front blocks without a known
content (the last freed is reused first), at its back cached blocks (the least recently used is evicted first).
A cached block with no holder *is* free: handing it out is what evicts it. `free + held = total` at all times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Hands out blocks, takes them back, and finds the longest run of cached ones for a chain of hashes."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError if nothing usable is left."""
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has no usable block beside the null block")
        self.num_blocks = num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.cached: dict[bytes, dict[int, None]] = {}
        self.evictions = 0
        self.version = 0
        """Changes whenever a look-up could give another answer."""

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be held."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without a holder, cached ones included."""
        return len(self.free)

    @property
    def usage(self) -> float:
        """Share of usable blocks that somebody holds, 0 to 1."""
        return 1.0 - len(self.free) / self.num_usable

    def longest_hit(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Ids of the cached blocks for the longest leading run of `hashes`, at most `limit` of them. Takes nothing."""
        hit: list[int] = []
        cached = self.cached
        for index in range(min(limit, len(hashes))):
            entry = cached.get(hashes[index])
            if entry is None:
                break
            hit.append(next(iter(entry)))
        return hit

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have no holder: holding them would use up that many free ones."""
        refs = self.refs
        return sum(1 for block in blocks if refs[block] == 0)

    def count_recoverable(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would become free if their holder let go: those with no other holder."""
        refs = self.refs
        return sum(1 for block in blocks if refs[block] == 1)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks from the front of the free list, evicting what they cached.

        Raises ValueError, with nothing taken, if there are not that many.
        """
        free, refs, hash_of = self.free, self.refs, self.hash_of
        if count > len(free):
            raise ValueError(f"{count} blocks wanted, {len(free)} free")
        taken = []
        for _ in range(count):
            block = free.popitem(last=False)[0]
            if hash_of[block] is not None:
                self.forget(block)
                self.evictions += 1
            refs[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of `blocks` (a prefix hit), free or not."""
        refs = self.refs
        for block in blocks:
            if refs[block] == 0:
                del self.free[block]
            refs[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """Take one holder off each of a request's blocks, given in table order; returns how many became free.

        The tail is freed first: of a prefix, the end is evicted before the beginning.
        """
        refs, free, hash_of = self.refs, self.free, self.hash_of
        unknown: list[int] = []
        freed = 0
        for block in reversed(blocks):
            count = refs[block] - 1
            if count < 0:
                raise ValueError(f"block {block} was released twice")
            refs[block] = count
            if count == 0:
                freed += 1
                if hash_of[block] is None:
                    unknown.append(block)
                else:
                    free[block] = None
        for block in reversed(unknown):
            free[block] = None
            free.move_to_end(block, last=False)
        return freed

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a held block findable under its content. Several blocks may carry one hash; none is merged."""
        if self.hash_of[block] is not None:
            raise ValueError(f"block {block} has a hash already")
        self.version += 1
        self.hash_of[block] = block_hash
        entry = self.cached.get(block_hash)
        if entry is None:
            self.cached[block_hash] = {block: None}
        else:
            entry[block] = None

    def forget(self, block: int) -> None:
        """Make a block unfindable. Its place in the free list is kept; a block without a hash is left alone."""
        block_hash = self.hash_of[block]
        if block_hash is None:
            return
        self.version += 1
        self.hash_of[block] = None
        entry = self.cached[block_hash]
        del entry[block]
        if not entry:
            del self.cached[block_hash]

    def adopt(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make free blocks findable from a runner's inventory, oldest first. Unknown or held ids are skipped."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if 0 < block < self.num_blocks and self.refs[block] == 0 and self.hash_of[block] is None:
                self.register(block, block_hash)
                self.free.move_to_end(block)

    def reset_cache(self) -> None:
        """Forget all cached content."""
        for block, block_hash in enumerate(self.hash_of):
            if block_hash is not None:
                self.forget(block)

    def check(self, holders: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong, as sentences (empty: nothing): counts against `holders`, the tables of all holders."""
        faults: list[str] = []
        expected = [0] * self.num_blocks
        for table in holders:
            for block in table:
                expected[block] += 1
        held = sum(1 for count in self.refs[1:] if count)
        if held + len(self.free) != self.num_usable:
            faults.append(f"free {len(self.free)} + held {held} is not {self.num_usable}")
        for block in range(self.num_blocks):
            if self.refs[block] != expected[block]:
                faults.append(f"block {block} has {self.refs[block]} references, {expected[block]} holders")
            if block and (self.refs[block] == 0) != (block in self.free):
                faults.append(f"block {block} is in the free list with {self.refs[block]} references")
        return faults
