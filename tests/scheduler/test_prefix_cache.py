"""Blocks that are found again: when, by whom, and that a hit never reads what nobody wrote."""

from __future__ import annotations

import pytest

from scheduler.blocks import BlockPool
from scheduler.hashing import BlockHasher
from tests.scheduler.isolated import Isolated, solo_tokens

PROMPT = list(range(500, 564))


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_full_hit_leaves_at_least_one_token_to_compute(length: int) -> None:
    isolated = Isolated(16)
    isolated.add(1, PROMPT[:length], max_tokens=3)
    isolated.drain()
    isolated.add(2, PROMPT[:length], max_tokens=3)
    first = isolated.step()
    cached = (length - 1) // 16 * 16
    assert first == {2: length - cached}
    isolated.drain()
    assert isolated.finished[2].num_cached_tokens == cached <= length - 1


def test_step_size_is_what_the_lookup_leaves() -> None:
    prompt = [7 + j % 9000 for j in range(465)]
    isolated = Isolated(64)
    isolated.add(1, [*prompt[:256], 3], max_tokens=1)
    isolated.drain()
    isolated.add(2, prompt, max_tokens=1)
    assert isolated.step() == {2: 209}
    assert isolated.steps[-1] is not None and isolated.steps[-1].new[0].num_computed == 256


def test_twins_in_one_step_share_what_the_first_computes() -> None:
    isolated = Isolated(32)
    isolated.add(1, [*PROMPT, 1], max_tokens=2)
    isolated.add(2, [*PROMPT, 2], max_tokens=2)
    assert isolated.step() == {1: 65, 2: 1}
    isolated.drain()


def test_only_the_part_that_is_computed_is_found() -> None:
    isolated = Isolated(32, max_num_batched_tokens=32)
    isolated.add(1, [*PROMPT, 1], max_tokens=2)
    assert isolated.step() == {1: 32}
    isolated.abort(1)
    isolated.add(2, [*PROMPT, 2], max_tokens=2)
    assert isolated.step() == {2: 32}, "half of the prompt was computed by the aborted request, half was not"
    assert isolated.core.requests[2].num_cached == 32
    isolated.drain()


def test_a_failed_step_takes_back_what_it_would_have_filled() -> None:
    isolated = Isolated(32)
    isolated.add(1, [*PROMPT, 1], max_tokens=2)
    isolated.fail_next()
    isolated.add(3, [*PROMPT, 3], max_tokens=2)
    isolated.drain()
    assert isolated.finished[3].num_cached_tokens in (0, 32, 64), "found only after the retry has computed it"
    assert isolated.tokens[1] == solo_tokens(1, 65, 2) and isolated.tokens[3] == solo_tokens(3, 65, 2)


def test_the_cache_can_be_switched_off() -> None:
    isolated = Isolated(32, enable_prefix_caching=False)
    for request_id in (1, 2):
        isolated.add(request_id, PROMPT, max_tokens=2)
        isolated.drain()
    assert isolated.finished[2].num_cached_tokens == 0
    assert not isolated.core.pool.cached


def test_without_a_prefix_cache_nothing_counts_as_looked_up_in_it() -> None:
    isolated = Isolated(64, enable_prefix_caching=False)
    isolated.add(1, 20)
    isolated.drain()
    stats = isolated.core.stats
    assert (stats.prompt_tokens, stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (20, 0, 0)


def test_outputs_are_found_by_the_next_turn() -> None:
    isolated = Isolated(32)
    isolated.add(1, PROMPT[:20], max_tokens=40)
    isolated.drain()
    isolated.add(2, PROMPT[:20] + isolated.tokens[1] + [9, 9], max_tokens=2)
    isolated.drain()
    assert isolated.finished[2].num_cached_tokens == 48


def test_salts_never_share_and_repeats_do() -> None:
    isolated = Isolated(64)
    for request_id, salt in enumerate(["", "x", "y", "ab", "a"], start=1):
        isolated.add(request_id, PROMPT, max_tokens=1, cache_salt=salt)
        isolated.drain()
        assert isolated.finished[request_id].num_cached_tokens == 0
    for request_id, salt in enumerate(["", "x", "y", "ab", "a"], start=11):
        isolated.add(request_id, PROMPT, max_tokens=1, cache_salt=salt)
        isolated.drain()
        assert isolated.finished[request_id].num_cached_tokens == 48


def test_roots_commit_to_kind_value_and_border_of_each_extra_key() -> None:
    extras = [
        (),
        (("salt", "x"),),
        (("adapter", "x"),),
        (("adapter", "x"), ("generation", "2")),
        (("salt", "ab"), ("key", "c")),
        (("salt", "a"), ("key", "bc")),
    ]
    hasher = BlockHasher(b"k", 64)
    assert len({hasher.root(extra) for extra in extras}) == len(extras)
    assert hasher.root() != BlockHasher(b"other", 64).root()


def test_a_hash_commits_to_the_whole_history() -> None:
    hasher = BlockHasher(b"k", 64)

    def chain(data: bytes) -> list[bytes]:
        hashes: list[bytes] = []
        hasher.extend(hasher.root(), data, hashes, len(data) // 64)
        return hashes

    one, two = bytes(64), b"\1" + bytes(63)
    assert chain(one + two)[1] != chain(two + two)[1]
    assert chain(one + one)[0] != chain(one + one)[1]
    assert chain(one + two)[0] == chain(one + one)[0]


def test_blocks_are_freed_tail_first_unknown_to_the_front_cached_to_the_back() -> None:
    pool = BlockPool(11)
    table = pool.take(5)
    for index, block in enumerate(table[:3]):
        pool.register(block, bytes([index]) * 16)
    pool.release(table)
    assert list(pool.free) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_a_cached_block_is_evicted_only_when_it_is_handed_out() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for index, block in enumerate(blocks):
        pool.register(block, bytes([index]) * 16)
    pool.release(blocks)
    assert pool.longest_hit([bytes([i]) * 16 for i in range(3)], 3) == blocks
    pool.take(1)
    assert pool.longest_hit([bytes([i]) * 16 for i in range(3)], 3) == blocks[:2]
    assert pool.evictions == 1


def test_of_two_blocks_with_one_hash_the_other_survives_an_eviction() -> None:
    pool = BlockPool(3)
    one, two = pool.take(2)
    pool.register(one, b"h" * 16)
    pool.register(two, b"h" * 16)
    pool.release([one])
    assert pool.take(1) == [one]
    assert pool.longest_hit([b"h" * 16], 1) == [two]


def test_a_double_release_raises_and_too_large_a_take_touches_nothing() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    with pytest.raises(ValueError, match="2 blocks wanted, 1 free"):
        pool.take(2)
    assert pool.num_free == 1
    pool.release(blocks)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(blocks)


def test_an_inventory_warms_the_cache_of_a_new_scheduler() -> None:
    old = Isolated(16)
    old.add(1, PROMPT, max_tokens=1)
    old.drain()
    held = [(b, h) for b, h in enumerate(old.core.pool.hash_of) if h is not None]
    new = Isolated(16)
    new.runner.content = old.runner.content
    new.core.adopt_inventory([b for b, _ in held], [h for _, h in held])
    new.add(2, PROMPT, max_tokens=1)
    assert new.step() == {2: 16}
    new.drain()
