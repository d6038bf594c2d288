"""Conformance: how links begin, what is refused, and who may command."""

from __future__ import annotations

import msgspec
import pytest

from protocol import wire
from protocol.channels import new_instance
from protocol.columns import pack_i32, pack_u64
from protocol.messages import Abort, Goodbye, Hello, Refused, SamplingParams, Submit, Welcome
from tests.conformance.chain import Chain
from tests.conformance.ends import limits, token_at
from tests.conformance.judge import Asked


def hello(role: str = "api", version: int = wire.PROTOCOL_VERSION, digest: str = wire.SCHEMA_DIGEST) -> Hello:
    return Hello(role, version, digest, new_instance())


@pytest.mark.parametrize(
    "order",
    [
        ("runner", "scheduler", "api"),
        ("scheduler", "runner", "api"),
        ("scheduler", "api", "runner"),
        ("api", "runner", "scheduler"),
    ],
    ids="-".join,
)
def test_any_order_of_starts_ends_in_a_chain_that_serves_what_was_asked_early(
    fresh_chain: Chain, order: tuple[str, ...]
) -> None:
    chain = fresh_chain
    starts = {"runner": chain.start_runner, "scheduler": chain.start, "api": chain.api}
    for name in order:
        starts[name]()
        if chain.process and chain.apis and not chain.world.asked:
            chain.until(lambda: chain.apis[0].channel.connected, "the API's session")
            chain.apis[0].submit(1, 10, 4)
    api = chain.apis[0]
    chain.until(lambda: api.has(1), "the end of the early request")
    api.assert_complete(1)


def test_the_scheduler_names_itself_and_passes_the_runners_limits_on(chain: Chain) -> None:
    runner, api = chain.begin(limits(33))
    first = chain.connected().welcomes[0]
    assert (first.role, first.version, first.schema_digest) == ("scheduler", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST)
    assert first.instance and first.lease_ms > 0
    assert first.epoch == runner.epoch
    assert first.limits == runner.limits
    assert api.status is not None and api.status.limits == runner.limits
    assert runner.hellos[-1].role == "scheduler"
    assert runner.hellos[-1].instance == first.instance


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (hello(version=999), wire.BAD_VERSION),
        (hello(digest="0" * 16), wire.BAD_DIGEST),
        (hello(role="runner"), "wrong_role"),
    ],
    ids=["version", "digest", "role"],
)
def test_a_peer_that_does_not_fit_is_refused_with_the_reason(chain: Chain, wrong: Hello, code: str) -> None:
    _, api = chain.begin(limits())
    stranger = chain.stranger()
    stranger.send(wrong)
    refused = chain.until(lambda: stranger.of(Refused), "a refusal")[0]
    assert refused.code == code
    assert refused.message
    api.submit(1, 5, 5)
    chain.until(lambda: api.has(1), "the end of another API's request")
    api.assert_complete(1)


def test_a_repeated_hello_is_one_session(chain: Chain) -> None:
    chain.begin(limits())
    stranger = chain.stranger()
    for _ in range(3):
        stranger.send(hello(), session=9)
    chain.until(lambda: stranger.of(Welcome), "a welcome")
    submit = ask(chain, 1)
    stranger.send(submit, session=9, sequence=0)
    stranger.send(hello(), session=9)
    chain.until(lambda: any(o.finished for o in stranger.received if hasattr(o, "finished")), "the request's end")
    assert len(stranger.of(Welcome)) == 1


def ask(chain: Chain, request_id: int) -> Submit:
    """A submit for a raw peer, known to the judge."""
    params = SamplingParams(4, ignore_eos=True)
    prompt = [token_at(request_id, j) for j in range(6)]
    chain.world.asked[request_id] = Asked(prompt, params)
    return Submit(request_id, pack_i32(prompt), params)


def test_a_message_without_a_session_is_answered_with_a_call_for_a_hello(chain: Chain) -> None:
    runner, _ = chain.begin(limits())
    stranger = chain.stranger()
    stranger.send(ask(chain, 1), session=4)
    refused = chain.until(lambda: stranger.of(Refused), "a refusal")[0]
    assert refused.code == wire.NO_SESSION
    assert not runner.judge.steps


def test_frames_of_a_session_that_was_given_up_are_stale(chain: Chain) -> None:
    runner, api = chain.begin(limits())
    stranger = chain.stranger()
    stranger.send(hello(), session=1)
    chain.until(lambda: len(stranger.of(Welcome)) == 1, "a welcome")
    stranger.send(hello(), session=2)
    chain.until(lambda: len(stranger.of(Welcome)) == 2, "a second welcome")
    stranger.send(ask(chain, 1), session=1, sequence=1)
    stranger.send(Abort(pack_u64([77])), session=2, sequence=1)
    chain.until_statuses(api, 1)
    assert not runner.judge.steps


def test_fields_that_a_newer_peer_appends_are_ignored(chain: Chain) -> None:
    chain.begin(limits())
    stranger = chain.stranger()
    stranger.send(hello(), session=1)
    chain.until(lambda: stranger.of(Welcome), "a welcome")
    fields = [*msgspec.to_builtins(ask(chain, 1), builtin_types=(bytes,)), "a field of tomorrow", 17]
    stranger.send_bytes(b"\x01\0\0\0\0\0\0\0" + msgspec.msgpack.encode(fields))
    chain.until(lambda: any(o.finished for o in stranger.received if hasattr(o, "finished")), "the request's end")


@pytest.mark.parametrize("code", [wire.BAD_VERSION, wire.BAD_DIGEST])
def test_a_runner_of_another_build_ends_the_process_with_the_reason_in_its_log(fresh_chain: Chain, code: str) -> None:
    runner = fresh_chain.start_runner()
    runner.refusal = Refused(code, "another build")
    fresh_chain.start()
    assert fresh_chain.until_exit() > 0
    assert code in fresh_chain.log()
    assert "another build" in fresh_chain.log()


def test_an_occupied_runner_is_asked_again_until_it_is_free(chain: Chain) -> None:
    runner, _ = chain.begin(limits())
    chain.apis.clear()
    runner.occupied = 3
    runner.leave()
    api = chain.api()
    chain.until_ready(api)
    assert runner.occupied == 0
    api.submit(1, 5, 5)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_an_occupied_runner_is_not_asked_faster_than_it_refuses(chain: Chain) -> None:
    """Hellos come five times a second, statuses at least twice: a flood would be thousands between two of them."""
    runner, api = chain.begin(limits())
    runner.occupied = 100_000
    runner.leave()
    chain.until_statuses(api, 1)
    asked = len(runner.hellos)
    chain.until_statuses(api, 2)
    assert len(runner.hellos) - asked < 20
    runner.occupied = 0
    chain.until_ready(api)


def test_a_fenced_scheduler_ends_and_says_goodbye(fresh_chain: Chain) -> None:
    runner, api = fresh_chain.begin(limits())
    runner.holding = True
    api.submit(1, 5, 50)
    fresh_chain.until(lambda: runner.held, "a step")
    runner.welcoming = False
    runner.leave("fenced", "scheduler 00bb took over")
    assert fresh_chain.until_exit() > 0
    fresh_chain.until(lambda: api.goodbyes, "the goodbye")
    assert not api.has(1), "the request is not over: the next scheduler goes on with it"


def test_a_stop_says_goodbye_on_both_links_and_exits_with_zero(fresh_chain: Chain) -> None:
    runner, api = fresh_chain.begin(limits())
    api.submit(1, 5, 400)
    fresh_chain.until(lambda: len(api.tokens[1]) > 3, "some tokens")
    fresh_chain.terminate()
    assert fresh_chain.until_exit() == 0
    fresh_chain.until(lambda: api.goodbyes and runner.goodbyes, "both goodbyes")
    assert api.goodbyes[0].code == runner.goodbyes[0].code == "shutdown"
    assert not api.has(1), "the request is not over: the next scheduler goes on with it"


def test_a_goodbye_of_an_unknown_peer_is_harmless(chain: Chain) -> None:
    _, api = chain.begin(limits())
    chain.stranger().send(Goodbye("shutdown"), session=3)
    api.submit(1, 5, 5)
    chain.until(lambda: api.has(1), "the end")
    api.assert_complete(1)


def test_two_schedulers_can_not_listen_at_one_address(chain: Chain) -> None:
    _, api = chain.begin(limits())
    second = Chain(chain.subject, chain.directory, "second.log")
    try:
        second.start()
        process = second.process
        assert process is not None
        chain.until(lambda: process.poll() is not None, "the second's end")  # the first's peers keep their leases
        assert process.returncode > 0
    finally:
        second.close()
    api.submit(1, 5, 5)
    chain.until(lambda: api.has(1), "the end of a request to the first")
    api.assert_complete(1)
