"""Who is next: each order, what makes it change, and the bounds that no order may break."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import pytest

from protocol.messages import SamplingParams
from scheduler.config import QUEUE_NAMES
from scheduler.policies import queue as queues
from scheduler.policies.fair import Fair
from scheduler.policies.queue import QueueOptions, QueuePolicy, in_order
from scheduler.presets import QUEUE_POLICIES
from scheduler.request import Request
from scheduler.results import OUTPUT_COST
from tests.scheduler.isolated import Isolated, solo_tokens


def order_of(isolated: Isolated) -> list[int]:
    return [request.id for request in isolated.core.strategies.queue.ordered(isolated.core.view)]


def warm(isolated: Isolated, prompt: list[int], request_id: int = 900) -> None:
    """Leave the whole blocks of `prompt` in the prefix cache."""
    isolated.add(request_id, prompt, max_tokens=1)
    isolated.drain()


def busy(**config: Any) -> Isolated:
    """One slot, taken by a request that runs long."""
    isolated = Isolated(64, max_num_seqs=1, **config)
    isolated.add(1000, 8, max_tokens=200, routing_key="hot")
    isolated.step()
    return isolated


# --- the orders -------------------------------------------------------------------------------------------------


def test_fcfs_serves_in_order_of_arrival_and_a_preempted_request_goes_first() -> None:
    isolated = busy(queue_policy="fcfs")
    for request_id in (3, 1, 2):
        isolated.add(request_id, 8)
    isolated.preempt(1000)
    assert order_of(isolated) == [1000, 3, 1, 2]


def test_priority_is_a_total_order_of_priority_arrival_and_id_that_preemption_does_not_change() -> None:
    isolated = busy(queue_policy="priority")
    for request_id, priority in ((5, 1), (4, 0), (3, 1), (2, -1), (1, 0)):
        isolated.add(request_id, 8, priority=priority)
    assert order_of(isolated) == [2, 4, 1, 5, 3]
    isolated.preempt(1000)
    assert order_of(isolated) == [2, 1000, 4, 1, 5, 3]


def test_lof_serves_the_largest_output_limit_first() -> None:
    isolated = busy(queue_policy="lof")
    for request_id, outputs in ((1, 5), (2, 50), (3, 5), (4, 20)):
        isolated.add(request_id, 8, max_tokens=outputs)
    assert order_of(isolated) == [2, 4, 1, 3]


def test_deadline_serves_the_earliest_first_and_those_without_one_last() -> None:
    isolated = busy(queue_policy="deadline")
    for request_id, deadline in ((1, 0), (2, 900), (3, 100), (4, 0)):
        isolated.add(request_id, 8, deadline_ms=deadline)
    assert order_of(isolated) == [3, 2, 1, 4]


def test_a_random_order_is_decided_by_its_seed() -> None:
    def shuffled(seed: int) -> list[int]:
        isolated = busy(queue_policy="random", queue_seed=seed)
        for request_id in range(1, 20):
            isolated.add(request_id, 8)
        return order_of(isolated)

    assert shuffled(1) == shuffled(1) != shuffled(2)
    assert sorted(shuffled(1)) == list(range(1, 20)) != shuffled(1)


def test_lpm_serves_the_longest_cached_prefix_first_and_follows_the_cache() -> None:
    long, short = list(range(100, 164)), list(range(300, 332))
    isolated = Isolated(64, queue_policy="lpm", max_num_seqs=1)
    warm(isolated, long, 900)
    warm(isolated, short, 901)
    isolated.add(1000, 8, max_tokens=200)
    isolated.step()
    isolated.add(1, 64)
    isolated.add(2, [*short, 7])
    isolated.add(3, [*long, 7])
    assert order_of(isolated) == [3, 2, 1]
    isolated.control("reset_prefix_cache")
    assert order_of(isolated) == [1, 2, 3]


def test_one_sharer_of_a_cold_prefix_goes_first_so_that_the_others_hit() -> None:
    isolated = busy(queue_policy="lpm")
    shared = list(range(400, 448))
    for request_id in (1, 2, 3):
        isolated.add(request_id, [*shared, request_id])
    isolated.add(4, 20)
    assert order_of(isolated) == [1, 4, 2, 3]
    isolated.drain()
    assert [isolated.finished[i].num_cached_tokens for i in (1, 2, 3)] == [0, 48, 48]


def test_dfs_weight_serves_the_branch_with_most_waiters_together() -> None:
    one, two = list(range(100, 164)), list(range(300, 364))
    isolated = Isolated(64, queue_policy="dfs-weight", max_num_seqs=1)
    warm(isolated, one, 900)
    warm(isolated, two, 901)
    isolated.add(1000, 8, max_tokens=200)
    isolated.step()
    for request_id, prefix in ((1, one), (2, two), (3, one), (4, two), (5, two)):
        isolated.add(request_id, [*prefix, request_id])
    assert order_of(isolated) == [2, 4, 5, 1, 3]


def test_routing_key_serves_those_whose_key_runs() -> None:
    isolated = busy(queue_policy="routing-key")
    for request_id, key in ((1, "cold"), (2, "hot"), (3, "cold"), (4, "hot")):
        isolated.add(request_id, 8, routing_key=key)
    assert order_of(isolated) == [2, 4, 1, 3]


def test_shortest_prefill_counts_what_the_cache_does_not_hold() -> None:
    prefix = list(range(100, 164))
    isolated = Isolated(64, queue_policy="shortest-prefill", max_num_seqs=1)
    warm(isolated, prefix)
    isolated.add(1000, 8, max_tokens=200)
    isolated.step()
    isolated.add(1, 40)
    isolated.add(2, 20)
    isolated.add(3, [*prefix, 1, 2])
    assert order_of(isolated) == [3, 2, 1]


def test_hrrn_serves_short_ones_first_until_a_long_one_has_waited_for_its_own_length() -> None:
    isolated = busy(queue_policy="hrrn")
    isolated.add(1, 200)
    isolated.core.stats.prompt_tokens += 400  # so much has been prefilled since
    isolated.add(2, 10)
    assert order_of(isolated) == [1, 2]
    isolated.core.stats.prompt_tokens += 100
    isolated.add(3, 10)
    assert order_of(isolated) == [2, 1, 3]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn", "shortest-prefill", "routing-key"])
def test_an_order_that_looks_around_gives_way_to_fcfs_above_128_waiters_and_counts_the_flips(policy: str) -> None:
    isolated = busy(queue_policy=policy)
    for request_id in range(1, 129):
        isolated.add(request_id, 60 - request_id % 50)
    own = order_of(isolated)
    assert isolated.core.refresh_stats().queue_flips == 0
    isolated.add(129, 3)
    assert order_of(isolated) == list(range(1, 130))
    assert isolated.core.refresh_stats().queue_flips == 1
    isolated.abort(129)
    assert order_of(isolated) == own
    assert isolated.core.refresh_stats().queue_flips == 2


def test_a_change_of_policy_keeps_everybody_and_the_count_of_flips() -> None:
    isolated = busy(queue_policy="lpm", queue_fallback_waiting=1)
    for request_id, priority in ((1, 3), (2, 1), (3, 2)):
        isolated.add(request_id, 8, priority=priority)
    assert order_of(isolated) == [1, 2, 3]
    isolated.control("set", queue_policy="priority")
    assert order_of(isolated) == [2, 3, 1]
    assert isolated.core.refresh_stats().queue_flips == 1


# --- fairness ---------------------------------------------------------------------------------------------------


def serve_backlogged(tenants: dict[str, float], seed: int, passes: int) -> tuple[dict[str, float], float]:
    """Keep every tenant waiting all the time. Returns the widest gap of service per weight between two of them over
    any window, and the paper's U."""
    random, usable = Random(seed), 24
    isolated = Isolated(
        usable,
        queue_policy="fair",
        tenant_weights=tuple(f"{name}={weight}" for name, weight in tenants.items()),
        max_queue_age_s=0.0,
        max_num_batched_tokens=64,
    )
    fair = isolated.core.strategies.queue
    assert isinstance(fair, Fair)
    lengths = {name: random.choice([8, 30, 90]) for name in tenants}
    next_id, history = 0, []
    for _ in range(passes):
        waiting = Counter(request.tenant for request in fair)
        for name in tenants:
            for _ in range(4 - waiting[name]):
                next_id += 1
                isolated.add(next_id, random.randint(1, lengths[name]), max_tokens=random.randint(1, 40), tenant=name)
        isolated.step()
        history.append(dict(fair.counters))
    gap = 0.0
    for one in tenants:
        for other in tenants:
            difference = [at.get(one, 0.0) - at.get(other, 0.0) for at in history]
            gap = max(gap, max(difference) - min(difference))
    unit = max(90.0, OUTPUT_COST * usable * isolated.core.block_size) / min(tenants.values())
    return {"gap": gap, "least": min(history[-1].values())}, unit


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("tenants", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 3.0}])
def test_backlogged_tenants_get_service_by_weight_within_the_papers_bound(tenants: dict[str, float], seed: int) -> None:
    measured, unit = serve_backlogged(tenants, seed, 250)
    assert measured["gap"] <= 2 * unit
    assert measured["least"] > 0


def fair_queue() -> Fair:
    return Fair(QueueOptions())


def waiter(request_id: int, **values: Any) -> Request:
    values.setdefault("arrival", request_id)
    return Request(request_id, 0, SamplingParams(8), bytearray(16), 4, 12, **values)


def test_a_tenant_that_was_idle_can_not_save_up_even_while_nobody_waits() -> None:
    fair = fair_queue()
    fair.push(waiter(1, tenant="busy"))
    fair.remove(next(iter(fair)))
    fair.charge({"busy": 500.0})
    fair.push(waiter(2, tenant="idle"))
    assert fair.counters["idle"] == 500.0


def test_a_tenant_that_waits_keeps_its_own_counter() -> None:
    fair = fair_queue()
    fair.push(waiter(1, tenant="a"))
    fair.push(waiter(2, tenant="b"))
    fair.charge({"a": 5.0, "b": 9.0})
    fair.push(waiter(3, tenant="c"))
    assert fair.counters["c"] == 5.0
    assert [request.id for request in fair.ordered(View())] == [1, 3, 2]


def test_fair_order_is_that_of_sorting_all_tenants_by_what_they_got() -> None:
    random, fair = Random(3), fair_queue()
    members: dict[int, Request] = {}
    for turn in range(400):
        what = random.random()
        if what < 0.5 or not members:
            members[turn] = waiter(turn, tenant=str(random.randrange(12)))
            fair.push(members[turn])
        elif what < 0.75:
            fair.remove(members.pop(random.choice(list(members))))
        else:
            fair.charge({str(random.randrange(12)): float(random.randrange(50))})
        expected = sorted(members.values(), key=lambda r: (fair.counters[r.tenant], r.tenant, r.arrival))
        assert [request.id for request in fair.ordered(View())] == [request.id for request in expected]
        assert fair.front() is (expected[0] if expected else None)


# --- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", QUEUE_NAMES)
def test_a_request_that_every_order_disfavours_starts_soon_after_the_age_bound(policy: str) -> None:
    """A steady flow of favoured requests; one that lacks all that any order likes."""
    isolated = Isolated(32, queue_policy=policy, max_num_seqs=4, max_queue_age_s=0.05, max_num_batched_tokens=64)
    warm_prefix = list(range(100, 164))
    for request_id in range(10, 200):
        favoured = {"priority": -5, "deadline_ms": 1, "routing_key": "hot", "tenant": str(request_id)}
        for twin in (2 * request_id, 2 * request_id + 1):
            isolated.add(twin, [*warm_prefix, twin], max_tokens=9, **favoured)
        if request_id == 15:
            isolated.add(1, 64, max_tokens=1, priority=9, tenant="0")
        isolated.step()
        if 1 in isolated.finished:
            break
    passes_after_bound = 12 * 10  # a slot comes free within 9 passes of each; 64 tokens take some more
    assert 1 in isolated.finished
    assert isolated.finished[1].queue_ns <= 50_000_000 + passes_after_bound * 1_000_000
    assert len(isolated.finished) >= 5, "the others were served meanwhile"


def test_without_an_age_bound_the_disfavoured_request_starves() -> None:
    isolated = Isolated(32, queue_policy="priority", max_num_seqs=1, max_queue_age_s=0.0)
    isolated.add(1, 8, priority=9)
    for request_id in range(10, 60):
        isolated.add(2 * request_id, 8, max_tokens=2, priority=0)
        isolated.add(2 * request_id + 1, 8, max_tokens=2, priority=0)
        isolated.step()
    assert not isolated.request(1).first_admitted_ns or isolated.request(1).num_preemptions


def test_a_blocked_head_is_passed_a_bounded_number_of_times_and_small_ones_are_served_meanwhile() -> None:
    isolated = Isolated(8, max_bypasses=3, max_num_seqs=16)
    isolated.add(50, 70, max_tokens=60)
    isolated.step()
    isolated.add(1, 100, max_tokens=2)
    for request_id in range(2, 12):
        isolated.add(request_id, 4, max_tokens=2)
    for _ in range(12):
        isolated.step()
    assert isolated.request(1).num_bypassed == 3
    assert sorted(isolated.finished) == [2, 3, 4]
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 100, 2)
    assert list(isolated.finished).index(1) < list(isolated.finished).index(5)


def test_with_no_bypasses_allowed_a_blocked_head_blocks() -> None:
    isolated = Isolated(8, max_bypasses=0)
    isolated.add(50, 70, max_tokens=30)
    isolated.step()
    isolated.add(1, 100, max_tokens=2)
    isolated.add(2, 4, max_tokens=2)
    for _ in range(10):
        isolated.step()
    assert not isolated.finished


# --- cost -------------------------------------------------------------------------------------------------------


class View:
    """A queue's surroundings that count how often they are asked."""

    version = 0
    block_size = 16

    def __init__(self) -> None:
        self.asked = 0

    def matched(self, request: Request) -> int:
        self.asked += 1
        return 0

    def routing_keys(self) -> list[str]:
        self.asked += 1
        return []

    def processed_tokens(self) -> int:
        self.asked += 1
        return 0


class Counted(float):
    """A number that counts comparisons."""

    compared = 0

    def __lt__(self, other: object) -> bool:
        Counted.compared += 1
        return float(self) < float(other)  # type: ignore[arg-type]


def test_in_order_yields_a_heap_sorted_and_leaves_it_as_it_is() -> None:
    random = Random(5)
    heap = [(random.random(), random.randrange(9), n) for n in range(500)]
    heapq.heapify(heap)
    before = list(heap)
    assert list(in_order(heap)) == sorted(heap)
    assert heap == before
    assert list(in_order([])) == []


def test_looking_at_the_first_few_of_a_heap_costs_the_same_whatever_its_size() -> None:
    def comparisons(size: int) -> int:
        heap = [(Counted(value), value, value) for value in Random(7).sample(range(size), size)]
        heapq.heapify(heap)
        Counted.compared = 0
        list(islice(in_order(heap), 9))
        return Counted.compared

    assert comparisons(100_000) <= comparisons(100) + 60


def filled(policy: str, size: int) -> QueuePolicy:
    queue = QUEUE_POLICIES[policy](QueueOptions())
    for n in range(size):
        queue.push(waiter(n, tenant=str(n), priority=n * 7919 % 1000, deadline_ns=n * 31 % 977))
    return queue


@pytest.mark.parametrize("policy", QUEUE_NAMES)
def test_the_work_of_a_pass_does_not_grow_with_the_number_waiting(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts every touch of a heap and every question: nine are named, running tenants are charged."""
    touched = 0

    class CountingHeapq:
        @staticmethod
        def heappush(heap: Any, entry: Any) -> None:
            nonlocal touched
            touched += 1
            heapq.heappush(heap, entry)

        @staticmethod
        def heappop(heap: Any) -> Any:
            nonlocal touched
            touched += 1
            return heapq.heappop(heap)

        @staticmethod
        def heapreplace(heap: Any, entry: Any) -> Any:
            nonlocal touched
            touched += 1
            return heapq.heapreplace(heap, entry)

        heapify = staticmethod(heapq.heapify)

    def work(size: int) -> int:
        nonlocal touched
        queue, view = filled(policy, size), View()
        touched = 0
        monkeypatch.setattr(queues, "heapq", CountingHeapq)
        for turn in range(20):
            if queue.wants_charges:
                queue.charge({str(n): 3.0 for n in range(turn, turn + 8)})
            queue.front()
            looked: Iterator[Request] = queue.ordered(view)
            assert len(list(islice(looked, 9))) == 9
        monkeypatch.undo()
        return touched + view.asked

    assert work(10_000) <= work(200) + 40
