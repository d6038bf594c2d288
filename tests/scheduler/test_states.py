"""Every state a request can be in, reached by the messages that lead there, and left in every way there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protocol.columns import i32
from protocol.messages import CompileGrammar, FetchKv, GrammarStatus, KvStatus, RequestStatus, SamplingParams
from scheduler.request import TRANSITIONS, IllegalTransition, Request
from scheduler.results import repeats
from tests.scheduler.isolated import Isolated, default_sample, limits, solo_tokens

S = RequestStatus


def prompt_of(request_id: int, length: int) -> list[int]:
    return [default_sample(request_id, j) for j in range(length)]


def fetching(length: int = 40, usable: int = 16, **config: Any) -> tuple[Isolated, FetchKv]:
    """A request whose KV is on its way: all whole blocks of its prompt but what leaves a token to compute."""
    isolated = Isolated(usable, **config)
    isolated.add(1, length, max_tokens=4, kv_source="store")
    assert isolated.step() == {}
    (order,) = isolated.orders()
    assert isinstance(order, FetchKv)
    return isolated, order


# --- the table --------------------------------------------------------------------------------------------------


def test_finished_is_what_comes_after_preempted() -> None:
    names = [status.name for status in S if not status.is_finished]
    parked = ["WAITING_FOR_GRAMMAR", "WAITING_FOR_REMOTE_KV", "WAITING_FOR_INPUT"]
    assert names == ["WAITING", *parked, "RUNNING", "PREEMPTED"]
    assert [status.name for status in S if status.is_finished] == [
        *("STOPPED", "LENGTH", "ABORTED", "IGNORED", "ERROR", "REPETITION")
    ]


@pytest.mark.parametrize("start", S)
@pytest.mark.parametrize("to", S)
def test_a_transition_outside_the_table_is_an_error_that_names_both_states(
    start: RequestStatus, to: RequestStatus
) -> None:
    request = Request(7, 0, SamplingParams(1), bytearray(4), 1, 2, status=start)
    if to in TRANSITIONS[start]:
        request.transition(to)
        assert request.status == to
    else:
        with pytest.raises(IllegalTransition, match=f"request 7: {start.name} -> {to.name}"):
            request.transition(to)
        assert request.status == start


def test_terminal_states_lead_nowhere_and_live_ones_can_all_end() -> None:
    for status, ways in TRANSITIONS.items():
        assert (not ways) == status.is_finished
        assert status.is_finished or S.ABORTED in ways


# --- grammars ---------------------------------------------------------------------------------------------------


def test_a_grammar_is_asked_for_and_its_request_enters_when_it_is_ready() -> None:
    isolated = Isolated(16)
    isolated.add(1, 8, grammar="json_schema:{}")
    assert isolated.orders() == [CompileGrammar(1, "json_schema:{}")]
    assert isolated.step() == {} and isolated.request(1).status == S.WAITING_FOR_GRAMMAR
    isolated.core.on_grammar_status(GrammarStatus(1))
    assert isolated.request(1).status == S.WAITING
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 8, 4)


def test_a_grammar_that_does_not_compile_ends_its_request_alone_with_the_reason() -> None:
    isolated = Isolated(16)
    isolated.add(1, 8, grammar="json_schema:{")
    isolated.add(2, 8)
    isolated.core.on_grammar_status(GrammarStatus(1, "unbalanced brace"))
    isolated.collect()
    assert isolated.status(1) == S.ERROR
    assert (isolated.finished[1].code, isolated.finished[1].message) == ("invalid_grammar", "unbalanced brace")
    isolated.drain()
    assert isolated.tokens == {2: solo_tokens(2, 8, 4)}


def test_word_of_a_grammar_that_comes_late_or_twice_changes_nothing() -> None:
    isolated = Isolated(16)
    isolated.add(1, 8, grammar="g")
    isolated.add(2, 8, grammar="g")
    isolated.abort(2)
    for request_id in (1, 1, 2, 3):
        isolated.core.on_grammar_status(GrammarStatus(request_id))
    isolated.step()
    isolated.core.on_grammar_status(GrammarStatus(1, "too late to matter"))
    isolated.drain()
    assert isolated.tokens == {1: solo_tokens(1, 8, 4)}
    assert isolated.status(2) == S.ABORTED


@pytest.mark.parametrize("ran", [False, True])
def test_a_new_runner_is_asked_for_the_grammar_again_whether_or_not_its_request_has_run(ran: bool) -> None:
    isolated = Isolated(16)
    isolated.add(1, 8, max_tokens=9, grammar="g")
    isolated.orders()
    if ran:
        isolated.core.on_grammar_status(GrammarStatus(1))
        isolated.step()
    isolated.lose_runner()
    assert isolated.request(1).status == S.WAITING_FOR_GRAMMAR
    assert isolated.orders() == [CompileGrammar(1, "g")]
    isolated.core.on_grammar_status(GrammarStatus(1))
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 8, 9)


# --- KV from elsewhere ------------------------------------------------------------------------------------------


def test_remote_kv_fills_all_but_the_last_blocks_and_only_the_rest_is_computed() -> None:
    isolated, order = fetching(40)
    assert (order.num_tokens, len(i32(order.block_ids))) == (32, 2)
    assert isolated.request(1).status == S.WAITING_FOR_REMOTE_KV and isolated.core.pool.num_free == 14
    isolated.deliver_kv(order, prompt_of(1, 40), 32)
    assert isolated.step() == {1: 8}
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 40, 4)


def test_only_what_the_prefix_cache_lacks_is_fetched() -> None:
    isolated = Isolated(16)
    isolated.add(1, prompt_of(5, 33), max_tokens=1)
    isolated.drain()
    isolated.add(2, [*prompt_of(5, 32), *prompt_of(2, 32)], kv_source="store")
    isolated.step()
    (order,) = isolated.orders()
    assert (order.num_tokens, len(i32(order.block_ids))) == (48, 1)
    isolated.deliver_kv(order, [*prompt_of(5, 32), *prompt_of(2, 32)], 48)
    assert isolated.step() == {2: 16}
    isolated.drain()


def test_partly_arrived_kv_is_used_in_whole_blocks() -> None:
    isolated, order = fetching(60)
    isolated.deliver_kv(order, prompt_of(1, 60), 31)
    assert isolated.step() == {1: 44}
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 60, 4)


def test_kv_that_does_not_come_is_computed_here() -> None:
    isolated, order = fetching(40)
    isolated.core.on_kv_status(KvStatus(1, order.incarnation, 0, "no such source"))
    assert isolated.step() == {1: 40} and isolated.orders() == []
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 40, 4)


def test_kv_that_takes_too_long_is_computed_here_while_its_pages_stay_pinned_until_the_transfer_ends() -> None:
    isolated, order = fetching(40, kv_fetch_timeout_s=1.0)
    isolated.now += 2_000_000_000
    assert isolated.step() == {1: 40}
    assert isolated.core.pool.num_free == 16 - 3 - 2
    while 1 not in isolated.finished:
        isolated.step()
    assert isolated.core.pool.num_free == 14, "two pages belong to the transfer"
    isolated.core.on_kv_status(KvStatus(1, order.incarnation, 32))
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 40, 4)


def test_an_abort_during_a_transfer_frees_its_pages_only_when_the_runner_says_that_it_has_ended() -> None:
    isolated, order = fetching(64, usable=4)
    isolated.abort(1)
    assert isolated.status(1) == S.ABORTED and isolated.core.pool.num_free == 1
    isolated.add(2, 20, max_tokens=2)
    assert isolated.step() == {}, "three of four pages are being written to by somebody else"
    isolated.core.on_kv_status(KvStatus(1, order.incarnation, 48))
    assert isolated.core.pool.num_free == 4
    isolated.core.on_kv_status(KvStatus(1, order.incarnation, 48))
    isolated.drain()
    assert isolated.tokens == {2: solo_tokens(2, 20, 2)}


def test_a_lost_runner_means_a_new_transfer_under_a_new_incarnation() -> None:
    isolated, order = fetching(40)
    isolated.lose_runner()
    isolated.step()
    (again,) = isolated.orders()
    assert again.incarnation > order.incarnation
    isolated.core.on_kv_status(KvStatus(1, order.incarnation, 32))
    assert isolated.request(1).status == S.WAITING_FOR_REMOTE_KV, "the old runner's word is stale"
    isolated.deliver_kv(again, prompt_of(1, 40), 32)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 40, 4)


# --- prompts in parts -------------------------------------------------------------------------------------------


def test_an_open_session_computes_what_it_has_then_keeps_its_blocks_and_no_slot() -> None:
    isolated = Isolated(16, max_num_seqs=1)
    parts = prompt_of(1, 50)
    isolated.add(1, parts[:20], open=True)
    assert isolated.step() == {1: 19}
    request = isolated.request(1)
    assert request.status == S.WAITING_FOR_INPUT and len(request.blocks) == 2 and not len(isolated.core.table)
    isolated.add(2, 8, max_tokens=2)
    isolated.step()
    assert isolated.running() == [2], "the only slot is free for others"
    isolated.extend(1, parts[20:40])
    isolated.extend(1, parts[40:], last=True)
    isolated.drain()
    assert isolated.tokens == {1: solo_tokens(1, 50, 4), 2: solo_tokens(2, 8, 2)}


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("cuts", [(1, 2, 3), (16, 32), (7, 16, 40), (48,)])
def test_how_a_prompt_is_cut_into_parts_changes_no_output(cuts: tuple[int, ...], budget: int, delay: int) -> None:
    isolated = Isolated(16, delay=delay, max_num_batched_tokens=budget)
    parts = prompt_of(1, 50)
    isolated.add(1, parts[: cuts[0]], max_tokens=6, open=True)
    for start, stop in zip(cuts, (*cuts[1:], 50), strict=True):
        for _ in range(stop % 3):
            isolated.step()
        isolated.extend(1, parts[start:stop], last=stop == 50)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 50, 6)
    assert isolated.core.stats.generated_tokens == 6


def test_an_empty_last_part_closes_a_session() -> None:
    isolated = Isolated(16)
    isolated.add(1, 20, open=True)
    isolated.step()
    isolated.extend(1, [], last=True)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 20, 4)


def test_a_prompt_that_grows_too_long_is_ignored_with_the_numbers() -> None:
    isolated = Isolated(4)
    isolated.add(1, 40, open=True)
    isolated.step()
    isolated.extend(1, prompt_of(3, 40))
    assert isolated.status(1) == S.IGNORED
    assert isolated.finished[1].message == "the prompt has grown to 80 tokens; 64 fit"
    isolated.drain()


def test_a_part_with_a_token_that_does_not_exist_ends_only_its_request() -> None:
    isolated = Isolated(16)
    isolated.add(1, 20, open=True)
    isolated.add(2, 20)
    isolated.step()
    isolated.extend(1, [5, 999_999])
    assert isolated.status(1) == S.IGNORED and isolated.finished[1].code == "invalid_token_id"
    assert "[1] is 999999" in isolated.finished[1].message
    isolated.drain()
    assert isolated.tokens == {2: solo_tokens(2, 20, 4)}


def test_parts_for_others_requests_or_closed_ones_change_nothing() -> None:
    isolated = Isolated(16)
    isolated.add(1, 20)
    isolated.add(2, 20, open=True)
    isolated.extend(1, [5], last=True)
    isolated.extend(2, [5], last=True, peer=3)
    isolated.step()
    assert isolated.request(2).status == S.WAITING_FOR_INPUT
    isolated.abort(2)
    isolated.drain()
    assert isolated.tokens == {1: solo_tokens(1, 20, 4)}


def test_sessions_that_hold_the_whole_pool_between_them_do_not_lock_each_other_out() -> None:
    isolated = Isolated(6)
    for request_id in (1, 2):
        isolated.add(request_id, prompt_of(request_id, 48), max_tokens=4, open=True)
    isolated.step()
    assert isolated.core.pool.num_free == 0
    isolated.add(3, 20, max_tokens=2)
    for request_id in (1, 2):
        isolated.extend(request_id, prompt_of(request_id, 80)[48:], last=True)
    isolated.drain(500)
    assert isolated.tokens == {1: solo_tokens(1, 80, 4), 2: solo_tokens(2, 80, 4), 3: solo_tokens(3, 20, 2)}


def test_an_idle_session_gives_its_blocks_up_when_nothing_else_can_run() -> None:
    isolated = Isolated(4)
    isolated.add(1, 60, open=True)
    isolated.step()
    isolated.add(2, 20, max_tokens=2)
    isolated.step()
    assert isolated.running() == [2] and isolated.request(1).status == S.WAITING_FOR_INPUT
    isolated.extend(1, [], last=True)
    isolated.drain()
    assert isolated.tokens == {1: solo_tokens(1, 60, 4), 2: solo_tokens(2, 20, 2)}


# --- ends -------------------------------------------------------------------------------------------------------


def test_a_request_that_a_smaller_runner_can_never_hold_is_ignored_with_the_numbers() -> None:
    isolated = Isolated(16)
    isolated.add(1, 100)
    isolated.add(2, 20)
    isolated.lose_runner(limits(4))
    assert isolated.status(1) == S.IGNORED and isolated.finished[1].code == "kv_capacity_exceeded"
    assert "100 tokens" in isolated.finished[1].message and "64" in isolated.finished[1].message
    isolated.drain()
    assert isolated.tokens == {2: solo_tokens(2, 20, 4)}


def looping(period: int) -> Callable[[int, int], int]:
    return lambda request_id, position: 500 + position % period if request_id == 1 else 500


@pytest.mark.parametrize(("period", "outputs"), [(1, 3), (2, 6), (3, 9)])
def test_outputs_that_repeat_a_pattern_end_their_request_if_it_asked_for_that(period: int, outputs: int) -> None:
    isolated = Isolated(16, sample=looping(period), delay=1)
    isolated.add(1, 12, max_tokens=40, repetition_max_pattern=3)
    isolated.add(2, 12, max_tokens=20)
    isolated.drain()
    assert isolated.status(1) == S.REPETITION and len(isolated.tokens[1]) == outputs
    assert isolated.status(2) == S.LENGTH and len(isolated.tokens[2]) == 20


def test_repetition_heeds_min_tokens_the_shortest_pattern_and_the_number_of_copies() -> None:
    isolated = Isolated(16, sample=looping(1))
    isolated.add(1, 12, max_tokens=40, repetition_max_pattern=4, repetition_min_pattern=2, repetition_min_count=4)
    isolated.drain()
    assert len(isolated.tokens[1]) == 8
    isolated = Isolated(16, sample=looping(1))
    isolated.add(1, 12, max_tokens=40, repetition_max_pattern=1, min_tokens=20)
    isolated.drain()
    assert len(isolated.tokens[1]) == 20 and isolated.status(1) == S.REPETITION


def test_a_repetition_of_less_than_two_copies_is_refused_at_the_door() -> None:
    isolated = Isolated(16)
    isolated.add(1, 12, repetition_max_pattern=2, repetition_min_count=0)
    assert isolated.rejected[1].code == "invalid_repetition"


def test_repeats_looks_at_the_end_only() -> None:
    outputs = i32(b"".join(token.to_bytes(4, "little") for token in [1, 2, 1, 2, 1, 2, 9, 3, 4, 3, 4]))
    assert repeats(outputs, 1, 3, 2)
    assert not repeats(outputs, 1, 3, 3)
    assert repeats(outputs[:6], 2, 2, 3)
    assert not repeats(outputs[:6], 3, 3, 2)


def test_what_a_client_could_not_mean_is_refused_before_it_reaches_a_column() -> None:
    isolated = Isolated(16)
    isolated.add(1, 4, priority=1 << 40)
    isolated.add(-1, 4)
    isolated.add(3, 4, emitted=[5], open=True)
    codes = {request_id: rejection.code for request_id, rejection in isolated.rejected.items()}
    assert codes == {1: "invalid_priority", -1: "invalid_id", 3: "invalid_open"}


# --- the second queue blocks nobody -----------------------------------------------------------------------------


def park(isolated: Isolated, kind: str) -> None:
    isolated.add(1, 20, **{"grammar": {"grammar": "g"}, "kv": {"kv_source": "s"}, "input": {"open": True}}[kind])
    isolated.step()


@pytest.mark.parametrize("kind", ["grammar", "kv", "input"])
def test_those_who_wait_for_something_external_never_block_the_queue(kind: str) -> None:
    isolated = Isolated(16, max_num_seqs=1)
    park(isolated, kind)
    isolated.add(2, 20)
    isolated.step()
    assert isolated.running() == [2]
    parked = isolated.core.refresh_stats().parked
    assert sum(parked.values()) == 1
    isolated.abort(1)
    for order in isolated.orders():
        if isinstance(order, FetchKv):
            isolated.core.on_kv_status(KvStatus(order.id, order.incarnation, 0))
    isolated.drain()
    assert isolated.status(1) == S.ABORTED and isolated.tokens[2] == solo_tokens(2, 20, 4)


@pytest.mark.parametrize("kind", ["grammar", "kv"])
def test_a_deadline_of_waiting_also_ends_who_waits_for_something_external(kind: str) -> None:
    isolated = Isolated(16, waiting_timeout_s=1.0)
    park(isolated, kind)
    isolated.now += 2_000_000_000
    isolated.step()
    assert isolated.status(1) == S.ERROR and isolated.finished[1].code == "waiting_timeout"


def test_a_session_that_waits_for_its_client_has_been_admitted_and_does_not_time_out() -> None:
    isolated = Isolated(16, waiting_timeout_s=1.0)
    isolated.add(1, 1, open=True)
    isolated.step()
    isolated.now += 2_000_000_000
    isolated.step()
    isolated.extend(1, [7], last=True)
    isolated.drain()
    assert isolated.status(1) == S.LENGTH
