"""Requests that wait for a grammar, for KV from elsewhere or for the rest of their prompt, by real processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from harness import Server, running_server, wait_until

from protocol.columns import pack_i32, pack_u64
from protocol.messages import Abort, Extend, RequestStatus, SamplingParams, Submit
from tests.e2e.kit import samples_of, wait_until_idle
from tests.e2e.operate import BareApi, bare_api, ctl

PROMPT = list(range(100, 150))  # three blocks of 16, and two tokens
numbers = count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A simulated model whose grammars take 300 ms and whose KV from elsewhere takes 200 ms."""
    flags = ("--sim-step-ms", "2", "--sim-num-blocks", "64", "--sim-grammar-ms", "300", "--sim-kv-fetch-ms", "200")
    with running_server("--backend", "sim", *flags) as started:
        yield started


@pytest.fixture
def api(server: Server) -> Iterator[BareApi]:
    with bare_api(server) as connected:
        yield connected
    seen = wait_until_idle(server)
    assert not [name for name in seen if name.startswith("triptych_runner_failed_steps_total{") and seen[name]]


def submit(api: BareApi, prompt: list[int], *, salt: str = "", grammar: str = "", **fields: Any) -> int:
    """Submit a request for 8 tokens; its number."""
    number = next(numbers)
    params = SamplingParams(max_tokens=8, seed=7, ignore_eos=True, grammar=grammar)
    api.submit(Submit(number, pack_i32(prompt), params, cache_salt=salt, label=f"external-{number}", **fields))
    return number


def answer(api: BareApi, prompt: list[int], **fields: Any) -> list[int]:
    """The tokens of a request that ends well."""
    number = submit(api, prompt, **fields)
    assert api.end_of(number).status is RequestStatus.LENGTH
    return api.tokens[number]


def events(server: Server, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ctl(server, "timeline", str(number))["events"]
    return found


def parked(server: Server) -> dict[str, int]:
    found: dict[str, int] = ctl(server, "status")["parked"]
    return found


def test_a_request_waits_for_its_grammar_and_holds_nobody_up(server: Server, api: BareApi) -> None:
    plain = answer(api, PROMPT)
    waiting = submit(api, PROMPT, grammar="json_schema:{}")
    assert parked(server) == {"waiting_for_grammar": 1}
    assert answer(api, PROMPT) == plain, "others go on"
    assert waiting not in api.tokens
    assert api.end_of(waiting).status is RequestStatus.LENGTH and api.tokens[waiting] == plain
    order = [event["event"] for event in events(server, waiting)]
    assert order.index("grammar_ready") < order.index("admitted")


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(server: Server, api: BareApi) -> None:
    bad = submit(api, PROMPT, grammar="invalid:{")
    good = submit(api, PROMPT, grammar="json_schema:{}")
    ended = api.end_of(bad)
    assert (ended.status, ended.code) == (RequestStatus.ERROR, "invalid_grammar") and "invalid:{" in ended.message
    assert api.end_of(good).status is RequestStatus.LENGTH


def test_a_request_that_is_aborted_while_its_grammar_compiles_never_runs(server: Server, api: BareApi) -> None:
    number = submit(api, PROMPT, grammar="json_schema:{}")
    api.send(Abort(pack_u64([number])))
    assert api.end_of(number).status is RequestStatus.ABORTED
    answer(api, PROMPT, grammar="json_schema:{}")  # the answer to the first grammar has come by now
    assert number not in api.tokens


@pytest.mark.parametrize(
    ("source", "arrived", "cached"), [("store", 48, 48), ("partial:40", 32, 32), ("partial:3", 0, 0), ("fail", 0, 0)]
)
def test_kv_from_elsewhere_saves_its_part_of_the_prompt_and_changes_no_token(
    server: Server, api: BareApi, source: str, arrived: int, cached: int
) -> None:
    plain = answer(api, PROMPT, salt=f"without {source}")
    number = submit(api, PROMPT, salt=f"with {source}", kv_source=source)
    assert api.end_of(number).status is RequestStatus.LENGTH and api.tokens[number] == plain
    happened = {event["event"]: event for event in events(server, number)}
    assert happened["fetching_kv"]["tokens"] == 48
    assert happened["kv_arrived"]["tokens"] == arrived and happened["admitted"]["cached"] == cached


def test_only_what_the_cache_does_not_hold_is_fetched(server: Server, api: BareApi) -> None:
    plain = answer(api, PROMPT[:40], salt="warm")
    longer = [*PROMPT[:32], *range(500, 540)]
    alone = answer(api, longer, salt="cold")
    assert answer(api, longer, salt="warm", kv_source="store") == alone
    assert answer(api, PROMPT[:40], salt="warm") == plain


def test_a_request_that_leaves_while_its_kv_arrives_gives_its_blocks_back_in_the_end(
    server: Server, api: BareApi
) -> None:
    held = "triptych_scheduler_kv_cache_blocks{state=held}"
    number = submit(api, PROMPT, salt="leaves", kv_source="store")
    api.send(Abort(pack_u64([number])))
    assert api.end_of(number).status is RequestStatus.ABORTED
    wait_until(lambda: samples_of(server)[held] == 0, 60, "the transfer's blocks")
    answer(api, PROMPT, salt="after")


def test_blocks_of_a_request_that_has_just_left_can_be_fetched_into(server: Server, api: BareApi) -> None:
    """The step that says who has left goes before the order, although it computes nothing."""
    running = submit(api, list(range(900)), salt="large", open=True)
    api.send(Abort(pack_u64([running])))
    assert api.end_of(running).status is RequestStatus.ABORTED
    answer(api, list(range(2000, 2800)), salt="next", kv_source="store")


def test_a_source_that_never_answers_costs_the_wait_and_its_blocks() -> None:
    flags = ("--backend", "sim", "--sim-step-ms", "2", "--kv-fetch-timeout-s", "0.2")
    with running_server(*flags) as server, bare_api(server) as api:
        plain = answer(api, PROMPT, salt="without")
        number = submit(api, PROMPT, salt="with", kv_source="never")
        assert api.end_of(number).status is RequestStatus.LENGTH and api.tokens[number] == plain
        happened = {event["event"]: event for event in events(server, number)}
        assert happened["kv_arrived"]["message"] == "timed out"
        status = ctl(server, "status")
        assert status["usable_blocks"] - status["free_blocks"] == 3, "the transfer may still write to them"


def test_a_prompt_in_parts_gives_the_tokens_of_the_whole_and_waits_without_a_slot(server: Server, api: BareApi) -> None:
    whole = answer(api, PROMPT, salt="whole")
    number = submit(api, PROMPT[:20], salt="parts", open=True)

    def rests() -> bool:
        status = ctl(server, "status")
        return status["parked"] == {"waiting_for_input": 1} and status["running"] == 0

    wait_until(rests, 60, "an open request that rests")
    api.send(Extend(number, pack_i32(PROMPT[20:33])))
    api.send(Extend(number, pack_i32(PROMPT[33:]), last=True))
    assert api.end_of(number).status is RequestStatus.LENGTH and api.tokens[number] == whole


def test_the_real_model_compiles_grammars_says_why_it_cannot_and_has_no_kv_sources(served: Server) -> None:
    with bare_api(served) as api:
        refused = submit(api, PROMPT, grammar="regex:(a")
        ended = api.end_of(refused)
        assert (ended.status, ended.code) == (RequestStatus.ERROR, "invalid_grammar")
        assert "unclosed group" in ended.message
        bound = submit(api, PROMPT, grammar="regex:[0-9]+")
        assert api.end_of(bound).status is RequestStatus.LENGTH
        assert api.tokens[bound] != answer(api, PROMPT, salt="free")
        assert answer(api, PROMPT, salt="a", kv_source="store") == answer(api, PROMPT, salt="b")


def test_a_runner_that_dies_while_they_wait_is_asked_again(server: Server, api: BareApi) -> None:
    runner = server.children()["runner"]
    plain = answer(api, PROMPT, salt="before")
    grammar = submit(api, PROMPT, salt="g", grammar="json_schema:{}")
    fetch = submit(api, PROMPT, salt="f", kv_source="store")
    runner.kill()
    for number in (grammar, fetch):
        assert api.end_of(number).status is RequestStatus.LENGTH and api.tokens[number] == plain
