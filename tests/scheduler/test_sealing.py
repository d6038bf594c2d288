"""Full blocks become findable: rows are written back and hashed in bulk, with the same result as one by one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from protocol.columns import pack_i32
from protocol.messages import SamplingParams
from scheduler.hashing import BlockHasher
from scheduler.request import Request
from scheduler.table import RowTable
from tests.scheduler.isolated import Isolated, default_sample, solo_tokens

SIZE = 8


def rows(seed: int) -> tuple[RowTable, list[list[int]]]:
    """A table of 40 rows that have got up to a block of outputs since they were written back, and all their tokens."""
    random, table, expected = Random(seed), RowTable(40, SIZE), []
    for number in range(40):
        synced, news = random.randrange(1, 30), random.choice([0, SIZE, random.randrange(SIZE + 1)])
        if random.random() < 0.5:
            news = min(SIZE, -synced % SIZE or SIZE)  # it has just filled a block
        tokens = [random.randrange(1000) for _ in range(synced + news)]
        request = Request(number, 0, SamplingParams(99), bytearray(pack_i32(tokens[:synced])), 1, 99)
        slot = table.enter(request, synced, 0, watched=False, tenant=0)
        for position in range(synced, len(tokens)):
            table.tail[slot, position % SIZE] = tokens[position]
        table.known[slot] = len(tokens)
        expected.append(tokens)
    return table, expected


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_written_back_in_bulk_as_they_are_one_by_one(seed: int) -> None:
    table, expected = rows(seed)
    chosen = np.array(Random(seed).sample(range(40), 30), np.intp)
    table.flush_many(table.order[chosen])
    for number, tokens in enumerate(expected):
        slot = int(table.order[number])
        if number not in chosen:
            table.flush(slot)
        request = table.request[slot]
        assert request is not None and request.data == pack_i32(tokens)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_outputs_fill_blocks_that_the_same_tokens_in_a_prompt_hit(delay: int) -> None:
    isolated = Isolated(200, delay=delay)
    for request_id in range(1, 9):
        isolated.add(request_id, 10 + request_id, max_tokens=60)
    isolated.drain()
    for request_id in range(1, 9):
        prompt = [default_sample(request_id, j) for j in range(10 + request_id)] + isolated.tokens[request_id]
        isolated.add(100 + request_id, prompt, max_tokens=1)
        isolated.drain()
        hit = isolated.finished[100 + request_id].num_cached_tokens
        assert hit == (len(prompt) - 1) // 16 * 16
    assert isolated.tokens[3] == solo_tokens(3, 13, 60)


def test_extending_a_chain_in_parts_gives_the_hashes_of_the_whole() -> None:
    hasher, data = BlockHasher(b"k" * 16, 4 * SIZE), bytes(range(256)) * 4
    whole: list[bytes] = []
    hasher.extend(hasher.root(), data, whole, 32)
    parts: list[bytes] = []
    for count in (1, 1, 7, 20, 32):
        hasher.extend(hasher.root(), data, parts, count)
    assert parts == whole and len(set(whole)) == 32
