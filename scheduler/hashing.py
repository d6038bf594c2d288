"""Block hashes: a keyed, chained 128-bit blake2b, so that equal hashes mean equal token histories.

hash(block) = blake2b(parent || tokens, key), and the first block's parent is a root that commits to everything else
the KV depends on, as tagged pairs: ("salt", "x") and ("adapter", "x") can't collide, nor can "ab"+"c" and "a"+"bc".
The key is drawn by the runner at its start, so that hashes can't be precomputed from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(key: bytes, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    """The parent of a first block. `extra` are (kind, value) pairs; their order matters, their lengths are hashed."""
    digest = blake2b(key=key, digest_size=HASH_BYTES, person=b"triptych-root")
    for kind, value in extra:
        for part in (kind.encode(), value.encode()):
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part)
    return digest.digest()


def extend_hashes(
    key: bytes, root: bytes, data: bytes | bytearray, hashes: list[bytes], num_blocks: int, block_bytes: int
) -> None:
    """Append to `hashes` until it covers the first `num_blocks` blocks of `data` (packed i32 tokens)."""
    parent = hashes[-1] if hashes else root
    view = memoryview(data)
    for index in range(len(hashes), num_blocks):
        digest = blake2b(parent, key=key, digest_size=HASH_BYTES)
        digest.update(view[index * block_bytes : (index + 1) * block_bytes])
        parent = digest.digest()
        hashes.append(parent)
