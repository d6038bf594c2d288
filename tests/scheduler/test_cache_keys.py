"""Requests share KV only under the same salt, adapter and generation of that adapter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.hashing import BlockHasher, cache_keys
from tests.scheduler.isolated import Isolated, default_sample

PROMPT = [default_sample(1, j) for j in range(40)]
NAMES = st.sampled_from(["", "a", "b", "ab", "adapter", "salt", "1"])
KEYS = st.tuples(NAMES, NAMES, st.integers(0, 2)).map(lambda keys: keys if keys[1] else (keys[0], "", 0))


def cached(isolated: Isolated, request_id: int, **keys: Any) -> int:
    isolated.add(request_id, PROMPT, max_tokens=1, **keys)
    isolated.drain()
    return isolated.finished[request_id].num_cached_tokens


def test_an_adapter_shares_with_itself_and_not_with_the_base_model_another_adapter_or_an_earlier_load() -> None:
    isolated = Isolated(64)
    assert cached(isolated, 1) == 0
    assert cached(isolated, 2, adapter="a") == 0
    assert cached(isolated, 3, adapter="a") == 32
    assert cached(isolated, 4, adapter="b") == 0
    assert cached(isolated, 5, adapter="a", adapter_generation=1) == 0
    assert cached(isolated, 6, adapter="a", adapter_generation=1) == 32
    assert cached(isolated, 7, adapter="a", cache_salt="s") == 0
    assert cached(isolated, 8, cache_salt="a") == 0
    assert cached(isolated, 9) == 32


@given(st.lists(KEYS, min_size=2, max_size=12))
def test_any_mix_of_keys_hits_what_was_computed_under_the_same_keys_and_nothing_else(
    requests: list[tuple[str, str, int]],
) -> None:
    isolated = Isolated(64)
    seen: set[tuple[str, str, int]] = set()
    for request_id, keys in enumerate(requests, start=1):
        salt, adapter, generation = keys
        hit = cached(isolated, request_id, cache_salt=salt, adapter=adapter, adapter_generation=generation)
        assert hit == (32 if keys in seen else 0)
        seen.add(keys)


@given(KEYS, KEYS)
def test_roots_are_equal_only_for_equal_keys(one: tuple[str, str, int], other: tuple[str, str, int]) -> None:
    hasher = BlockHasher(b"k" * 16, 64)
    assert (hasher.root(cache_keys(*one)) == hasher.root(cache_keys(*other))) == (one == other)


def test_a_request_that_comes_back_hits_its_own_blocks_under_its_adapter() -> None:
    isolated = Isolated(64)
    isolated.add(1, PROMPT, max_tokens=6, adapter="a", adapter_generation=3)
    isolated.step()
    isolated.preempt(1)
    isolated.drain()
    back = isolated.control("timeline", id="1")["events"][3]
    assert (back["event"], back["cached"]) == ("admitted", 32)


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"adapter": "a" * 1025}, "adapter"),
        ({"adapter": "a", "adapter_generation": -1}, "adapter_generation"),
        ({"adapter": "a", "adapter_generation": 1 << 63}, "adapter_generation"),
        ({"adapter_generation": 1}, "adapter_generation"),
    ],
)
def test_keys_that_make_no_sense_are_refused_by_name(keys: dict[str, Any], param: str) -> None:
    isolated = Isolated(64)
    isolated.add(1, PROMPT, **keys)
    assert (isolated.rejected[1].code, isolated.rejected[1].param) == (f"invalid_{param}", param)
    isolated.add(2, PROMPT, cache_salt="s" * 1024, adapter="a" * 1024, adapter_generation=(1 << 63) - 1)
    isolated.drain()
    assert 2 in isolated.finished
