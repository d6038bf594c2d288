"""Grammars and KV transfers at the runner: answered in time while steps go on, dropped with their scheduler."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from protocol.columns import pack_i32
from protocol.messages import CompileGrammar, FetchKv, GrammarStatus, KvStatus, StepResult
from runner.errands import Answer, Errand, unable
from runner.sim import SimulatedExecutor
from tests.runner.kit import new, sim, step, tokens_of
from tests.runner.link_kit import Running, Scheduler, running

FETCH = FetchKv(5, 1, "store", 12, pack_i32([7, 8, 9]))


def fetch(executor: SimulatedExecutor, order: FetchKv = FETCH, num_tokens: int | None = None) -> None:
    """Begin a transfer and, with `num_tokens`, end it."""
    executor.transfer(order, None)
    if num_tokens is not None:
        executor.transfer(order, KvStatus(order.id, order.incarnation, num_tokens))


def code_of(result: StepResult) -> str:
    return "" if result.failure is None else result.failure.code


# --- what the simulator answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "num_tokens", "why"),
    [
        ("store", 12, ""),
        ("fail-over", 0, "fail-over"),
        ("partial:7", 7, ""),
        ("partial:70", 12, ""),
        ("partial:x", 0, "expected a number"),
    ],
)
def test_a_source_brings_what_its_name_says(source: str, num_tokens: int, why: str) -> None:
    answer = sim(sim_kv_fetch_ms=30.0).answer(FetchKv(5, 3, source, 12, b""))
    assert answer is not None and isinstance(answer.status, KvStatus)
    assert (answer.status.id, answer.status.incarnation, answer.status.num_tokens) == (5, 3, num_tokens)
    assert why in answer.status.message and bool(why) == bool(answer.status.message)
    assert answer.after_s == (0.0 if "number" in why else 0.03)


def test_a_source_called_never_never_answers() -> None:
    assert sim().answer(FetchKv(5, 3, "never", 12, b"")) is None


def test_a_grammar_compiles_after_its_time_unless_it_is_invalid() -> None:
    executor = sim(sim_grammar_ms=250.0)
    assert executor.answer(CompileGrammar(1, "json_schema:{}")) == Answer(GrammarStatus(1), 0.25)
    bad = executor.answer(CompileGrammar(2, "invalid:{"))
    assert bad is not None and "invalid:{" in bad.status.message and bad.status.id == 2


def test_a_runner_without_engines_says_at_once_that_it_has_none() -> None:
    grammar, kv = unable(CompileGrammar(1, "x")), unable(FETCH)
    assert grammar.after_s == kv.after_s == 0
    assert grammar.status == GrammarStatus(1, "this runner compiles no grammars")
    assert kv.status == KvStatus(5, 1, 0, "this runner has no KV sources")


# --- pages of a transfer ------------------------------------------------------------------------------------------


def test_fetched_pages_may_be_counted_on_once_they_have_arrived() -> None:
    executor = sim()
    fetch(executor, num_tokens=12)
    arrival = new(5, range(13), [7, 8, 9, 10], num_computed=12, incarnation=2)
    assert tokens_of(executor.execute(step(1, {5: 1}, arrivals=[arrival]), 0))


@pytest.mark.parametrize("arrived", [None, 0, 11])
def test_nobody_may_count_on_more_than_has_arrived(arrived: int | None) -> None:
    executor = sim()
    fetch(executor, num_tokens=arrived)
    arrival = new(5, range(13), [7, 8, 9, 10], num_computed=12)
    assert code_of(executor.execute(step(1, {5: 1}, arrivals=[arrival]), 0)) == "unwritten_page"


def test_nobody_may_write_to_pages_that_are_being_fetched() -> None:
    executor = sim()
    fetch(executor)
    arrival = new(5, range(13), [1, 2, 3, 9])
    assert code_of(executor.execute(step(1, {5: 13}, arrivals=[arrival]), 0)) == "page_conflict"


def test_the_pages_are_those_of_the_last_tokens() -> None:
    executor = sim()
    executor.execute(step(1, {1: 4}, arrivals=[new(1, range(4), [1])]), 0)
    fetch(executor, FetchKv(5, 1, "store", 12, pack_i32([8, 9])), num_tokens=8)
    half = new(5, range(12), [1, 8, 10], num_computed=8)
    assert tokens_of(executor.execute(step(2, {5: 4}, arrivals=[half], left=[1]), 0))


def test_a_transfer_into_pages_in_use_fails_the_next_step_and_no_more() -> None:
    executor = sim()
    executor.execute(step(1, {1: 4}, arrivals=[new(1, range(4), [7])]), 0)
    fetch(executor)
    assert code_of(executor.execute(step(2, {3: 4}, arrivals=[new(3, range(4), [20])]), 0)) == "page_conflict"
    assert tokens_of(executor.execute(step(3, {3: 4}, arrivals=[new(3, range(4), [20], incarnation=2)]), 0))


def test_a_transfer_into_pages_that_do_not_exist_fails_the_next_step() -> None:
    executor = sim()
    fetch(executor, FetchKv(5, 1, "store", 4, pack_i32([640])), num_tokens=4)
    assert code_of(executor.execute(step(1, {3: 4}, arrivals=[new(3, range(4), [20])]), 0)) == "bad_step"


def test_what_the_pages_held_before_a_transfer_is_no_cached_content() -> None:
    executor = sim()
    executor.execute(step(1, {1: 4}, arrivals=[new(1, range(4), [7])], filled={7: b"h" * 16}), 0)
    executor.execute(step(2, {}, left=[1]), 0)
    assert len(executor.inventory) == 1
    fetch(executor)
    assert len(executor.inventory) == 0


# --- over the link ------------------------------------------------------------------------------------------------


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Callable[..., Scheduler]]:
    """Connects schedulers to a running simulator: `linked(sim_grammar_ms=…)` first, then `linked()` for more."""
    runners: list[Running] = []
    schedulers: list[Scheduler] = []

    def connect(takeover: bool = False, **changes: Any) -> Scheduler:
        if not runners:
            executor = sim(**changes)
            runners.append(Running(executor, tmp_path, answer=executor.answer))
        scheduler = Scheduler(runners[0].link.address, takeover=takeover)
        schedulers.append(scheduler)
        return scheduler

    yield connect
    for scheduler in schedulers:
        scheduler.close()
    for one in runners:
        one.stop()


def test_steps_go_on_while_a_grammar_compiles(linked: Callable[..., Scheduler]) -> None:
    scheduler = linked(sim_grammar_ms=1500.0)
    epoch = scheduler.welcome().epoch
    scheduler.channel.send(CompileGrammar(1, "json_schema:{}"))
    order: list[type] = []
    for number in range(1, 4):
        arrivals = [new(2, range(4), [1, 2])] if number == 1 else []
        scheduler.channel.send(step(number, {2: 4 if number == 1 else 1}, epoch=epoch, arrivals=arrivals))
    while GrammarStatus not in order:
        order.append(type(scheduler.wait_for((StepResult, GrammarStatus))))
    assert order == [StepResult] * 3 + [GrammarStatus]


def test_answers_come_in_the_order_in_which_they_are_due(linked: Callable[..., Scheduler]) -> None:
    scheduler = linked(sim_grammar_ms=300.0, sim_kv_fetch_ms=5.0)
    scheduler.welcome()
    scheduler.channel.send(CompileGrammar(1, "a"))
    scheduler.channel.send(FETCH)
    scheduler.channel.send(CompileGrammar(2, "invalid"))
    answers = [scheduler.wait_for((GrammarStatus, KvStatus)) for _ in range(3)]
    assert [answer.id for answer in answers] == [5, 1, 2]
    assert [bool(answer.message) for answer in answers] == [False, False, True]


def test_pages_can_be_counted_on_as_soon_as_the_answer_is_there(linked: Callable[..., Scheduler]) -> None:
    scheduler = linked(sim_kv_fetch_ms=1.0)
    epoch = scheduler.welcome().epoch
    scheduler.channel.send(FETCH)
    assert scheduler.wait_for(KvStatus) == KvStatus(5, 1, 12)
    arrival = new(5, range(13), [7, 8, 9, 10], num_computed=12, incarnation=2)
    scheduler.channel.send(step(1, {5: 1}, epoch=epoch, arrivals=[arrival]))
    assert tokens_of(scheduler.result())


def test_a_new_scheduler_hears_nothing_of_what_the_former_one_asked(linked: Callable[..., Scheduler]) -> None:
    first = linked(sim_grammar_ms=400.0, sim_kv_fetch_ms=400.0)
    first.welcome()
    first.channel.send(CompileGrammar(1, "a"))
    first.channel.send(FETCH)
    first.pump()
    second = linked(takeover=True)
    epoch = second.welcome().epoch
    # The former one's transfer is over: its pages are free. This one's question would be answered after both.
    second.channel.send(step(1, {9: 4}, epoch=epoch, arrivals=[new(9, range(4), [7])]))
    assert tokens_of(second.result())
    second.channel.send(CompileGrammar(3, "b"))
    assert second.wait_for((GrammarStatus, KvStatus)).id == 3


# --- answers that are promised ------------------------------------------------------------------------------------


class Promises:
    """What an executor promises to whom asks: kept when a test says so."""

    def __init__(self) -> None:
        self._made: queue.Queue[Future[GrammarStatus]] = queue.Queue()

    def answer(self, errand: Errand) -> Future[GrammarStatus]:
        promise: Future[GrammarStatus] = Future()
        self._made.put(promise)
        return promise

    def next(self) -> Future[GrammarStatus]:
        """The oldest that a test hasn't seen."""
        return self._made.get(timeout=60)


@pytest.fixture
def promised(tmp_path: Path) -> Iterator[tuple[Promises, Callable[..., Scheduler]]]:
    promises = Promises()
    schedulers: list[Scheduler] = []
    with running(sim(), tmp_path, answer=promises.answer) as runner:

        def connect(takeover: bool = False) -> Scheduler:
            schedulers.append(Scheduler(runner.link.address, takeover=takeover))
            return schedulers[-1]

        yield promises, connect
        for scheduler in schedulers:
            scheduler.close()


def test_a_promise_is_kept_from_another_thread_while_steps_go_on(
    promised: tuple[Promises, Callable[..., Scheduler]],
) -> None:
    promises, connect = promised
    scheduler = connect()
    epoch = scheduler.welcome().epoch
    for request in (1, 2):
        scheduler.channel.send(CompileGrammar(request, "regex:a"))
    scheduler.channel.send(step(1, {9: 4}, epoch=epoch, arrivals=[new(9, range(4), [7])]))
    assert tokens_of(scheduler.result())
    first, second = promises.next(), promises.next()
    second.set_result(GrammarStatus(2))
    assert scheduler.wait_for(GrammarStatus) == GrammarStatus(2)
    first.set_result(GrammarStatus(1, "no"))
    assert scheduler.wait_for(GrammarStatus) == GrammarStatus(1, "no")


def test_what_was_promised_to_a_former_scheduler_is_not_told_to_its_successor(
    promised: tuple[Promises, Callable[..., Scheduler]],
) -> None:
    promises, connect = promised
    first = connect()
    first.welcome()
    first.channel.send(CompileGrammar(1, "regex:a"))
    first.pump()
    promise = promises.next()
    second = connect(takeover=True)
    second.welcome()
    promise.set_result(GrammarStatus(1))
    second.channel.send(CompileGrammar(2, "regex:a"))
    second.pump()
    promises.next().set_result(GrammarStatus(2))
    assert second.wait_for(GrammarStatus) == GrammarStatus(2)


def test_a_promise_that_is_kept_after_the_end_or_never_disturbs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    promises = Promises()
    with running(sim(), tmp_path, answer=promises.answer) as runner:
        scheduler = Scheduler(runner.link.address)
        scheduler.welcome()
        for request in (1, 2):
            scheduler.channel.send(CompileGrammar(request, "regex:a"))
        scheduler.pump()
        cancelled, late = promises.next(), promises.next()
        assert cancelled.cancel()
        scheduler.close()
    late.set_result(GrammarStatus(2))
    assert caplog.records == []


# --- copies -------------------------------------------------------------------------------------------------------


def swapped(executor: SimulatedExecutor) -> StepResult:
    executor.execute(step(1, {1: 8}, arrivals=[new(1, range(8), [1, 2, 3])]), 0)
    return executor.execute(step(2, {}, left=[1], swap_out=[1, 0, 2, 1]), 0)


def test_the_simulator_takes_time_for_swaps_and_reports_it() -> None:
    rate = {"sim_host_blocks": 4, "sim_kv_bytes_per_block": 1000, "sim_copy_gb_s": 2.0}
    executor = sim(**rate)
    assert (executor.limits.host_blocks, executor.limits.kv_bytes_per_block) == (4, 1000)
    result = swapped(executor)
    assert result.failure is None and result.copy_ns == 1000
    back = new(1, range(9), [5, 6, 7], num_computed=8, num_prompt=8, incarnation=2)
    returned = executor.execute(step(3, {1: 1}, arrivals=[back], swap_in=[5, 0, 6, 1]), 0)
    assert tokens_of(returned) and returned.copy_ns == 1000
    assert executor.execute(step(4, {1: 1}), 0).copy_ns == 0


def test_without_a_rate_swaps_take_no_time() -> None:
    assert swapped(sim(sim_host_blocks=4)).copy_ns == 0
