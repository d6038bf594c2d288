"""Who holds the runner, over real sockets: who is welcome, refused, replaced or fenced, and under which epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import wire
from protocol.columns import i32
from protocol.messages import Goodbye, Refused
from tests.runner.kit import new, random_hash, sim, step, tokens_of
from tests.runner.link_kit import DEADLINE_S, KEY, Connect, Gate, arrival, connecting, running


@pytest.fixture
def connect() -> Iterator[Connect]:
    with connecting() as make:
        yield make


def test_a_scheduler_is_welcomed_with_limits_key_and_a_growing_epoch(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir, wall_ms=lambda: 1000) as runner:
        first = connect(runner)
        welcome = first.welcome()
        assert welcome.limits == runner.executor.limits and welcome.hash_key == KEY and welcome.epoch == 1000
        first.channel.leave(Goodbye("shutdown"))
        second = connect(runner).welcome()
        assert second.epoch == 1001 and second.hash_key == KEY and second.instance == welcome.instance
        first.close()


def test_an_epoch_is_larger_than_any_the_scheduler_has_seen(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir, wall_ms=lambda: 1000) as runner:
        assert connect(runner, epoch=10**15).welcome().epoch == 10**15 + 1


def test_a_rival_is_refused_while_the_holder_lives_and_welcomed_when_it_has_gone(
    runtime_dir: Path, connect: Connect
) -> None:
    with running(sim(), runtime_dir) as runner:
        holder = connect(runner)
        epoch = holder.welcome().epoch
        rival = connect(runner)
        refusal = rival.wait_for(Refused)
        assert refusal.code == wire.OCCUPIED and holder.instance in refusal.message
        holder.channel.send(arrival(1, epoch))
        assert tokens_of(holder.result())
        holder.close()
        assert rival.welcome().epoch > epoch


def test_a_holder_that_is_silent_past_its_lease_may_be_replaced(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir, lease_s=0.5) as runner:
        holder = connect(runner)
        holder.welcome()
        rival = connect(runner)
        assert rival.welcome().epoch > 0  # the holder isn't pumped: it is silent, yet connected
        assert holder.wait_for(Goodbye).code == "fenced"


def test_a_takeover_fences_the_holder_and_its_steps_no_longer_count(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        old = connect(runner)
        epoch = old.welcome().epoch
        taker = connect(runner, takeover=True)
        newer = taker.welcome().epoch
        assert newer > epoch
        goodbye = old.wait_for(Goodbye)
        assert goodbye.code == "fenced" and taker.instance in goodbye.message
        taker.channel.send(arrival(1, epoch))  # right sender, old epoch
        taker.channel.send(arrival(2, newer))
        assert taker.result().step_id == 2
        assert runner.link.stats.stale_steps == 1 and runner.link.stats.fenced == 1


def test_a_takeover_waits_for_the_steps_that_were_sent_and_their_results_reach_their_sender(
    runtime_dir: Path, connect: Connect
) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        old = connect(runner)
        epoch = old.welcome().epoch
        old.channel.send(arrival(1, epoch))
        old.channel.send(step(2, {1: 1}, epoch=epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        taker = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            taker.pump()
        old.channel.send(step(3, {1: 1}, epoch=epoch))
        while runner.link.stats.stale_steps == 0:
            old.pump()
        assert not taker.channel.connected  # no Welcome while a step of the old epoch runs
        gate.open.release(2)
        welcome = taker.welcome()
        assert [old.result().step_id, old.result().step_id] == [1, 2]
        assert old.wait_for(Goodbye).code == "fenced"
        taker.channel.send(arrival(7, welcome.epoch, request=9))
        gate.open.release()
        assert tokens_of(taker.result()).keys() == {9}
        assert gate.log == ["clear", 1, 2, "clear", 7]
        assert runner.link.stats.unsent_results == 0


def test_a_holder_that_dies_while_a_takeover_waits_makes_way_at_once(runtime_dir: Path, connect: Connect) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        old = connect(runner)
        epoch = old.welcome().epoch
        old.channel.send(arrival(1, epoch))
        old.channel.send(step(2, {1: 1}, epoch=epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        taker = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            taker.pump()
        before = runner.link.generation
        old.close()
        while runner.link.generation == before:
            taker.pump()
        gate.open.release()
        taker.welcome()
        assert gate.log == ["clear", 1, "clear"], "the queued step of a dead scheduler is not run"


def test_the_same_process_may_shake_hands_again_without_a_takeover(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        scheduler = connect(runner)
        epoch = scheduler.welcome().epoch
        scheduler.channel.send(arrival(1, epoch))
        scheduler.result()
        scheduler.channel._disconnect()  # it believes that the runner fell silent
        again = scheduler.welcome()
        assert again.epoch > epoch and runner.executor.num_residents == 0
        assert runner.link.stats.fenced == 0


def test_a_hello_repeated_while_a_long_step_runs_gets_one_welcome(runtime_dir: Path, connect: Connect) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        old = connect(runner)
        old.channel.send(arrival(1, old.welcome().epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        taker = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            taker.pump()
        for _ in range(3):
            taker.channel._disconnect()
            taker.pump()
        gate.open.release()
        welcome = taker.welcome()
        taker.channel.send(arrival(2, welcome.epoch))
        gate.open.release()
        assert taker.result().step_id == 2 and runner.link.stats.grants == 2


def test_a_scheduler_waiting_for_its_welcome_is_turned_away_by_a_takeover(runtime_dir: Path, connect: Connect) -> None:
    gate = Gate()
    with running(gate, runtime_dir) as runner:
        old = connect(runner)
        old.channel.send(arrival(1, old.welcome().epoch))
        assert gate.entered.acquire(timeout=DEADLINE_S)
        waiting = connect(runner, takeover=True)
        while runner.link.stats.fenced == 0:
            waiting.pump()
        last = connect(runner, takeover=True)
        while runner.link.stats.fenced == 1:
            last.pump()
        assert waiting.wait_for(Refused).code == wire.OCCUPIED
        waiting.close()
        gate.open.release()
        assert last.welcome().epoch > 0


def test_only_schedulers_are_served(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        refusal = connect(runner, role="api").wait_for(Refused)
        assert "schedulers" in refusal.message


def test_a_new_scheduler_gets_the_inventory_and_an_empty_batch(runtime_dir: Path, connect: Connect) -> None:
    with running(sim(), runtime_dir) as runner:
        first = connect(runner)
        epoch = first.welcome().epoch
        filled = {1: random_hash(1)}
        first.channel.send(step(1, {1: 6}, epoch=epoch, arrivals=[new(1, range(6), [1, 2])], filled=filled))
        first.result()
        first.close()
        second = connect(runner)
        welcome = second.welcome()
        assert i32(welcome.inventory_blocks).tolist() == [1] and welcome.inventory_hashes == filled[1]
        second.channel.send(step(1, {5: 2}, epoch=welcome.epoch, arrivals=[new(5, range(6), [1, 9], num_computed=4)]))
        assert tokens_of(second.result()).keys() == {5}
