"""What the runner remembers of its pages."""

from __future__ import annotations

import numpy as np

from protocol.columns import i32
from runner.inventory import Inventory
from tests.runner.kit import new, random_hash, sim, step


def held(inventory: Inventory) -> dict[int, bytes]:
    blocks, hashes = inventory.export()
    return {page: hashes[16 * i : 16 * i + 16] for i, page in enumerate(i32(blocks).tolist())}


def test_a_filled_page_is_exported_until_it_is_handed_over() -> None:
    inventory = Inventory(8)
    hashes = np.arange(32, dtype=np.uint8).reshape(2, 16)
    inventory.filled(np.array([3, 5]), hashes)
    assert held(inventory) == {3: hashes[0].tobytes(), 5: hashes[1].tobytes()}
    inventory.handed_over(np.array([3]))
    assert held(inventory) == {5: hashes[1].tobytes()} and len(inventory) == 1


def test_a_voided_page_is_readable_again_only_for_a_new_owner() -> None:
    inventory = Inventory(8)
    inventory.filled(np.array([2]), np.zeros((1, 16), np.uint8))
    inventory.void(np.array([2]))
    assert held(inventory) == {} and inventory.voided(np.array([1, 2])).tolist() == [2]
    inventory.handed_over(np.array([2]))
    assert inventory.voided(np.array([2])).tolist() == []


def test_a_page_enters_with_the_step_that_fills_it() -> None:
    executor = sim()
    first = random_hash(1)
    executor.execute(step(1, {1: 3}, arrivals=[new(1, range(6), [7, 8])]), 0)
    assert held(executor.inventory) == {}
    executor.execute(step(2, {1: 3}, filled={7: first}), 0)
    assert held(executor.inventory) == {7: first}


def test_pages_past_the_computed_ones_leave_on_admission_and_all_grown_ones_too() -> None:
    executor = sim()
    hashes = {page: random_hash(page) for page in (7, 8, 9)}
    executor.execute(step(1, {1: 12}, arrivals=[new(1, range(12), [7, 8, 9])], filled=hashes), 0)
    again = new(2, range(12), [7, 8], num_computed=4)
    result = executor.execute(step(2, {2: 4}, arrivals=[again], left=[1]), 0)
    assert result.failure is None and held(executor.inventory) == {7: hashes[7], 9: hashes[9]}
    result = executor.execute(step(3, {2: 4}, grow={2: [9]}), 0)
    assert result.failure is None and held(executor.inventory) == {7: hashes[7]}


def test_a_new_scheduler_finds_what_the_old_one_filled() -> None:
    executor = sim()
    first = random_hash(1)
    executor.execute(step(1, {1: 6}, arrivals=[new(1, range(6), [7, 8])], filled={7: first}), 0)
    executor.clear()
    assert executor.num_residents == 0 and held(executor.inventory) == {7: first}
    hit = executor.execute(step(1, {9: 2}, epoch=2, arrivals=[new(9, range(6), [7, 3], num_computed=4)]), 0)
    assert hit.failure is None


def test_a_failed_step_takes_back_what_it_would_have_filled() -> None:
    executor = sim()
    executor.execute(step(1, {1: 4}, arrivals=[new(1, range(8), [7, 8])], filled={7: random_hash(7)}), 0)
    failed = executor.execute(step(2, {1: 4, 99: 1}, filled={8: random_hash(8)}), 0)
    assert failed.failure is not None and failed.failure.code == "unknown_request"
    assert list(held(executor.inventory)) == [7]


def test_a_step_sent_before_a_failure_was_known_may_not_read_what_the_failed_one_would_have_written() -> None:
    executor = sim(sim_strict=False)
    executor.execute(step(1, {1: 8, 99: 1}, arrivals=[new(1, range(8), [7, 8])]), 0)
    hit = executor.execute(step(2, {2: 4}, arrivals=[new(2, range(8), [7, 9], num_computed=4)]), 0)
    assert hit.failure is not None and hit.failure.code == "voided_page"
    again = executor.execute(step(3, {2: 8}, arrivals=[new(2, range(8), [7, 9], incarnation=2)]), 0)
    assert again.failure is None
