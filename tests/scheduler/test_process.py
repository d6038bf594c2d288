"""The scheduler process from outside: links, leases, epochs and losses over real sockets."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from protocol import wire
from protocol.channels import AddressTaken
from protocol.columns import pack_i32
from protocol.messages import Goodbye, Refused, RequestStatus
from protocol.places import Place
from protocol.process import EXIT_REPLACED
from protocol.scheduler_links import LinkSettings, SchedulerLinks
from scheduler.process import load_scheduler_class
from tests.scheduler.ends import Chain
from tests.scheduler.isolated import limits, solo_tokens

MakeChain = Callable[..., Chain]


@pytest.fixture
def make_chain(runtime_dir: Path) -> Iterator[MakeChain]:
    chains: list[Chain] = []

    def make(**config: Any) -> Chain:
        chains.append(Chain(runtime_dir, **config))
        return chains[-1]

    yield make
    for chain in chains:
        chain.close()


def test_tokens_flow_from_a_submit_to_its_one_end(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    api.submit(1, 20, 30)
    api.submit(2, 40, 5)
    chain.until(lambda: len(api.finished) == 2, "both ends")
    assert api.accepted == {1, 2}
    assert api.tokens == {1: solo_tokens(1, 20, 30), 2: solo_tokens(2, 40, 5)}
    assert api.finished[1].num_output_tokens == 30


@pytest.mark.parametrize("order", list(itertools.permutations(["runner", "scheduler", "api"])))
def test_any_start_order_reaches_ready_and_keeps_early_requests(make_chain: MakeChain, order: tuple[str, ...]) -> None:
    chain = make_chain()
    starts = {"runner": chain.start_runner, "scheduler": chain.start, "api": chain.api}
    for name in order:
        starts[name]()
        if chain.process and chain.apis and not chain.apis[0].channel.connected:
            chain.until(lambda: chain.apis[0].channel.connected, "the API's session")
            chain.apis[0].submit(1, 10, 4)
    api = chain.apis[0]
    chain.until(lambda: 1 in api.finished, "the early request's end")
    assert api.tokens[1] == solo_tokens(1, 10, 4)


def test_status_says_that_the_runner_is_absent_and_then_ready(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.start()
    api = chain.api()
    chain.until(lambda: api.status is not None and api.status.runner == "absent", "an honest status")
    chain.start_runner()
    chain.until(lambda: api.status.runner == "ready" and api.status.limits is not None, "ready")


def test_a_runner_that_dies_and_returns_costs_no_token(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    assert chain.runner is not None
    api.submit(1, 20, 400)
    chain.until(lambda: len(api.tokens.get(1, [])) > 20, "some tokens")
    chain.stop_runner()
    chain.until(lambda: api.status.runner == "absent", "the loss to be seen")
    chain.start_runner(epoch=2)
    chain.until(lambda: 1 in api.finished, "the end")
    assert api.tokens[1] == solo_tokens(1, 20, 400)
    assert api.finished[1].num_preemptions >= 1


def test_a_runner_that_returns_with_a_smaller_pool_ends_what_no_longer_fits(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    assert chain.runner is not None
    chain.runner.answering = False
    api.submit(1, 200, 400)
    api.submit(2, 20, 5)
    chain.until(lambda: chain.runner.steps > 0, "a step")
    chain.stop_runner()
    chain.until(lambda: api.status.runner == "absent", "the loss to be seen")
    chain.start_runner(epoch=2, limit=limits(8))
    chain.until(lambda: len(api.finished) == 2, "both ends")
    assert api.finished[1].status == RequestStatus.IGNORED and "128" in api.finished[1].message
    assert api.tokens[2] == solo_tokens(2, 20, 5)


def test_work_without_progress_is_reported_as_stalled(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    assert chain.runner is not None
    chain.runner.answering = False
    api.submit(1, 20, 4)
    chain.until(lambda: api.status.stalled_ms > 300, "a growing stall")


def test_a_silent_api_loses_its_requests_and_others_notice_nothing(make_chain: MakeChain) -> None:
    chain = make_chain()
    silent = chain.connected()
    other = chain.api()
    chain.until(lambda: other.channel.connected, "the second session")
    silent.submit(1, 20, 2000)
    other.submit(2, 20, 3000)
    chain.until(lambda: silent.tokens and other.tokens, "both streams")
    chain.apis.remove(silent)
    chain.until(lambda: chain.metric("api_processes") == 1, "the lease to end")
    chain.until(lambda: 2 in other.finished, "the other's end")
    capacity = 64 * 16
    assert other.tokens[2] == solo_tokens(2, 20, capacity - 20 + 1), "it outgrows the pool, and only then ends"
    chain.until(lambda: chain.metric("requests_running") == 0, "an empty scheduler")
    assert chain.metric("kv_cache_blocks", state="held") == 0
    chain.apis.append(silent)


def test_an_api_that_returns_submits_again_and_goes_on(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    api.submit(1, 20, 300)
    chain.until(lambda: len(api.tokens.get(1, [])) > 10, "some tokens")
    api.channel.leave(Goodbye("test"))
    chain.until(lambda: api.channel.connected, "a new session")
    api.submit(1, 20, 300, emitted=pack_i32(api.tokens[1]), resumed=True)
    chain.until(lambda: 1 in api.finished and api.finished[1].status == RequestStatus.LENGTH, "the end")
    assert api.tokens[1] == solo_tokens(1, 20, 300)


def test_a_bad_submit_is_rejected_and_disturbs_nobody(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    api.submit(1, 20, 60)
    api.submit(2, 5000, 5)
    api.submit(1, 20, 5)
    api.submit(3, 20, 0)
    chain.until(lambda: 1 in api.finished, "the good one's end")
    assert set(api.rejected) == {1, 2, 3}
    assert api.tokens == {1: solo_tokens(1, 20, 60)}


def test_garbage_on_either_socket_is_counted_and_changes_nothing(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    api.submit(1, 20, 200)
    stranger = chain.context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(chain.config.scheduler_address)
    for _ in range(50):
        stranger.send(os.urandom(40))
        api.channel.socket.send(os.urandom(9))
    chain.until(lambda: 1 in api.finished, "the end")
    assert api.tokens[1] == solo_tokens(1, 20, 200)
    chain.until(lambda: chain.metric("bad_frames_total", link="api") >= 50, "the count")
    stranger.close()


def test_an_occupied_runner_is_waited_for_and_then_given_up_with_its_holders_name(make_chain: MakeChain) -> None:
    chain = make_chain(lease_s=0.5)
    chain.start_runner().occupied_by = "scheduler abc"
    chain.start()
    chain.until(lambda: chain.code is not None, "the exit", deadline_s=60)
    assert chain.code == 3


def test_takeover_is_asked_for_in_the_hello(make_chain: MakeChain) -> None:
    chain = make_chain(takeover=True)
    runner = chain.start_runner()
    runner.occupied_by = "scheduler abc"
    chain.start()
    api = chain.api()
    chain.until(lambda: api.status is not None and api.status.runner == "ready", "ready")
    assert runner.hellos[0].takeover


def test_a_fenced_scheduler_ends_and_says_goodbye_to_its_apis(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    assert chain.runner is not None
    chain.runner.channel.drop(chain.runner.channel.peers[0], Goodbye("fenced", "scheduler xyz holds epoch 9"))
    chain.until(lambda: chain.code is not None, "the exit")
    assert chain.code == EXIT_REPLACED
    chain.until(lambda: api.goodbyes, "the goodbye")
    assert "xyz" in api.goodbyes[0].message


def test_a_scheduler_that_overslept_its_replacement_makes_way_at_once(make_chain: MakeChain) -> None:
    chain = make_chain(lease_s=3600, runner_silence_s=0.5)
    api = chain.connected()
    assert chain.runner is not None and chain.process is not None
    work, asleep, awake = chain.process.work, threading.Event(), threading.Event()

    def sleep() -> None:
        asleep.set()
        awake.wait(60)
        work()

    chain.process.work = sleep  # type: ignore[method-assign]
    chain.until(asleep.is_set, "the hang")
    chain.runner.occupied_by = "scheduler xyz"
    chain.runner.channel.drop(chain.runner.channel.peers[0])  # its goodbye is lost
    until = time.monotonic() + 0.6
    chain.until(lambda: time.monotonic() > until, "longer than a runner may be silent")
    awake.set()
    chain.until(lambda: chain.code is not None, "the exit")
    assert chain.code == EXIT_REPLACED
    chain.until(lambda: api.goodbyes, "the goodbye")
    assert api.goodbyes[0].code == "takeover" and "xyz" in api.goodbyes[0].message


def test_a_scheduler_whose_place_was_taken_by_force_leaves_though_no_goodbye_reached_it(
    make_chain: MakeChain, runtime_dir: Path
) -> None:
    chain = make_chain(lease_s=3600)
    api = chain.connected()
    assert chain.runner is not None
    chain.runner.occupied_by = "scheduler xyz"
    chain.runner.channel.drop(chain.runner.channel.peers[0])
    successor = Place.claim(str(runtime_dir / "scheduler.sock"), by_force=True)
    chain.until(lambda: chain.code is not None, "the exit")
    assert chain.code == EXIT_REPLACED
    chain.until(lambda: api.goodbyes, "the goodbye")
    assert api.goodbyes[0].code == "takeover"
    assert not successor.taken
    successor.release()


def test_who_came_into_the_place_meanwhile_is_not_taken_for_the_one_that_hangs(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, tries = [(0.0, 7), (2.0, 7), (2.5, 8), (4.0, 8), (5.0, 8), (6.0, 8)], []
    context: zmq.Context[Any] = zmq.Context()
    settings = LinkSettings(f"ipc://{runtime_dir}/scheduler.sock", f"ipc://{runtime_dir}/runner.sock", takeover=True)
    nobody: Any = None
    links = SchedulerLinks(context, settings, nobody, clock=lambda: seen[0][0])

    def bind(by_force: bool = False) -> None:
        tries.append(by_force)
        raise AddressTaken(settings.scheduler_address, seen[0][1])

    monkeypatch.setattr(links.apis, "bind", bind)
    while seen:
        links._take_place()
        del seen[0]
    assert tries == [False] * 5 + [True]
    links.close()
    context.term()


def test_a_runner_of_another_build_ends_the_scheduler_with_the_reason(make_chain: MakeChain) -> None:
    chain = make_chain()
    runner = chain.start_runner()
    runner.channel._take = lambda identity, number, sequence, message: runner.channel._refuse(  # type: ignore[method-assign]
        identity, number, Refused(wire.BAD_DIGEST, "another build")
    )
    chain.start()
    chain.until(lambda: chain.code is not None, "the exit")
    assert chain.code == 3


def test_stop_says_goodbye_on_both_sides(make_chain: MakeChain) -> None:
    chain = make_chain()
    api = chain.connected()
    runner = chain.runner
    assert runner is not None
    assert chain.stop() == 0
    chain.until(lambda: runner.goodbyes and api.goodbyes, "both goodbyes")
    assert runner.goodbyes[0].code == api.goodbyes[0].code == "shutdown"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nomodule:X", "nomodule"),
        ("scheduler.core:Missing", "Missing"),
        ("scheduler.core", "scheduler.core"),
        ("pathlib:Path", "not a subclass"),
    ],
)
def test_a_scheduler_class_that_can_not_be_used_says_why(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load_scheduler_class(name)
