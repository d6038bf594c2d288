"""The reservation contract, sentence by sentence, and then all of it against a model that shares no code with it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.replay.cli import main
from ops.replay.engine import Engine, Setup
from ops.replay.events import EventLog
from ops.replay.workload import Workload, build
from ops.traces import TraceRow
from runner.config import RunnerConfig
from runner.step_costs import TickCost
from scheduler.config import BATCH_NAMES, SchedulerConfig
from scheduler.core import CoreScheduler
from tests.ops.replay_kit import write_lines
from tests.ops.reservation_model import Asked, Event, Model, World

TICK = 1_000_000_000
WORLD = World(pages=8, size=4, slots=8, budget=64)


def setup(world: World, vocab_size: int, **config: Any) -> Setup:
    values: dict[str, Any] = {
        "preset": "credit",
        "pipeline_depth": 1,
        "max_num_seqs": world.slots,
        "max_num_batched_tokens": world.budget,
        "long_prefill_token_threshold": world.cap,
        "page_release_delay_s": world.delay_ns / 1e9,
    }
    runner = RunnerConfig(
        backend="sim",
        num_blocks_override=world.pages + 1,
        block_size=world.size,
        max_model_len=4096,
        max_num_seqs=world.slots,
        max_num_batched_tokens=world.budget,
        sim_vocab_size=vocab_size,
    )
    return Setup("credit", SchedulerConfig(**values | config), runner, TickCost(world.tick_ns), CoreScheduler)


def workload(asked: list[Asked]) -> Workload:
    rows = [TraceRow(a.at_ns, a.prompt, a.outputs, cancel_ns=a.cancel_ns) for a in asked]
    return build(sorted(rows, key=lambda row: row.at_ns), max_model_len=4096)


def logged(world: World, asked: list[Asked], **config: Any) -> bytes:
    """The bytes of a run's log. All invariants of the scheduler are looked at, at every boundary."""
    file, work = io.BytesIO(), workload(asked)
    engine = Engine(setup(world, work.vocab_size, **config), work, EventLog(file, work))
    for _ in engine.boundaries():
        faults = engine.scheduler.check()
        assert not faults, faults
    return file.getvalue()


def replayed(world: World, asked: list[Asked], **config: Any) -> list[Event]:
    return [json.loads(line) for line in logged(world, asked, **config).splitlines()]


def only(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["event"] in kinds]


def brief(events: list[Event], *kinds: str) -> list[tuple[float, str, int]]:
    """(tick, event, request) of these kinds of events."""
    return [(event["at_ns"] / TICK, event["event"], event["request"]) for event in only(events, *kinds)]


def last_snapshot(events: list[Event]) -> Event:
    return only(events, "snapshot")[-1]


# --- what is reserved -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "outputs", "credit"), [(1, 8, 2), (4, 1, 1), (4, 2, 2), (1, 1, 1), (5, 4, 2), (5, 5, 3), (29, 4, 8)]
)
def test_prompt_and_outputs_without_the_last_token_are_reserved(prompt: int, outputs: int, credit: int) -> None:
    events = replayed(WORLD, [Asked(0, prompt, outputs)])
    assert [event["credit"] for event in only(events, "admitted")] == [credit]
    assert max(event["held"] for event in only(events, "snapshot")) == credit, "all of it is used in the end"


def test_a_credit_is_no_page_before_its_first_step_a_request_holds_none() -> None:
    """The first prompt takes the whole dispatch; the second request is admitted beside it and has its credit."""
    world = World(pages=8, size=4, slots=8, budget=4)
    events = replayed(world, [Asked(0, 8, 1), Asked(0, 1, 8)])
    first = only(events, "snapshot")[0]
    assert (first["running"], first["reserved"], first["held"]) == (2, 4, 1)
    assert only(events, "dispatch")[0]["rows"] == [[0, 4]]


def test_the_last_token_never_enters_the_cache_so_four_tokens_and_one_answer_fit_one_block() -> None:
    events = replayed(World(pages=1, size=4, slots=1, budget=8), [Asked(0, 4, 1)])
    assert [event["event"] for event in events] == [
        *("arrival", "admitted", "snapshot", "dispatch", "outputs", "finish", "release", "snapshot")
    ]
    assert sum(count for event in only(events, "dispatch") for _, count in event["rows"]) == 4


@pytest.mark.parametrize("outputs", [1, 2, 8])
@pytest.mark.parametrize(("prompt", "budget"), [(1, 4), (4, 4), (5, 4), (12, 4), (12, 64)])
def test_the_last_prefill_step_makes_output_one_and_each_further_output_takes_a_step(
    prompt: int, budget: int, outputs: int
) -> None:
    events = replayed(World(pages=8, size=4, slots=8, budget=budget), [Asked(0, prompt, outputs)])
    chunks = -(-prompt // budget)
    assert len(only(events, "dispatch")) == chunks + outputs - 1
    made = [(event["at_ns"] // TICK, event["tokens"]) for event in only(events, "outputs")]
    assert made == [(chunks + n, [[0, n]]) for n in range(outputs)], "an unfinished prefill emits nothing"


def test_what_could_outgrow_the_pool_is_rejected_at_once_and_blocks_nobody() -> None:
    events = replayed(WORLD, [Asked(0, 30, 4), Asked(0, 29, 4), Asked(0, 33, 1)])
    assert brief(events, "rejected", "admitted") == [(0, "rejected", 0), (0, "rejected", 2), (0, "admitted", 1)]
    assert {event["code"] for event in only(events, "rejected")} == {"kv_capacity_exceeded"}


# --- what comes back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "enters"), [(0, 1.0), (1, 2.0), (2.5, 3.5)])
def test_pages_of_a_finished_request_come_back_after_the_delay(delay: float, enters: float) -> None:
    world = World(pages=4, size=4, slots=8, budget=64, delay_ns=int(delay * TICK))
    events = replayed(world, [Asked(0, 16, 1), Asked(0, 4, 1)])
    assert brief(events, "admitted") == [(0, "admitted", 0), (enters, "admitted", 1)]
    first_back = only(events, "release")[0]
    assert (first_back["at_ns"] / TICK, first_back["pages"]) == (enters, 4)
    assert (last_snapshot(events)["free"], last_snapshot(events)["draining"]) == (4, 0), "all are back in the end"


def test_future_credits_are_given_up_at_once_and_only_pages_drain() -> None:
    """Request 0 reserves all eight blocks and holds one when it is cancelled: seven are there at once."""
    world = World(pages=8, size=4, slots=8, budget=64, delay_ns=5 * TICK)
    events = replayed(world, [Asked(0, 4, 29, cancel_ns=TICK), Asked(0, 28, 1), Asked(0, 4, 1)])
    assert brief(events, "cancel", "admitted") == [
        *((0, "admitted", 0), (1, "cancel", 0), (1, "admitted", 1), (6, "admitted", 2))
    ]
    blocked = [
        (event["at_ns"] / TICK, event["request"], event["reason"]) for event in only(events, "admission_blocked")
    ]
    assert blocked == [(0, 1, "credits"), (1, 2, "draining"), (2, 2, "draining")]


def test_active_credits_and_draining_pages_never_exceed_the_pool() -> None:
    world = World(pages=8, size=4, slots=8, budget=8, delay_ns=2 * TICK)
    events = replayed(world, [Asked(n * TICK // 2, 3 + n % 7, 1 + n % 5) for n in range(20)])
    snapshots = only(events, "snapshot")
    assert all(s["reserved"] + s["draining"] <= 8 and s["free"] + s["held"] + s["draining"] == 8 for s in snapshots)
    assert max(s["draining"] for s in snapshots) > 0 and len(only(events, "finish")) == 20


def test_the_reason_of_a_wait_is_named_slots_credits_or_draining_pages() -> None:
    def reasons(world: World, *asked: Asked) -> list[str]:
        return [event["reason"] for event in only(replayed(world, list(asked)), "admission_blocked")]

    one = World(pages=8, size=4, slots=1, budget=64, delay_ns=TICK)
    assert reasons(one, Asked(0, 4, 1), Asked(0, 4, 1)) == ["slots"]
    small = World(pages=2, size=4, slots=8, budget=64, delay_ns=TICK)
    assert reasons(small, Asked(0, 8, 1), Asked(0, 8, 1)) == ["credits", "draining"]


def test_a_head_that_does_not_fit_blocks_those_behind_it() -> None:
    events = replayed(WORLD, [Asked(0, 16, 3), Asked(0, 20, 1), Asked(0, 1, 1)])
    assert brief(events, "admitted") == [(0, "admitted", 0), (3, "admitted", 1), (3, "admitted", 2)]
    assert {event["request"] for event in only(events, "admission_blocked")} == {1}


# --- the order at a boundary ------------------------------------------------------------------------------------


def test_outputs_and_ends_come_first_then_arrivals_cancels_releases_and_admissions() -> None:
    """At tick 1: request 0 ends, 2 arrives, 1 is cancelled, their pages come back, 2 enters and is dispatched."""
    events = replayed(
        World(pages=2, size=4, slots=8, budget=64),
        [Asked(0, 4, 1), Asked(0, 4, 1, cancel_ns=TICK), Asked(0, 8, 1, cancel_ns=TICK), Asked(TICK, 8, 1)],
    )
    at_one = [(event["event"], event.get("request")) for event in events if event["at_ns"] == TICK]
    assert at_one == [
        ("outputs", None),
        ("finish", 0),
        ("finish", 1),
        ("arrival", 3),
        ("cancel_ignored", 1),
        ("cancel", 2),
        ("release", None),
        ("admitted", 3),
        ("snapshot", None),
        ("dispatch", None),
    ]


def test_a_cancel_at_the_instant_of_completion_is_too_late_and_one_just_before_it_is_not() -> None:
    late = replayed(WORLD, [Asked(0, 4, 1, cancel_ns=TICK)])
    assert [event["event"] for event in late if event["at_ns"] == TICK][:3] == ["outputs", "finish", "cancel_ignored"]
    early = replayed(WORLD, [Asked(0, 4, 1, cancel_ns=TICK - 1)])
    assert brief(early, "cancel", "cancel_ignored", "finish") == [((TICK - 1) / TICK, "cancel", 0)]
    assert not only(early, "outputs"), "what its step makes is nobody's"


def test_a_cancel_at_the_instant_of_arrival_finds_the_request_waiting() -> None:
    events = replayed(WORLD, [Asked(TICK, 4, 1, cancel_ns=TICK)])
    assert brief(events, "arrival", "cancel", "admitted") == [(1, "arrival", 0), (1, "cancel", 0)]
    assert not only(events, "dispatch")


def test_a_cancel_while_queued_takes_nothing_and_while_active_gives_everything_up() -> None:
    events = replayed(
        World(pages=2, size=4, slots=8, budget=64),
        [Asked(0, 4, 5, cancel_ns=2 * TICK), Asked(0, 4, 5, cancel_ns=TICK), Asked(0, 4, 5)],
    )
    assert brief(events, "admitted", "cancel") == [
        *((0, "admitted", 0), (1, "cancel", 1), (2, "cancel", 0), (2, "admitted", 2))
    ]
    assert brief(events, "finish") == [(7, "finish", 2)]


def test_a_cancel_of_a_rejected_request_is_ignored() -> None:
    events = replayed(WORLD, [Asked(0, 33, 1, cancel_ns=TICK)])
    assert [event["event"] for event in events] == ["arrival", "rejected", "snapshot", "cancel_ignored"]


# --- what fills a dispatch --------------------------------------------------------------------------------------


def rows(events: list[Event]) -> list[list[list[int]]]:
    return [event["rows"] for event in only(events, "dispatch")]


def test_decodes_take_one_token_each_from_a_start_that_rotates() -> None:
    world = World(pages=16, size=4, slots=8, budget=3)
    dealt = rows(replayed(world, [Asked(0, 1, 5) for _ in range(3)]))
    order = [[number for number, _ in step] for step in dealt]
    assert order == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2], [1, 2, 0]]


def test_prompts_that_share_a_small_budget_each_come_first_in_turn() -> None:
    world = World(pages=64, size=4, slots=8, budget=4, cap=2)
    dealt = rows(replayed(world, [Asked(0, 16, 1) for _ in range(5)]))
    assert [[number for number, _ in step] for step in dealt[:6]] == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [0, 1]]


def test_prefill_chunks_follow_the_decodes_capped_and_from_a_start_that_rotates() -> None:
    world = World(pages=64, size=4, slots=8, budget=9, cap=4)
    events = replayed(world, [Asked(0, 1, 9), Asked(TICK, 12, 1), Asked(TICK, 12, 1), Asked(TICK, 12, 1)])
    assert rows(events)[:5] == [
        [[0, 1]],
        [[0, 1], [1, 4], [2, 4]],
        [[0, 1], [2, 4], [3, 4]],
        [[0, 1], [3, 4], [1, 4]],
        [[0, 1], [1, 4], [2, 4]],
    ]


def test_a_prefill_that_has_just_finished_does_not_decode_in_the_same_dispatch() -> None:
    dealt = rows(replayed(WORLD, [Asked(0, 3, 3)]))
    assert dealt == [[[0, 3]], [[0, 1]], [[0, 1]]]


# --- all of it --------------------------------------------------------------------------------------------------

ASKED = st.builds(
    lambda at, prompt, outputs, cancel: Asked(at * TICK // 2, prompt, outputs, cancel and (at + cancel) * TICK // 2),
    st.integers(0, 24),
    st.integers(1, 20),
    st.integers(1, 9),
    st.one_of(st.just(0), st.integers(0, 16)),
)
WORLDS = st.builds(
    World,
    pages=st.integers(1, 12),
    size=st.integers(1, 5),
    slots=st.integers(1, 6),
    budget=st.integers(1, 16),
    cap=st.integers(0, 5),
    delay_ns=st.integers(0, 7).map(lambda halves: halves * TICK // 2),
)


@settings(max_examples=examples(100), deadline=None)
@given(WORLDS, st.lists(ASKED, min_size=1, max_size=14))
def test_every_finite_workload_gives_the_log_of_the_model_event_by_event(world: World, asked: list[Asked]) -> None:
    asked = sorted(asked, key=lambda one: one.at_ns)
    expected = Model(world, asked).run()
    found = replayed(world, asked)
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
        assert mine == theirs, f"event {number}"
    assert len(found) == len(expected)


@settings(max_examples=examples(10), deadline=None)
@given(WORLDS, st.lists(ASKED, min_size=1, max_size=14))
def test_equal_runs_give_equal_bytes(world: World, asked: list[Asked]) -> None:
    assert logged(world, asked) == logged(world, asked)


# --- ways to batch, on one trace --------------------------------------------------------------------------------


def finished_at(events: list[Event]) -> list[float]:
    return [event["at_ns"] / TICK for event in only(events, "finish")]


@pytest.mark.parametrize("batch", BATCH_NAMES)
@settings(max_examples=examples(10), deadline=None)
@given(st.lists(ASKED, min_size=1, max_size=14))
def test_every_way_to_batch_ends_every_request(batch: str, asked: list[Asked]) -> None:
    events = replayed(World(pages=8, size=4, slots=3, budget=16), asked, batch_policy=batch)
    arrived, ended = {e["request"] for e in only(events, "arrival")}, only(events, "finish", "cancel", "rejected")
    assert len(ended) == len(arrived) == len(asked) and {e["request"] for e in ended} == arrived
    assert last_snapshot(events)["free"] == 8 or not only(events, "admitted")


def test_on_one_trace_mixed_ends_first_then_dynamic_and_serial_last() -> None:
    world = World(pages=64, size=4, slots=4, budget=64)
    asked = [Asked(n * TICK, 8, 2 + 3 * (n % 4)) for n in range(16)]
    ends = {
        batch: finished_at(replayed(world, asked, batch_policy=batch))
        for batch in ("serial", "mixed", "static", "dynamic")
    }
    assert {len(times) for times in ends.values()} == {16}
    mean = {batch: sum(times) / 16 for batch, times in ends.items()}
    assert mean["mixed"] < mean["dynamic"] < mean["serial"] and mean["mixed"] < mean["static"] < mean["serial"]
    assert ends["serial"][-1] == sum(one.outputs for one in asked), "one at a time: every output is a tick"


# --- recovery, in a replay --------------------------------------------------------------------------------------


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.builds(Asked, st.integers(0, 9).map(TICK.__mul__), st.integers(1, 16), st.integers(1, 12)), min_size=2),
    st.integers(1, 16),
    st.sampled_from(["triptych", "vllm", "sglang"]),
)
def test_what_is_dispatched_is_each_row_once_and_the_replayed_ones_counted_apart(
    asked: list[Asked], budget: int, preset: str
) -> None:
    world = World(pages=7, size=4, slots=8, budget=budget)
    events = replayed(world, asked, preset=preset, watermark=0.0, enable_prefix_caching=False, batch_policy="mixed")
    streams: dict[int, list[int]] = {}
    for event in only(events, "outputs"):
        for number, position in event["tokens"]:
            streams.setdefault(number, []).append(position)
    by_arrival = sorted(asked, key=lambda one: one.at_ns)
    assert streams == {number: list(range(one.outputs)) for number, one in enumerate(by_arrival)}
    replays = {event["request"]: event["replayed"] for event in only(events, "admitted")}
    dispatched = sum(count for step in rows(events) for _, count in step)
    assert dispatched == sum(one.prompt + one.outputs - 1 for one in asked) + sum(replays.values())


# --- the command ------------------------------------------------------------------------------------------------


def command(trace: Path, log: Path, *more: str) -> int:
    contract = ["--preset", "credit", "--cost", "tick", "--depth", "1", "--blocks", "8", "--block-size", "4"]
    return main([str(trace), *contract, "--set", "page_release_delay_s=1", "--events", str(log), *more])


def test_the_command_writes_the_events_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"at_s": 0, "prompt_tokens": 1, "output_tokens": 8}, {"at_s": 0, "prompt_tokens": 30, "output_tokens": 4}]
    trace = write_lines(tmp_path / "trace.jsonl", *lines, {"at_s": 1, "prompt_tokens": 25, "output_tokens": 1})
    assert command(trace, tmp_path / "events.jsonl") == 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    world = World(pages=8, size=4, slots=256, budget=8192, delay_ns=TICK)
    assert events == Model(world, [Asked(0, 1, 8), Asked(0, 30, 4), Asked(TICK, 25, 1)]).run()
    assert "credit" in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--preset", "vllm"], ["--events", "/nowhere/at/all.jsonl"]])
def test_events_of_several_presets_or_to_nowhere_are_refused(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_lines(tmp_path / "trace.jsonl", {"at_s": 0, "prompt_tokens": 1, "output_tokens": 1})
    assert command(trace, tmp_path / "events.jsonl", *more) == 2
    assert "--events" in capsys.readouterr().err
