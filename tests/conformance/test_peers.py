"""Conformance: peers come, fall silent, return and talk nonsense; what others asked for is not harmed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from protocol import wire
from protocol.channels import new_instance
from protocol.columns import pack_i32, pack_u64
from protocol.messages import (
    Abort,
    Extend,
    Goodbye,
    Hello,
    Outputs,
    Refused,
    RequestStatus,
    SamplingParams,
    Submit,
    Welcome,
)
from tests.conformance.chain import Chain
from tests.conformance.ends import limits, token_at
from tests.conformance.judge import Asked


def test_an_api_that_falls_silent_loses_its_requests_after_its_lease(chain: Chain) -> None:
    runner, silent = chain.begin(limits())
    other = chain.connected()
    runner.holding = True
    silent.submit(1, 6, 100)
    other.submit(2, 6, 30)
    chain.until(lambda: other.status and other.status.running + other.status.waiting == 2, "both requests")
    chain.apis.remove(silent)
    chain.until(lambda: other.status and other.status.running + other.status.waiting == 1, "the lease to end")
    runner.holding = False
    runner.release()
    chain.until(lambda: other.has(2), "the other's end")
    other.assert_complete(2)
    silent.channel.close()


def test_an_api_that_says_goodbye_takes_its_requests_along(chain: Chain) -> None:
    runner, leaving = chain.begin(limits())
    other = chain.connected()
    runner.holding = True
    leaving.submit(1, 6, 100)
    other.submit(2, 6, 30)
    chain.until(lambda: other.status and other.status.running + other.status.waiting == 2, "both requests")
    leaving.channel.leave(Goodbye("shutdown"))
    chain.apis.remove(leaving)
    chain.until(lambda: other.status and other.status.running + other.status.waiting == 1, "one request less")
    runner.holding = False
    runner.release()
    chain.until(lambda: other.has(2), "the other's end")
    other.assert_complete(2)
    leaving.channel.close()


def test_an_api_that_returns_submits_again_and_goes_on_after_what_it_has(chain: Chain) -> None:
    _, api = chain.begin(limits())
    api.submit(1, 9, 40)
    chain.until(lambda: len(api.tokens[1]) > 8, "some tokens")
    api.channel.leave(Goodbye("shutdown"))
    chain.until(lambda: api.channel.connected, "a new session")
    api.submit(1, 9, 40, emitted=len(api.tokens[1]), resumed=True)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


@pytest.mark.parametrize("emitted", [1, 3, 7, 11])
def test_a_request_that_comes_with_outputs_continues_after_them(chain: Chain, emitted: int) -> None:
    _, api = chain.begin(limits())
    api.submit(1, 9, 12, emitted=emitted, resumed=True)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_a_request_that_comes_complete_ends_at_once(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 9, 12, emitted=12, resumed=True)
    chain.world.scripted = {(2, 9 + 4): 2}
    api.submit(2, 9, 12, emitted=5, resumed=True, ignore_eos=False)
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(1)
    assert api.finished[2].status == RequestStatus.STOPPED
    assert not runner.judge.steps


def test_a_runner_that_hangs_is_given_up_and_welcomed_back(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 9, 40)
    chain.until(lambda: len(api.tokens[1]) > 4, "some tokens")
    runner.mute = True
    runner.welcoming = False
    chain.until(lambda: api.status and api.status.runner != "ready", "the silence to be seen")
    runner.mute = False
    runner.welcoming = True
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_work_that_does_not_come_back_is_told_as_stalled_or_absent(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 9, 10)
    runner.holding = True
    chain.until(lambda: runner.held, "a step")
    chain.until_statuses(api, 1)
    assert api.status is not None and api.status.running == 1
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_garbage_on_the_link_to_the_apis_is_answered_and_changes_nothing(chain: Chain) -> None:
    _, api = chain.begin(limits())
    api.submit(1, 9, 60)
    stranger = chain.stranger()
    for size in range(60):
        stranger.send_bytes(os.urandom(size))
        api.socket.send(os.urandom(size))
    stranger.send_bytes(b"\0" * 8 + b"\x91" * 100_000)
    chain.until(lambda: any(refused.code == wire.BAD_FRAME for refused in stranger.of(Refused)), "an answer")
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_garbage_from_the_runner_changes_nothing(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    api.submit(1, 9, 60)
    chain.until(lambda: len(api.tokens[1]) > 3, "some tokens")
    assert runner.holder is not None
    for size in range(60):
        runner.socket.send_multipart((runner.holder, os.urandom(size)))
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_a_replayed_frame_is_dropped(chain: Chain) -> None:
    _, api = chain.begin(limits())
    stranger = chain.stranger()
    stranger.send(Hello("api", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, new_instance()), session=1)
    chain.until(lambda: stranger.of(Welcome), "a welcome")
    bad = Submit(5, b"", SamplingParams(4))
    for _ in range(3):
        stranger.send(bad, session=1, sequence=0)
    chain.until_statuses(api, 1)
    assert [len(outputs.rejected) for outputs in stranger.of(Outputs)] == [1]


def test_an_id_that_is_live_is_refused_and_the_live_one_goes_on(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    other = chain.connected()
    runner.holding = True
    api.submit(1, 9, 20)
    chain.until(lambda: runner.held, "a step")
    column = pack_i32([5, 6, 7])
    api.send(Submit(1, column, SamplingParams(9)))
    other.send(Submit(1, column, SamplingParams(9)))
    chain.until(lambda: 1 in api.rejected and 1 in other.rejected, "both refusals")
    assert api.rejected[1][0].status == 409
    runner.holding = False
    runner.release()
    chain.until(lambda: api.has(1), "the end of the first")
    api.assert_complete(1)


@pytest.mark.parametrize(
    "bad",
    [
        Submit(5, b"", SamplingParams(4)),
        Submit(5, b"\1\0\0", SamplingParams(4)),
        Submit(5, pack_i32([1, 2]), SamplingParams(0)),
        Submit(5, pack_i32([1, 2]), SamplingParams(-3)),
        Submit(5, pack_i32([1, 50_000]), SamplingParams(4)),
        Submit(5, pack_i32([-1, 2]), SamplingParams(4)),
        Submit(5, pack_i32([1, 2]), SamplingParams(4), emitted=pack_i32([60_000])),
    ],
    ids=["no-prompt", "ragged-prompt", "no-tokens", "negative", "past-the-vocabulary", "negative-id", "wrong-emitted"],
)
def test_a_bad_request_is_refused_with_a_reason_and_disturbs_nobody(chain: Chain, bad: Submit) -> None:
    _, api = chain.begin(limits())
    api.submit(1, 9, 20)
    api.send(bad)
    chain.until(lambda: 5 in api.rejected and api.has(1), "the refusal and the other's end")
    rejected = api.rejected[5][0]
    assert rejected.code and rejected.message
    assert rejected.status == 400
    api.assert_complete(1)


@pytest.mark.parametrize(
    ("outer", "params"),
    [
        ({"priority": 2**62}, {}),
        ({"priority": -(2**62)}, {}),
        ({"timeout_ms": 2**62, "deadline_ms": 2**62}, {}),
        ({"arrival_ns": -(2**62)}, {}),
        ({}, {"max_tokens": 2**62}),
        ({}, {"min_tokens": 2**62}),
        ({}, {"min_tokens": -(2**62)}),
        ({}, {"stop_token_ids": (-5, 2**62)}),
        ({}, {"eos_token_ids": (-5, 2**62), "ignore_eos": False}),
        ({}, {"temperature": float("inf"), "seed": 2**64 - 1, "choice": -(2**62)}),
        ({"label": "é" * 10_000, "tenant": "\0" * 1000, "cache_salt": "\N{SNOWMAN}" * 1000, "routing_key": "x"}, {}),
    ],
    ids=lambda value: "-".join(value) or "submit",
)
def test_a_request_with_extreme_values_ends_or_is_refused(
    chain: Chain, outer: dict[str, Any], params: dict[str, Any]
) -> None:
    _, api = chain.begin(limits(12))
    sampling = SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **params})
    prompt = [token_at(7, j) for j in range(6)]
    chain.world.asked[7] = Asked(prompt, sampling, outer.get("cache_salt", ""))
    api.mine.add(7)
    api.tokens[7] = []
    api.send(Submit(7, pack_i32(prompt), sampling, **outer))
    api.submit(1, 9, 20)
    chain.until(lambda: (7 in api.rejected or api.has(7)) and api.has(1), "both ends")
    api.assert_complete(1)


def test_an_id_that_no_column_can_hold_does_not_end_the_process(chain: Chain) -> None:
    _, api = chain.begin(limits())
    api.send(Submit(-1, pack_i32([5, 6]), SamplingParams(4)))
    api.submit(1, 9, 5)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_columns_that_are_not_whole_do_not_end_the_process(chain: Chain) -> None:
    _, api = chain.begin(limits())
    api.submit(1, 9, 20)
    api.send(Abort(pack_u64([7])[:5]))
    api.send(Extend(99, b"\1\0\0"))
    api.submit(2, 9, 5)
    chain.until(lambda: api.has(1, 2), "both ends")
    api.assert_complete(1, 2)


@pytest.mark.needs("control")
def test_a_control_message_gets_one_answer_with_its_nonce(chain: Chain) -> None:
    _, api = chain.begin(limits())
    api.ask(7, "status")
    api.ask(8, "no-such-action")
    chain.until(lambda: len(api.replies) == 2, "two replies")
    assert {reply.nonce: reply.ok for reply in api.replies} == {7: True, 8: False}


def test_ids_may_be_any_unsigned_64_bit_number(chain: Chain) -> None:
    _, api = chain.begin(limits())
    big = 2**64 - 1
    api.submit(big, [token_at(1, j) for j in range(5)], 4)
    api.submit(0, 5, 4)
    chain.until(lambda: api.has(big, 0), "both ends")
    api.assert_complete(big, 0)
