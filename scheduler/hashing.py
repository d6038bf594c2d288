"""Block hashes: a keyed, chained 128-bit blake2b, so that equal hashes mean equal token histories.

hash(block) = blake2b(parent || tokens, key), and the first block's parent is a root that commits to everything else
the KV depends on, as tagged pairs: ("salt", "x") and ("adapter", "x") can't collide, nor can "ab"+"c" and "a"+"bc".
The key is drawn by the runner at its start, so that hashes can't be precomputed from outside.
"""

from __future__ import annotations

from hashlib import blake2b

HASH_BYTES = 16

CacheKeys = tuple[tuple[str, str], ...]
"""(kind, value) pairs that a request's KV depends on beside its tokens. Requests share blocks if all are equal."""


def cache_keys(salt: str, adapter: str, adapter_generation: int) -> CacheKeys:
    """The pairs of a request; empty values add none. A generation tells the loads of one adapter apart."""
    keys = [("salt", salt)] if salt else []
    if adapter:
        keys += [("adapter", adapter), ("adapter_generation", str(adapter_generation))]
    return tuple(keys)


class BlockHasher:
    """Hashes under one key. `block_bytes` is the size of a block of packed i32 tokens."""

    def __init__(self, key: bytes, block_bytes: int) -> None:
        self._key = key
        self._block_bytes = block_bytes
        self._keyed = blake2b(key=key, digest_size=HASH_BYTES)
        """Copied for each block: a third cheaper than making a keyed one."""
        self._plain_root = self._root(())

    def root(self, keys: CacheKeys = ()) -> bytes:
        """The parent of a first block. The order of `keys` matters, and their lengths are hashed too."""
        return self._root(keys) if keys else self._plain_root

    def _root(self, keys: CacheKeys) -> bytes:
        digest = blake2b(key=self._key, digest_size=HASH_BYTES, person=b"triptych-root")
        for pair in keys:
            for part in pair:
                encoded = part.encode()
                digest.update(len(encoded).to_bytes(4, "little"))
                digest.update(encoded)
        return digest.digest()

    def extend(self, root: bytes, data: bytes | bytearray, hashes: list[bytes], num_blocks: int) -> None:
        """Append to `hashes` until it covers the first `num_blocks` blocks of `data` (packed i32 tokens)."""
        parent, size = hashes[-1] if hashes else root, self._block_bytes
        for start in range(len(hashes) * size, num_blocks * size, size):
            digest = self._keyed.copy()
            digest.update(parent + data[start : start + size])
            parent = digest.digest()
            hashes.append(parent)
