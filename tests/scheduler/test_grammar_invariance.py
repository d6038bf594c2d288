"""A grammar's answer is the same under any preemption, chunk, depth and restart, and keeps its grammar in all of them.

The scheduler drives the runner's executor in this process, in float32 on one thread; it asks for each grammar and waits
for the runner's word, as it does over the link.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from protocol.columns import pack_i32
from protocol.messages import CompileGrammar, SamplingParams, Submit
from runner.cuda.executor import DeviceExecutor
from runner.model_executor import ModelExecutor
from services.text.tokenizer import Tokenizer, load_tokenizer
from tests.scheduler.conftest import AHEAD, AT_ONCE
from tests.scheduler.test_real_model_invariance import Chain as PlainChain

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["red", "blue"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS = {
    1: f"json_schema:{json.dumps(SCHEMA)}",
    2: "regex:[A-Z][a-z]{2,7} [0-9]{3}",
    3: 'lark:start: "[" WORD ("," WORD)* "]"\nWORD: /[a-z]{3,5}/',
    4: "",
}
PROMPTS = {
    1: [504, 3575, 282, 4649, 314],
    2: [504, 3575, 282, 4649, 314, 260, 216, 30, 198, 1, 520, 9531, 198, 2683, 359, 253, 5356, 5646, 11173],
    3: [28, 669, 314, 253, 1838, 355, 6629],
    4: [504, 3575, 282, 4649],
}
OUTPUTS = 24
SEEDED = {2, 3}


@pytest.fixture(scope="module")
def tokenizer(real_model_path: Path) -> Tokenizer:
    return load_tokenizer(real_model_path)


class Chain(PlainChain):
    """The real scheduler and the real model, and between them what the scheduler asks about grammars."""

    def __init__(self, executor: ModelExecutor | DeviceExecutor, depth: int, **config: Any) -> None:
        super().__init__(executor, depth, **config)
        self.asked: list[int] = []

    def add(self, request_id: int, emitted: list[int] | None = None) -> None:
        sampling = {"temperature": 0.9, "seed": 42} if request_id in SEEDED else {"temperature": 0.0}
        params = SamplingParams(OUTPUTS, eos_token_ids=(2, 0), grammar=GRAMMARS[request_id], **sampling)
        said = list(emitted or ())
        self.tokens[request_id] = said
        self.core.add(0, Submit(request_id, pack_i32(PROMPTS[request_id]), params, pack_i32(said), resumed=bool(said)))

    def step(self) -> None:
        for order in self.core.take_orders():
            assert isinstance(order, CompileGrammar)
            self.asked.append(order.id)
            promise = self.executor.answer(order)
            assert isinstance(promise, Future)
            self.core.on_grammar_status(promise.result(60))
        super().step()


@pytest.fixture
def undisturbed(
    executor: ModelExecutor | DeviceExecutor, tokenizer: Tokenizer, said_alone: dict[int, dict[int, list[int]]]
) -> dict[int, list[int]]:
    """What each says alone: of its grammar, to the end."""
    said = said_alone.setdefault(id(executor), {})
    for request_id in PROMPTS.keys() - said.keys():
        chain = Chain(executor, 1)
        chain.add(request_id)
        said |= chain.drain()
    texts = {request_id: tokenizer.decode(tokens, skip_special_tokens=True) for request_id, tokens in said.items()}
    value = json.loads(texts[1])
    assert type(value["a"]) is int and value["b"] in ("red", "blue")
    assert re.fullmatch("[A-Z][a-z]{2,7} [0-9]{3}", texts[2])
    assert re.fullmatch(r"\[[a-z]{3,5}(,[a-z]{3,5})*\]", texts[3]) or len(said[3]) == OUTPUTS
    return said


@pytest.mark.parametrize(
    ("executor", "depth", "recovery"), [(AT_ONCE, 1, "swap"), (AHEAD, 3, "recompute")], indirect=["executor"]
)
def test_a_preemption_after_any_token_changes_nothing(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]], recovery: str, depth: int
) -> None:
    for first in range(3):
        chain = Chain(executor, depth, recovery_policy=recovery, enable_prefix_caching=first != 1)
        for request_id in PROMPTS:
            chain.add(request_id)
        suspended: set[tuple[int, int]] = set()
        while len(chain.finished) < len(PROMPTS):
            chain.step()
            for request_id in PROMPTS:
                at = (request_id, len(chain.tokens[request_id]))
                if at not in suspended and (sum(at) + first) % 3 == 0:
                    suspended.add(at)
                    chain.preempt(request_id)
        assert chain.drain() == undisturbed
        assert chain.core.stats.preemptions > 0


@pytest.mark.parametrize(("executor", "chunk", "depth"), [(AT_ONCE, 1, 1), (AHEAD, 7, 3)], indirect=["executor"])
def test_no_grammar_moves_before_the_last_chunk_of_a_prompt(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]], chunk: int, depth: int
) -> None:
    chain = Chain(executor, depth, max_num_batched_tokens=chunk)
    for request_id in PROMPTS:
        chain.add(request_id)
    assert chain.drain() == undisturbed


def test_requests_that_are_submitted_again_in_the_middle_go_on_where_they_were(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]]
) -> None:
    """As after the death of the scheduler: it knows of the outputs only what the API has kept."""
    longest = max(map(len, undisturbed.values()))
    for cut in range(1, longest, 2 if isinstance(executor, ModelExecutor) else 6):
        chain = Chain(executor, 1 + cut % 3)
        for request_id, said in undisturbed.items():
            chain.add(request_id, said[: min(cut, len(said) - 1)])
        assert chain.drain() == undisturbed
        assert sorted(chain.asked) == [1, 2, 3]


def test_a_new_runner_compiles_anew_and_goes_on(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]]
) -> None:
    chain = Chain(executor, 2)
    for request_id in PROMPTS:
        chain.add(request_id)
    for _ in range(6):
        chain.step()
    executor.clear()
    assert executor._grammars is not None
    for grammar in GRAMMARS.values():
        executor._grammars.drop(grammar)
    chain.pending.clear()
    chain.asked.clear()
    chain.core.reset_runner(chain.core.limits, b"n" * 16)
    assert chain.drain() == undisturbed
    assert chain.asked and 4 not in chain.asked


def test_a_grammar_that_was_dropped_meanwhile_is_compiled_within_the_step(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]]
) -> None:
    chain = Chain(executor, 2)
    chain.add(1)
    assert executor._grammars is not None
    said = -1
    while not chain.finished:
        chain.step()
        if len(chain.tokens[1]) != said:
            said = len(chain.tokens[1])
            executor._grammars.drop(GRAMMARS[1])
            chain.preempt(1)
    assert chain.drain() == {1: undisturbed[1]}


def test_a_grammar_that_does_not_compile_disturbs_nobody(
    executor: ModelExecutor | DeviceExecutor, undisturbed: dict[int, list[int]]
) -> None:
    chain = Chain(executor, 2)
    for request_id in PROMPTS:
        chain.add(request_id)
    params = SamplingParams(OUTPUTS, temperature=0.0, eos_token_ids=(2,), grammar="regex:(a")
    chain.core.add(0, Submit(9, pack_i32([5, 6]), params))
    assert chain.drain() == undisturbed
    assert chain.finished == {*PROMPTS, 9}
