"""Operators' orders where there are several replicas: for all of them, for one, and for those that come later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.ctl_text import render
from protocol.columns import pack_i32
from protocol.messages import Control, Extend
from scheduler.orders import Orders
from tests.scheduler.ends import Chain
from tests.scheduler.isolated import limits, solo_tokens
from tests.scheduler.replica_kit import MakeReplicas, replicas_in, words


@pytest.fixture
def make(runtime_dir: Path) -> Iterator[MakeReplicas]:
    with replicas_in(runtime_dir) as making:
        yield making


def test_status_adds_up_and_says_how_each_stands(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    for request_id in range(4):
        api.submit(request_id, 20, 3000)
    chain.until(lambda: len(api.tokens) == 4, "the streams")
    chain.stop_replica(1)
    chain.up(1, api)
    body = chain.order(api, "status")
    assert body["usable_blocks"] == 128 and body["settings"]["max_num_seqs"] == 256
    assert [one["runner"] for one in body["replicas"]] == ["ready", "absent"]
    assert sum(one["running"] for one in body["replicas"]) == body["running"] == 4
    text = render("status", body)
    assert "replica 0" in text and "runner absent" in text
    one = chain.order(api, "status", replica="1")
    assert one["usable_blocks"] == 64 and len(one["replicas"]) == 1


def test_a_request_is_explained_by_whoever_has_it_or_had_it(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    api.submit(1, 20, 5, label="ada")
    api.submit(2, 20, 3000, label="ada")
    chain.until(lambda: 1 in api.finished and 2 in api.tokens, "an end and a stream")
    assert chain.order(api, "explain", id="1")["status"] == "LENGTH"
    place = chain.order(api, "timeline", id="2")["replica"]
    assert 2 in chain.rows(place)
    both = chain.order(api, "explain", label="ada")["requests"]
    assert {one["id"] for one in both} == {"1", "2"} and {one["replica"] for one in both} == {0, 1}
    assert chain.order(api, "explain", id="99")["code"] == "not_found"
    chain.stop_replica(place)
    chain.until(lambda: chain.order(api, "timeline", id="2")["replica"] != place, "its move")
    events = [event["event"] for event in chain.order(api, "timeline", id="2")["events"]]
    assert events[:2] == ["arrived", "moved"]


def test_settings_change_everywhere_or_nowhere(make: MakeReplicas) -> None:
    chain = make()
    chain.start_replica(0, limit=limits(64, max_num_seqs=64))
    chain.start_replica(1, limit=limits(64, max_num_seqs=32))
    chain.start()
    api = chain.api()
    chain.up(2, api)
    assert chain.order(api, "set", max_num_seqs="16")["settings"]["max_num_seqs"] == 16
    refused = chain.order(api, "set", max_num_seqs="48", queue_policy="lof")
    assert refused["code"] == "invalid_argument" and "32" in refused["message"]
    for number in ("0", "1"):
        settings = chain.order(api, "status", replica=number)["settings"]
        assert (settings["max_num_seqs"], settings["queue_policy"]) == (16, "")
    chain.order(api, "set", max_num_seqs="48", replica="0")
    assert chain.order(api, "status", replica="0")["settings"]["max_num_seqs"] == 48
    assert chain.order(api, "status", replica="1")["settings"]["max_num_seqs"] == 16


def test_orders_reach_a_replica_that_comes_later(make: MakeReplicas) -> None:
    chain = make()
    chain.start_replica(0)
    chain.start()
    api = chain.api()
    chain.up(1, api)
    chain.order(api, "set", max_num_seqs="7")
    chain.order(api, "drain")
    chain.order(api, "pause")
    chain.start_replica(1)
    chain.up(2, api)
    late = chain.order(api, "status", replica="1")
    assert (late["settings"]["max_num_seqs"], late["draining"], late["paused"]) == (7, True, "new")
    chain.until(lambda: api.status.draining, "the word to the APIs")  # type: ignore[union-attr]
    api.submit(1, 20, 5)
    chain.until(lambda: 1 in api.rejected, "the refusal")
    chain.order(api, "resume")
    api.submit(2, 20, 5)
    chain.until(lambda: 2 in api.finished, "an end")


def test_one_replica_is_drained_while_the_other_serves(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    for request_id in range(2):
        api.submit(request_id, 20, 400)
    chain.until(lambda: len(api.tokens) == 2, "a stream on each")
    body = chain.order(api, "drain", replica="0")
    assert body["draining"] and not chain.order(api, "status")["draining"]
    for request_id in range(2, 8):
        api.submit(request_id, 20, 5)
    chain.until(lambda: len(api.finished) == 8, "all ends")
    assert not api.rejected and len(chain.rows(0)) == 1
    chain.order(api, "resume", replica="0")
    api.submit(9, 20, 5)
    chain.until(lambda: 9 in api.finished, "an end")
    assert 9 in chain.rows(0)


def test_forgotten_prefixes_attract_nobody(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    api.submit_prompt(1, words(1, 200), 5)
    chain.until(lambda: 1 in api.finished, "an end")
    assert chain.order(api, "reset_prefix_cache")["forgotten"] == 12
    api.submit_prompt(2, words(2, 200), 5)
    chain.until(lambda: 2 in api.finished, "an end")
    api.submit_prompt(3, words(1, 200), 5)
    chain.until(lambda: 3 in api.finished, "an end")
    assert (chain.rows(0), chain.rows(1)) == ({1, 2}, {3}), "each where least is remembered since then"
    assert chain.metric("prefix_cache_hit_tokens_total", replica="0") == 0


@pytest.mark.parametrize("replica", ["2", "x", "-1"])
def test_a_replica_that_does_not_exist_is_named(make: MakeReplicas, replica: str) -> None:
    chain = make()
    api = chain.all_up()
    answer = chain.order(api, "drain", replica=replica)
    assert answer == {"code": "invalid_argument", "message": f"replica {replica!r}: there are 0 to 1"}


def test_before_any_runner_there_is_nobody_to_give_orders_to(make: MakeReplicas) -> None:
    chain = make()
    chain.start()
    api = chain.api()
    chain.until(lambda: api.channel.connected, "a session")
    assert chain.order(api, "status")["code"] == "not_ready"
    assert "has had no runner yet" in chain.order(api, "status", replica="1")["message"]


def test_with_one_runner_there_is_no_replica_to_name(runtime_dir: Path) -> None:
    chain = Chain(runtime_dir)
    try:
        chain.connected()
        assert chain.process is not None
        reply = chain.process._answer(Control(1, "drain", {"replica": "0"}))
        assert not reply.ok and b"there is one runner" in reply.body
    finally:
        chain.close()


def test_more_of_a_prompt_goes_where_its_beginning_is(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    api.submit(1, 20, 3000)
    whole = words(5, 100)
    api.submit_prompt(5, whole[:40], 8, open=True)
    chain.until(lambda: 5 in chain.rows(0) | chain.rows(1), "its first part")
    api.channel.send(Extend(5, pack_i32(whole[40:]), True))
    chain.until(lambda: 5 in api.finished, "its end")
    assert api.tokens[5] == solo_tokens(5, 100, 8)


def test_orders_keep_nothing_of_questions(make: MakeReplicas) -> None:
    chain = make()
    api = chain.all_up()
    for _ in range(3):
        chain.order(api, "status")
        chain.order(api, "drain")
    orders = chain.process._orders  # type: ignore[union-attr]
    assert isinstance(orders, Orders) and list(orders._lasting) == ["drain"]
