"""Pages of ended requests that are out of use for a while: neither free nor held, still findable, and never lost."""

from __future__ import annotations

from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.blocks import BlockPool
from scheduler.config import ADMISSION_NAMES
from scheduler.draining import DrainingPages
from tests.scheduler.isolated import Isolated, solo_tokens

MS = 1_000_000


def test_pages_come_back_in_the_order_of_their_times_and_not_before() -> None:
    pool = BlockPool(7)
    draining = DrainingPages(pool)
    first, second = pool.take(2), pool.take(3)
    draining.retire(first, 0, 10)
    draining.retire(second, 4, 10)
    assert (pool.num_free, draining.count(), draining.next_ns) == (1, 5, 10)
    draining.release_due(9)
    assert pool.num_free == 1
    draining.release_due(10)
    assert (pool.num_free, draining.count(), draining.next_ns, draining.returned) == (3, 3, 14, 2)
    draining.release_due(14)
    assert (pool.num_free, draining.count(), draining.next_ns, draining.returned) == (6, 0, None, 5)


def test_without_a_delay_they_are_free_at_once() -> None:
    pool = BlockPool(4)
    draining = DrainingPages(pool)
    draining.retire(pool.take(3), 0, 0)
    assert (pool.num_free, draining.count(), draining.next_ns, draining.returned) == (3, 0, None, 3)


def test_a_page_that_somebody_else_holds_stays_with_them() -> None:
    pool = BlockPool(4)
    draining = DrainingPages(pool)
    pages = pool.take(2)
    pool.hold(pages[:1])
    draining.retire(pages, 0, 10)
    assert draining.count() == 1
    draining.release_due(10)
    assert pool.num_free == 2 and pool.refs[pages[0]] == 1


def test_a_hit_takes_a_draining_page_up_again_and_it_drains_anew() -> None:
    isolated = Isolated(4, page_release_delay_s=0.010)
    isolated.add(1, shared := list(range(100, 133)), max_tokens=1)
    isolated.step()
    assert isolated.core.refresh_stats().draining_blocks == 3
    isolated.add(2, [*shared[:32], 7], max_tokens=1)
    isolated.step()
    stats = isolated.core.refresh_stats()
    assert isolated.finished[2].num_cached_tokens == 32, "what drains can be read"
    assert (stats.free_blocks, stats.draining_blocks) == (0, 4)
    isolated.now = 11 * MS
    isolated.core.expire()
    stats = isolated.core.refresh_stats()
    assert (stats.free_blocks, stats.draining_blocks) == (1, 3), "the shared two have begun again with request 2"
    isolated.now = 12 * MS
    isolated.core.expire()
    assert isolated.core.pool.num_free == 4 and not isolated.core.check()


def test_pages_that_drain_are_written_by_nobody() -> None:
    isolated = Isolated(4, page_release_delay_s=0.005, enable_prefix_caching=False)
    isolated.add(1, 40, max_tokens=1)
    isolated.step()
    isolated.add(2, 40, max_tokens=1)
    waits = 0
    while isolated.step() == {}:
        waits += 1
    assert waits == 4 and isolated.core.stats.held_passes == {"blocks": 4}


def test_a_lost_runner_has_no_pages_to_wait_for() -> None:
    isolated = Isolated(4, page_release_delay_s=10)
    isolated.add(1, 40, max_tokens=1)
    isolated.step()
    isolated.lose_runner()
    assert isolated.core.pool.num_free == 4 and isolated.core.wakes_ns is None and not isolated.core.check()


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=10),
    st.sampled_from(ADMISSION_NAMES),
    st.integers(1, 12),
    st.integers(0, 2),
)
def test_whatever_the_delay_everything_ends_and_every_page_comes_back(
    load: list[tuple[int, int, int]], admission: str, delay_ms: int, depth: int
) -> None:
    isolated = Isolated(6, delay=depth, admission_policy=admission, page_release_delay_s=delay_ms / 1000)
    for request_id, (prompt, outputs, group) in enumerate(load, start=1):
        tokens = [300 + group * 100 + j for j in range(prompt)] if group else prompt
        isolated.add(request_id, tokens, max_tokens=outputs)
    for _ in range(5000):
        if not isolated.core.has_requests and not isolated.pending:
            break
        isolated.step()
        stats = isolated.core.refresh_stats()
        assert stats.reserved_blocks + stats.draining_blocks <= 6
    expected = {i: solo_tokens(i, p, n) for i, (p, n, _) in enumerate(load, start=1) if i not in isolated.rejected}
    assert isolated.tokens == expected
    assert admission == "credit" or not isolated.rejected
    isolated.now += delay_ms * MS
    isolated.core.expire()
    assert isolated.core.pool.num_free == 6 and not any(isolated.core.pool.refs)
