"""What goes wrong over one request is the end of that request: the process lives, and all others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Control, ControlReply, Extend, RequestStatus
from protocol.process import StopSignal
from scheduler import main, results
from scheduler.config import SchedulerConfig
from scheduler.core import CoreScheduler
from scheduler.process import SchedulerProcess
from scheduler.request import Request
from tests.scheduler.ends import Chain
from tests.scheduler.isolated import Isolated, solo_tokens


@pytest.fixture
def chain(runtime_dir: Path) -> Iterator[Chain]:
    chain = Chain(runtime_dir)
    yield chain
    chain.close()


def core_of(chain: Chain) -> CoreScheduler:
    assert chain.process is not None
    core = chain.process.core
    assert isinstance(core, CoreScheduler)
    return core


def fails_for(request_id: int, wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """`wrapped`, but it raises for one request."""

    def call(*arguments: Any, **named: Any) -> Any:
        if any(isinstance(argument, Request) and argument.id == request_id for argument in arguments):
            raise RuntimeError("made to fail")
        return wrapped(*arguments, **named)

    return call


def test_a_request_over_which_the_queue_fails_is_rejected_alone(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    api = chain.connected()
    core = core_of(chain)
    api.submit(1, 20, 200)
    chain.until(lambda: api.tokens.get(1), "the first token")
    monkeypatch.setattr(core.waiting.queue, "push", fails_for(2, core.waiting.queue.push))
    api.submit(2, 20, 5)
    api.submit(3, 20, 5)
    chain.until(lambda: len(api.finished) == 2 and 2 in api.rejected, "two ends and a rejection")
    assert api.rejected[2].code == "internal_error" and api.rejected[2].status == 500
    assert api.tokens == {1: solo_tokens(1, 20, 200), 3: solo_tokens(3, 20, 5)}
    assert api.accepted == {1, 3}


def test_nothing_stays_of_a_request_that_could_not_be_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    isolated = Isolated(64)
    queue = isolated.core.waiting.queue
    with monkeypatch.context() as patch:
        patch.setattr(queue, "push", fails_for(1, queue.push))
        with pytest.raises(RuntimeError):
            isolated.add(1, 20, tenant="a")
    assert not isolated.core.requests and not list(isolated.core.waiting) and not isolated.core.check()
    isolated.add(1, 20, max_tokens=3, tenant="a")
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 3)


def test_a_part_that_can_not_be_taken_in_ends_its_session_alone(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    api = chain.connected()
    core = core_of(chain)
    monkeypatch.setattr(core.external, "extend", fails_for(1, core.external.extend))
    api.submit(1, 20, 5, open=True)
    api.submit(2, 20, 200)
    chain.until(lambda: api.tokens.get(2), "a token")
    api.channel.send(Extend(1, b"", True))
    chain.until(lambda: len(api.finished) == 2, "both ends")
    assert api.finished[1].status == RequestStatus.ABORTED
    assert api.tokens == {2: solo_tokens(2, 20, 200)}


def test_a_request_whose_stop_conditions_can_not_be_told_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    isolated = Isolated(64)
    monkeypatch.setattr(results, "_own_end", fails_for(1, results._own_end))
    isolated.add(1, 20, max_tokens=9, stop_token_ids=(7,))
    isolated.add(2, 20, max_tokens=9, stop_token_ids=(7,))
    isolated.drain()
    assert isolated.status(1) == RequestStatus.ERROR and isolated.finished[1].code == "internal_error"
    assert isolated.tokens[2] == solo_tokens(2, 20, 9)


def test_a_result_that_can_not_be_applied_means_a_new_epoch_in_which_all_go_on(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests end with one result; over the first, admission fails, and the second isn't looked at."""
    api = chain.connected()
    core, runner = core_of(chain), chain.runner
    assert runner is not None
    admission, failures = core.strategies.admission, []

    def fail_once(tenant: int, num_outputs: int, *, at_limit: bool) -> None:
        if not failures:
            failures.append(tenant)
            raise RuntimeError("made to fail")

    monkeypatch.setattr(admission, "finished", fail_once)
    runner.answering = False
    api.submit(1, 20, 30)
    api.submit(2, 20, 30)
    api.submit(3, 20, 200)
    chain.until(lambda: api.accepted == {1, 2, 3}, "all three")
    chain.stop_runner()
    chain.until(lambda: api.status is not None and api.status.runner == "absent", "the loss to be seen")
    runner = chain.start_runner(epoch=2)
    chain.until(lambda: len(api.finished) == 3, "three ends")
    assert failures and [goodbye.code for goodbye in runner.goodbyes] == ["restart"]
    assert api.tokens == {1: solo_tokens(1, 20, 30), 2: solo_tokens(2, 20, 30), 3: solo_tokens(3, 20, 200)}
    assert {end.status for end in api.finished.values()} == {RequestStatus.LENGTH}


def test_an_order_that_fails_is_answered_with_an_error(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    api = chain.connected()
    core, replies = core_of(chain), []

    def fail(message: Control) -> ControlReply:
        raise RuntimeError("made to fail")

    assert chain.process is not None
    send = chain.process.links.send
    monkeypatch.setattr(core, "control", fail)
    monkeypatch.setattr(
        chain.process.links, "send", lambda peer, message: (replies.append(message), send(peer, message))
    )
    api.channel.send(Control(7, "status"))
    api.submit(1, 20, 5)
    chain.until(lambda: 1 in api.finished, "the end")
    answered = [reply for reply in replies if isinstance(reply, ControlReply)]
    assert [(reply.nonce, reply.ok) for reply in answered] == [(7, False)] and b"internal_error" in answered[0].body


def test_a_scheduler_that_dies_of_a_fault_closes_its_links(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its context would wait for their sockets for ever, and no supervisor would start it again."""

    def fail(process: SchedulerProcess, stop: StopSignal) -> int:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(SchedulerProcess, "run", fail)
    monkeypatch.setattr(main, "setup_logging", lambda role, level: None)  # this process has its own
    with pytest.raises(RuntimeError, match="made to fail"):
        main.run(SchedulerConfig(runtime_dir=str(runtime_dir)))
