"""The pure rules behind the policies hold for any input, not just for recorded ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random

import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.orders import (
    CACHE_AGNOSTIC,
    CACHE_AWARE,
    ChainIndex,
    Surroundings,
    Waiting,
    arrange,
    chunk_limit,
    defer_sharers,
    dfs_weight,
)
from scheduler.policies.prefill_budget import Candidate, Chunk, PrefillBudget, Runner, Verdict
from scheduler.policies.ratio import RatioController
from scheduler.policies.retraction import Running, growth, retract, retraction_order
from scheduler.policies.urgent import Holder, make_room

POLICIES = sorted(CACHE_AWARE | CACHE_AGNOSTIC)
few = settings(max_examples=examples(25), deadline=None)

waiting_requests = st.lists(
    st.builds(
        Waiting,
        id=st.text("0123456789", min_size=1, max_size=3),
        prompt_len=st.integers(1, 200),
        output_len=st.integers(0, 50),
        matched=st.integers(0, 200),
        max_new=st.integers(0, 300),
        priority=st.integers(-3, 3),
        entry=st.floats(0, 10),
        routing_key=st.sampled_from([None, "a", "b", "c"]),
        seen_processed=st.integers(0, 1000),
        deferred=st.booleans(),
        path=st.lists(st.integers(0, 2), max_size=4).map(lambda steps: tuple(prefixes(steps))),
    ),
    max_size=20,
)
runners = st.lists(
    st.integers(0, 60).flatmap(
        lambda done: st.builds(Runner, st.integers(1, 80), st.just(done), st.integers(done, 9000), st.booleans())
    ),
    max_size=5,
)


def prefixes(steps: Sequence[int]) -> list[Hashable]:
    """Nodes of a tree, each named by the way to it."""
    return [tuple(steps[: depth + 1]) for depth in range(len(steps))]


# --- orders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@few
@given(waiting=waiting_requests, seed=st.integers(0, 5))
def test_every_order_serves_everybody_once_and_the_same_way_each_time(
    policy: str, waiting: list[Waiting], seed: int
) -> None:
    def once() -> list[int]:
        around = Surroundings(by_priority=True, processed=1000, running_keys=["a", "a", None], random=Random(seed))
        return arrange(policy, waiting, around)

    order = once()
    assert sorted(order) == list(range(len(waiting)))
    assert once() == order


@few
@given(waiting=waiting_requests)
def test_dfs_weight_is_the_post_order_walk_with_the_heaviest_child_first(waiting: list[Waiting]) -> None:
    def walk(node: tuple[int, ...]) -> list[int]:
        below = [
            child
            for child in dict.fromkeys(node for request in waiting for node in request.path)
            if isinstance(child, tuple) and child[:-1] == node
        ]
        heavy = sorted(below, key=lambda child: -sum(child in request.path for request in waiting))
        own = [index for index, request in enumerate(waiting) if (request.path[-1] if request.path else ()) == node]
        return [index for child in heavy for index in walk(child)] + own

    assert dfs_weight(waiting) == walk(())


@few
@given(
    chains=st.lists(st.lists(st.sampled_from([b"x", b"y"]), max_size=5), max_size=12),
    matched=st.lists(st.integers(0, 64), min_size=12, max_size=12),
)
def test_a_deferred_request_shares_its_prefix_with_an_earlier_one_that_is_not(
    chains: list[list[bytes]], matched: list[int]
) -> None:
    hashes = [[b"".join(chain[: depth + 1]) for depth in range(len(chain))] for chain in chains]
    deferred = defer_sharers(hashes, matched[: len(hashes)], ChainIndex(16))
    for index, late in enumerate(deferred):
        leaders = [hashes[i] for i in range(index) if not deferred[i] and matched[i] <= 32]
        shares = any(leader[:2] == hashes[index][:2] and len(hashes[index]) >= 2 for leader in leaders)
        assert late == (shares and matched[index] <= 32)


@few
@given(st.integers(1, 400), st.sampled_from([1, 16]), st.integers(1, 500), st.lists(st.integers(1, 300), max_size=6))
def test_room_for_shorter_prompts_leaves_a_page_for_the_chunk(
    budget: int, page_size: int, remaining: int, works: list[int]
) -> None:
    limit = chunk_limit(budget, page_size, remaining, sorted(works))
    assert limit is None or page_size <= limit < budget


# --- the budget ---------------------------------------------------------------------------------------------------


@few
@given(
    available=st.integers(0, 2000),
    page_size=st.sampled_from([1, 16]),
    chunk_size=st.sampled_from([None, 50, 128]),
    ratio=st.floats(0, 1),
    running=runners,
    offers=st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 9), st.integers(0, 400), st.booleans(), st.booleans()),
        max_size=8,
    ),
    simulate=st.booleans(),
)
def test_a_pass_never_grants_more_than_the_pool_and_the_chunk_have(
    available: int,
    page_size: int,
    chunk_size: int | None,
    ratio: float,
    running: list[Runner],
    offers: list[tuple[int, int, int, bool, bool]],
    simulate: bool,
) -> None:
    budget = PrefillBudget(
        available=available,
        page_size=page_size,
        ratio=ratio,
        max_prefill_tokens=512,
        running=running,
        chunk_size=chunk_size,
        simulate_completions=simulate,
    )
    granted = pinned = unfinished = 0
    for tokens, pages, max_new, ignore_eos, evictable in offers:
        matched = 0 if simulate else min(pages * page_size, (tokens - 1) // page_size * page_size)
        candidate = Candidate(tokens, matched, max_new, 0, ignore_eos, pinned=matched if evictable else 0)
        before = (budget.rem_total, budget.cur_rem, budget.rem_input, budget.rem_chunk)
        grant = budget.offer(candidate)
        if not grant.extend:
            assert grant.verdict is not Verdict.CONTINUE
            assert (budget.rem_total, budget.cur_rem, budget.rem_input, budget.rem_chunk) == before
            continue
        assert grant.extend == tokens - matched or grant.unfinished
        granted += -(-grant.extend // page_size) * page_size
        pinned += candidate.pinned
        unfinished += grant.unfinished
        assert grant.verdict is budget.state
    assert granted + pinned <= available
    assert chunk_size is None or granted <= -(-chunk_size // page_size) * page_size
    assert unfinished <= 1


@few
@given(
    st.integers(0, 500),
    st.sampled_from([1, 16]),
    st.integers(1, 300),
    st.integers(0, 200),
    st.integers(1, 400),
    runners,
)
def test_a_prompt_under_way_always_gets_on(
    available: int, page_size: int, chunk_size: int, computed: int, more: int, running: list[Runner]
) -> None:
    budget = PrefillBudget(
        available=available,
        page_size=page_size,
        ratio=0.7,
        max_prefill_tokens=512,
        running=running,
        chunk_size=chunk_size,
    )
    grant = budget.offer_chunk(Chunk(computed + more, computed, 50))
    assert 0 < grant.extend <= min(chunk_size, more)
    assert grant.unfinished == (grant.extend < more)
    if grant.unfinished and grant.extend >= page_size:
        assert (computed + grant.extend) % page_size == 0


def test_a_chunk_without_chunked_prefill_is_refused() -> None:
    budget = PrefillBudget(available=100, page_size=1, ratio=0.7, max_prefill_tokens=512)
    with pytest.raises(ValueError, match="chunked prefill is off"):
        budget.offer_chunk(Chunk(50, 10, 5))


@few
@given(runners.filter(bool), st.integers(0, 500))
def test_preempting_everybody_leaves_the_budget_of_an_empty_batch(running: list[Runner], freed: int) -> None:
    budget = PrefillBudget(available=100, page_size=1, ratio=0.3, max_prefill_tokens=512, running=running)
    budget.preempted(running, freed)
    assert budget.rem_total == pytest.approx(100 + freed)
    assert budget.cur_rem == 100 + freed


# --- pressure -----------------------------------------------------------------------------------------------------


@few
@given(
    st.floats(0.01, 3),
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 5000), st.integers(0, 9000), st.integers(0, 50)))),
)
def test_the_ratio_stays_between_its_floor_and_one(
    conservativeness: float, events: list[tuple[int, int, int] | None]
) -> None:
    ratio = RatioController(conservativeness)
    for event in events:
        before = ratio.value
        if event is None:
            ratio.decay()
            assert ratio.value <= before
        else:
            ratio.retract(*event)
        assert 0 < ratio.floor <= ratio.value <= 1
    ratio.reset()
    assert ratio.value == ratio.initial


@pytest.mark.parametrize("bad", [{"conservativeness": 0}, {"initial": -1}, {"decay_steps": 0}, {"floor_factor": 1.5}])
def test_a_ratio_that_could_not_decay_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no ratio"):
        RatioController(**bad)  # type: ignore[arg-type]


class Pool:
    """A pool in which a running request's KV is all its own."""

    def __init__(self, free: int, cached: int, held: list[int]) -> None:
        self.free, self.cached, self.held = free, cached, held

    def available(self) -> int:
        return self.free

    def evict(self, wanted: int) -> None:
        taken = max(min(wanted - self.free, self.cached), 0)
        self.free, self.cached = self.free + taken, self.cached - taken

    def release(self, index: int) -> None:
        self.free += self.held[index]


@few
@given(
    st.lists(
        st.builds(Running, st.integers(1, 60), st.integers(1, 60), st.integers(-2, 2)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([1, 16]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_retraction_keeps_as_many_as_fit_and_no_fewer(
    running: list[Running], page_size: int, free: int, cached: int, by_priority: bool
) -> None:
    held = [-(-request.kv_len // page_size) * page_size for request in running]
    pool = Pool(free * page_size, cached * page_size, held)
    total = pool.free + pool.cached + sum(held)
    decision = retract(running, pool, page_size, by_priority=by_priority)
    gone = (*decision.retracted, *([] if decision.outgrown is None else [decision.outgrown]))
    assert sorted((*gone, *decision.kept)) == list(range(len(running)))
    assert list(gone) == retraction_order(running, by_priority=by_priority)[: len(gone)]
    assert pool.free + pool.cached + sum(held[index] for index in decision.kept) == total

    def fits(first: int) -> bool:
        """Whether all but the `first` that leave can decode a step."""
        stay = [index for index in range(len(running)) if index not in gone[:first]]
        needed = sum(growth(running[index].kv_len, page_size) for index in stay)
        return total - sum(held[index] for index in stay) >= needed

    assert fits(len(gone))
    assert not any(fits(count) for count in range(1, len(gone))), "one more could have stayed"


holders = st.lists(st.builds(Holder, st.integers(-30, 30), st.floats(0, 9), st.floats(0, 50)), max_size=8)


@few
@given(st.integers(-40, 40), st.floats(-50, 200), st.integers(-1, 4), holders, st.integers(0, 20))
def test_room_is_made_wholly_or_not_at_all_and_only_by_the_less_urgent(
    priority: int, need: float, slots: int, running: list[Holder], threshold: int
) -> None:
    def enough(chosen: Sequence[int]) -> bool:
        remaining = need
        for index in chosen:
            remaining -= running[index].frees
        return remaining <= 0 and len(chosen) >= slots

    allowed = [index for index, each in enumerate(running) if each.priority - priority > threshold]
    order = sorted(allowed, key=lambda index: (-running[index].priority, -running[index].entry))
    victims = make_room(priority, need, slots, running, threshold=threshold)
    if victims is None:
        assert not enough(order) and (need > 0 or slots > 0)
        return
    assert list(victims) == order[: len(victims)]
    assert enough(victims)
    assert not any(enough(order[:count]) for count in range(len(victims)))
