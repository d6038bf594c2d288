"""The kit itself: each rule that it judges by is broken once here, so that none of them passes everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import Finished, NewRequest, Outputs, RequestStatus, SamplingParams, Step, StepFailure
from tests.conformance.ends import ApiEnd, World, limits, token_at
from tests.conformance.judge import Asked, Judge, Violation

PARAMS = SamplingParams(3, ignore_eos=True)


@dataclass
class Bench:
    """A judge with three requests of 6 tokens that somebody has asked for."""

    world: World = field(default_factory=World)
    ids: int = 0

    def __post_init__(self) -> None:
        for request_id in (1, 2, 3):
            prompt = [token_at(1, j) for j in range(6)]
            self.world.asked[request_id] = Asked(prompt, PARAMS, "salt" if request_id == 3 else "")
        self.judge = Judge(limits(8, max_num_seqs=2, max_num_batched_tokens=10), self.world.asked, self.world.token)
        self.judge.welcome(1)

    def new(self, request_id: int = 1, pages: tuple[int, ...] = (1, 2), **changes: Any) -> NewRequest:
        values = {
            "id": request_id,
            "incarnation": 1,
            "tokens": pack_i32(self.world.asked[request_id].prompt),
            "num_prompt": 6,
            "num_computed": 0,
            "block_ids": pack_i32(pages),
            "params": PARAMS,
        }
        return NewRequest(**(values | changes))

    def step(self, rows: dict[int, int], *new: NewRequest, **changes: Any) -> Step:
        self.ids += 1
        values = {"ids": pack_u64(list(rows)), "num_tokens": pack_i32(list(rows.values())), "new": list(new)}
        return Step(**({"epoch": 1, "step_id": self.ids} | values | changes))

    def grow(self, *pages: int) -> dict[str, bytes]:
        """Columns that give these pages to the first row."""
        counts = pack_i32([len(pages)])
        return {"grow_rows": pack_i32([0]), "grow_counts": counts, "grow_blocks": pack_i32(pages)}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_right_history_is_judged_right(bench: Bench) -> None:
    first = bench.judge.execute(bench.step({1: 6}, bench.new()))
    assert (u64(first.ids).tolist(), i32(first.positions).tolist()) == ([1], [6])
    bench.judge.execute(bench.step({1: 1}, filled_blocks=pack_i32([1]), filled_hashes=b"h" * 16))
    bench.judge.execute(bench.step({2: 2}, bench.new(2, (1, 3), num_computed=4), left=pack_u64([1])))
    assert bench.judge.inventory == {1: b"h" * 16}
    assert set(bench.judge.residents) == {2}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("epoch", "has epoch 9"),
        ("repeated step", "after step 1"),
        ("swap", "host_blocks = 0"),
        ("budget", "11 tokens in a step"),
        ("zero", "a row without tokens"),
        ("twice", "scheduled twice"),
        ("columns", "2 ids and 1 numbers"),
        ("unknown", "never arrived"),
        ("left", "never arrived"),
        ("unasked", "never asked for"),
        ("here already", "did not leave"),
        ("incarnation", "incarnation 1 after 1"),
        ("tokens", "not its prompt and outputs"),
        ("params", "have changed"),
        ("computed", "3 of 6 tokens computed"),
        ("all computed", "8 of 6 tokens computed"),
        ("null page", "null page"),
        ("pool", "of a pool of 9"),
        ("same page", "holds a page twice"),
        ("foreign page", "which a live request holds"),
        ("foreign growth", "which a live request holds"),
        ("slots", "2 slots"),
        ("short table", "in 1 pages"),
        ("unknown token", "and knows"),
        ("last token", "its last token"),
        ("unwritten", "reads page 7"),
        ("salt", "of another history"),
        ("unfilled", "is called filled"),
        ("one hash", "one hash for two histories"),
        ("failed page", "reads page 1"),
    ],
)
def test_each_broken_rule_is_named(bench: Bench, rule: str, message: str) -> None:
    new, step, grow = bench.new, bench.step, bench.grow
    start = step({1: 6}, new())
    full = {"filled_blocks": pack_i32([1]), "filled_hashes": b"h" * 16}
    again = full | {"filled_blocks": pack_i32([3])}
    steps: dict[str, list[Step]] = {
        "epoch": [step({1: 6}, new(), epoch=9)],
        "repeated step": [start, step({1: 1}, step_id=1)],
        "swap": [step({1: 6}, new(), swap_out=pack_i32([1, 0]))],
        "budget": [step({1: 6, 2: 5}, new(), new(2, (3, 4)))],
        "zero": [step({1: 0}, new())],
        "twice": [step({1: 3}, new(), ids=pack_u64([1, 1]), num_tokens=pack_i32([3, 3]))],
        "columns": [step({1: 3}, new(), ids=pack_u64([1, 2]))],
        "unknown": [step({2: 1})],
        "left": [start, step({1: 1}, left=pack_u64([1]))],
        "unasked": [step({4: 1}, NewRequest(4, 1, pack_i32([5]), 1, 0, pack_i32([1]), PARAMS))],
        "here already": [start, step({1: 6}, new(incarnation=2, pages=(3, 4)))],
        "incarnation": [start, step({1: 6}, new(), left=pack_u64([1]))],
        "tokens": [step({1: 6}, new(tokens=pack_i32([5] * 6)))],
        "params": [step({1: 6}, new(params=SamplingParams(3)))],
        "computed": [step({1: 3}, new(num_computed=3))],
        "all computed": [step({1: 1}, new(num_computed=8))],
        "null page": [step({1: 6}, new(pages=(0, 1)))],
        "pool": [step({1: 6}, new(pages=(1, 9)))],
        "same page": [step({1: 6}, new(pages=(1, 1)))],
        "foreign page": [step({1: 4}, new()), step({2: 6}, new(2, (2, 3)))],
        "foreign growth": [step({1: 4, 2: 6}, new(pages=(1,)), new(2, (2, 3))), step({1: 2}, **grow(2))],
        "slots": [step({1: 1, 2: 1}, new(), new(2, (3, 4))), step({3: 1}, new(3, (5, 6)))],
        "short table": [step({1: 6}, new(pages=(1,)))],
        "unknown token": [start, step({1: 2})],
        "last token": [start, step({1: 1}), step({1: 1}), step({1: 1}, **grow(3))],
        "unwritten": [step({1: 2}, new(pages=(7, 1), num_computed=4))],
        "salt": [start, step({3: 2}, new(3, (1, 3), num_computed=4))],
        "unfilled": [step({1: 3}, new(), **full)],
        "one hash": [step({1: 6}, new(), **full), step({3: 6}, new(3, (3, 4)), **again)],
        "failed page": [step({1: 3}, new()), step({2: 2}, new(2, (1, 3), num_computed=4))],
    }  # fmt: skip
    with pytest.raises(Violation, match=message):
        for one in steps[rule]:
            bench.judge.execute(one)


def test_a_failed_step_voids_its_pages_and_whoever_counts_on_them_fails_in_turn(bench: Bench) -> None:
    failed = bench.judge.execute(bench.step({1: 6}, bench.new()), StepFailure("device_error", "made to"))
    assert failed.failure is not None
    assert bench.judge.execute(bench.step({1: 1})).failure is None, "a step sent before the news is not a fault"
    counting = bench.judge.execute(bench.step({2: 2}, bench.new(2, (1, 3), num_computed=4)))
    assert counting.failure is not None and counting.failure.code == "voided_page"


def told(**changes: Any) -> Outputs:
    columns = {"ids": pack_u64([1]), "positions": pack_i32([0]), "tokens": pack_i32([token_at(1, 6)])}
    return Outputs(1, 1, **(columns | changes))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([told()], "was not accepted"),
        ([told(accepted=pack_u64([1])), told()], "token 0 after 1"),
        ([told(accepted=pack_u64([1]), positions=pack_i32([1]))], "token 1 after 0"),
        ([told(accepted=pack_u64([1]), tokens=pack_i32([5]))], "is 5 instead of"),
        ([told(accepted=pack_u64([9]))], "not ours"),
        ([told(accepted=pack_u64([1, 1]))], "accepted 1 twice"),
        ([told(accepted=pack_u64([1]), finished=[Finished(1, RequestStatus.RUNNING)])], "ends as RUNNING"),
        ([told(accepted=pack_u64([1]), finished=[Finished(1, RequestStatus.LENGTH)] * 2)], "ends twice"),
        ([told(accepted=pack_u64([1]), finished=[Finished(1, RequestStatus.LENGTH)]), told()], "after its end"),
    ],
)
def test_an_api_end_names_what_it_should_not_have_been_told(bench: Bench, outputs: list[Outputs], message: str) -> None:
    api = ApiEnd.__new__(ApiEnd)
    api.world, api.mine, api.tokens = bench.world, {1}, {1: []}
    api.accepted, api.rejected, api.finished, api.logprobs, api.told = set(), {}, {}, [], {}
    with pytest.raises(Violation, match=message):
        for one in outputs:
            api._take(one)


def test_what_is_told_of_prompts_is_judged_at_both_ends(bench: Bench) -> None:
    asking = replace(PARAMS, prompt_logprobs=0)
    bench.world.asked[1] = Asked(bench.world.asked[1].prompt, asking)
    first = bench.judge.execute(bench.step({1: 4}, bench.new(params=asking)))
    second = bench.judge.execute(bench.step({1: 2}, filled_blocks=pack_i32([1]), filled_hashes=b"h" * 16))
    parts = [*first.prompt_logprobs, *second.prompt_logprobs]
    assert [(part.position, part.end) for part in parts] == [(1, 5), (5, 6)]
    api = ApiEnd.__new__(ApiEnd)
    api.world, api.mine, api.tokens = bench.world, {1}, {1: []}
    api.accepted, api.rejected, api.finished, api.logprobs, api.told = {1}, {}, {}, [], {}
    with pytest.raises(Violation, match="a gap in the prompt of 1"):
        api._take(Outputs(1, 1, prompt_logprobs=parts[1:]))
    api._take(Outputs(1, 1, prompt_logprobs=[parts[0], parts[0]]))
    with pytest.raises(Violation, match="has been told 4 of its prompt"):
        api._take(told())
    api._take(told(prompt_logprobs=[parts[1]]))
    asking_again = bench.new(2, (1, 3), num_computed=4, params=asking, prompt_logprobs_from=3)
    bench.world.asked[2] = Asked(bench.world.asked[2].prompt, asking)
    with pytest.raises(Violation, match="would never be told"):
        bench.judge.execute(bench.step({2: 2}, asking_again, left=pack_u64([1])))
