"""However many tenants have ever come, what is remembered of them is bounded, and nobody gains by being forgotten."""

from __future__ import annotations

from random import Random

import pytest

from protocol.messages import SamplingParams
from scheduler.policies.fair import Fair
from scheduler.policies.queue import QueueOptions
from scheduler.request import Request
from scheduler.tenants import Tenants
from tests.scheduler.isolated import Isolated


def waiter(number: int, tenant: str) -> Request:
    return Request(number, 0, SamplingParams(4), bytearray(16), 4, 8, arrival=number, tenant=tenant)


def test_a_number_is_its_tenants_while_any_of_its_requests_is_live() -> None:
    tenants = Tenants(kept=0)
    assert (tenants.enter("a"), tenants.enter("b"), tenants.enter("a")) == (0, 1, 0)
    assert not tenants.leave("a")
    assert tenants.enter("c") == 2
    assert tenants.leave("a") and tenants.enter("d") == 0
    assert [tenants.name(number) for number in range(3)] == ["d", "b", "c"]


def test_idle_tenants_keep_their_numbers_until_too_many_are_idle_the_longest_idle_goes_first() -> None:
    tenants = Tenants(kept=2)
    for name in "abc":
        tenants.enter(name)
    for name in "bac":
        tenants.leave(name)
    assert tenants.enter("d") == 1, "b has been idle for longest"
    assert tenants.enter("a") == 0, "it is back with its number"
    assert (tenants.number("c"), len(tenants)) == (2, 3)
    with pytest.raises(KeyError):
        tenants.number("b")


def test_a_stream_of_new_tenants_leaves_no_more_behind_than_the_bound() -> None:
    isolated = Isolated(64, queue_policy="fair")
    isolated.core.tenants = Tenants(kept=16)
    fair = isolated.core.strategies.queue
    assert isinstance(fair, Fair)
    for number in range(400):
        isolated.add(number + 1, 8, max_tokens=2, tenant=f"tenant {number}")
        if number % 4 == 3:
            isolated.step()
    isolated.drain()
    assert len(isolated.finished) == 400
    assert len(isolated.core.tenants) <= 17 + 12
    assert len(fair.counters) <= 12


@pytest.mark.parametrize("seed", range(8))
def test_forgetting_idle_tenants_changes_no_order_and_no_counter(seed: int) -> None:
    """The same history for a queue that is told who is gone, and for one that remembers everybody."""
    random = Random(seed)
    weights = QueueOptions(weights={"t1": 2.0, "t2": 0.5})
    forgetful, other = Fair(weights), Fair(weights)
    waiting: dict[int, Request] = {}
    running: dict[int, Request] = {}
    forgotten = 0
    for number in range(600):
        choice = random.random()
        if choice < 0.45:
            request = waiter(number, "" if random.random() < 0.1 else f"t{int(random.paretovariate(0.6))}")
            waiting[number] = request
            forgetful.push(request)
            other.push(request)
        elif choice < 0.6 and waiting:
            request = next(forgetful.ordered(None)) if random.random() < 0.8 else random.choice([*waiting.values()])  # type: ignore[arg-type]
            del waiting[request.id]
            forgetful.remove(request)
            other.remove(request)
            running[request.id] = request
        elif choice < 0.8 and running:
            served = {random.choice([*running.values()]).tenant: random.randrange(1, 9) / 2}
            forgetful.charge(served)
            other.charge(served)
        elif running:
            gone = running.pop(random.choice([*running]))
            live = {request.tenant for request in (*running.values(), *waiting.values())}
            if gone.tenant not in live:
                forgetful.tenant_gone(gone.tenant)
                forgotten += gone.tenant not in forgetful.counters
        assert [request.id for request in forgetful.ordered(None)] == [r.id for r in other.ordered(None)]  # type: ignore[arg-type]
        live = {request.tenant for request in (*running.values(), *waiting.values())}
        assert all(forgetful.counters.get(name, 0.0) == other.counters.get(name, 0.0) for name in live)
    assert forgotten > 10


def test_a_tenant_that_was_served_much_is_remembered_until_others_have_caught_up() -> None:
    fair = Fair()
    patient = waiter(1, "patient")
    fair.push(patient)
    fair.charge({"greedy": 50.0})
    fair.tenant_gone("greedy")
    assert fair.counters["greedy"] == 50.0
    fair.charge({"patient": 60.0})
    fair.tenant_gone("nobody")
    assert "greedy" not in fair.counters
    fair.push(waiter(2, "greedy"))
    assert fair.counters["greedy"] == 60.0, "what it is lifted to is more than it was served"


def test_requests_without_a_tenant_are_a_tenant_like_any_other() -> None:
    fair = Fair()
    fair.push(waiter(1, "busy"))
    fair.charge({"busy": 90.0})
    fair.push(waiter(2, ""))
    fair.charge({"": 5.0})
    busy = next(request for request in fair if request.tenant == "busy")
    fair.remove(busy)
    fair.push(waiter(3, "new"))
    assert fair.counters["new"] == 95.0, "lifted to the one that waits: it came when the smallest counter was 90"
