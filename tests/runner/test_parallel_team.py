"""What ranks agree on, and a device that computes beside the host: with ranks as threads, so that all can be seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from protocol.messages import SamplingParams, Step, StepResult
from runner.attention.torch_paged import TorchAttention
from runner.batch import StepError
from runner.cuda.device import HostDevice
from runner.cuda.executor import DeviceExecutor
from runner.cuda.pages import DevicePages
from runner.errors import StartError
from runner.loader import load_model
from runner.ops import TorchOps
from runner.parallel.executor import PipelinedParallelExecutor, follow, lead
from runner.parallel.messages import Clear, End, Run, decode, encode
from runner.parallel.team import ALONE, Ranks
from runner.pool import PoolSize
from tests.runner.kit import GREEDY, limits, new, step, tokens_of
from tests.runner.parallel_kit import Nobody, ThreadGroup, on_all_ranks

PROMPT = [1, 40, 93, 19, 17, 80, 31, 4, 26, 35, 75]
OTHER = [1, 40, 30, 28, 9, 3, 40]
SEEDED = SamplingParams(max_tokens=64, temperature=0.9, top_p=0.95, top_k=50, seed=42)
PENALISED = SamplingParams(max_tokens=64, temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(StartError) as caught:
        call()
    return str(caught.value)


def test_the_pool_is_the_smallest_of_the_ranks() -> None:
    offers = [PoolSize(100, 64, 7), PoolSize(60, 60, 9)]

    def least(group: ThreadGroup) -> PoolSize:
        return Ranks(group).least(lambda: offers[group.place.rank], 1000)  # type: ignore[arg-type]

    assert on_all_ranks(2, least) == [PoolSize(60, 60, 7)] * 2


def test_a_refusal_has_the_numbers_of_the_rank_with_the_least_memory() -> None:
    available = [300, 200, 100, 50]

    def least(group: ThreadGroup) -> str:
        mine = available[group.place.rank]

        def make() -> PoolSize:
            if mine in (100, 200):
                raise StartError(f"{mine} bytes are not enough")
            return PoolSize(10, 10, 0)

        return refused(lambda: Ranks(group).least(make, mine))  # type: ignore[arg-type]

    assert on_all_ranks(4, least) == ["rank 2: 100 bytes are not enough"] * 4


def test_what_one_rank_cannot_do_none_does() -> None:
    def agree(group: ThreadGroup) -> str:
        def make() -> str:
            if group.place.rank == 1:
                raise ValueError("no such file here")
            return "loaded"

        return refused(lambda: Ranks(group).agreed(make))  # type: ignore[arg-type]

    assert on_all_ranks(2, agree) == ["rank 1: ValueError: no such file here"] * 2
    assert on_all_ranks(2, lambda group: Ranks(group).agreed(lambda: 5)) == [5, 5]


def test_ranks_with_different_settings_refuse_to_run_together() -> None:
    def same(group: ThreadGroup) -> str:
        mine = limits(max_num_seqs=8 if group.place.rank == 0 else 16)
        return refused(lambda: Ranks(group).same(mine))  # type: ignore[arg-type]

    message = "the ranks were started with different settings: max_num_seqs 16 on rank 1, 8 on rank 0"
    assert on_all_ranks(2, same) == [message] * 2


def test_ranks_of_one_host_share_its_memory_and_one_rank_alone_has_it_all() -> None:
    assert on_all_ranks(2, lambda group: Ranks(group).memory(1000)) == [500, 500]
    assert ALONE.memory(1000) == 1000


def test_an_error_on_one_rank_within_a_step_ends_the_runner() -> None:
    lost: list[str] = []

    class Recording(ThreadGroup):
        def lose(self, what: str) -> None:
            lost.append(what)

    def fail(group: ThreadGroup) -> None:
        group.__class__ = Recording
        with pytest.raises(StepError), Ranks(group).computing():  # type: ignore[arg-type]
            raise StepError("out_of_memory", "no room")

    on_all_ranks(1, fail)
    assert lost == ["a step failed on rank 0: StepError: no room"]


def test_orders_survive_the_wire() -> None:
    order = Run(step=step(3, {1: 2}, arrivals=[new(1, PROMPT, [1, 2, 3])]), collected=2)
    assert decode(encode(order)) == order
    assert decode(encode(Clear(collected=1))) == Clear(collected=1)


def steps_of(params: SamplingParams) -> list[Step]:
    """Two requests whose decodes are launched before the tokens they continue are on the host; one breaks a rule."""
    return [
        step(1, {1: 11}, arrivals=[new(1, PROMPT, [9, 3, 4, 5, 6], params=params)]),
        step(2, {1: 1, 2: 4}, arrivals=[new(2, OTHER, [7, 8, 12], params=GREEDY)]),
        step(3, {1: 1, 2: 3}),
        step(4, {1: 1, 2: 1}),
        step(5, {1: 1, 3: 9}, arrivals=[new(3, OTHER, [20, 21])]),  # past its tokens: the step fails
        step(6, {2: 1}),
        step(7, {1: 11}, arrivals=[new(1, PROMPT, [9, 3, 4, 5, 6], params=params, incarnation=2)], left=[3]),
        step(8, {1: 1, 2: 1}),
        step(9, {1: 1, 2: 1}),
    ]


def plain(result: StepResult) -> Any:
    return result.failure.code if result.failure else tokens_of(result)


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_a_pipelined_device_gives_the_same_results_on_two_ranks_as_on_one(
    tmp_path: Path, tiny_model: Callable[..., Any], params: SamplingParams
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)

    def executor(group: ThreadGroup | None) -> DeviceExecutor:
        model, device, allowed = load_model(tmp_path, "float32", TorchOps(), peers=group), HostDevice(), limits()
        allowed = msgspec.structs.replace(allowed, vocab_size=96)
        shape = model.config
        pages = DevicePages(shape, 64, 4, torch.float32, device, 8)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale)
        team = ALONE if group is None else Ranks(group)  # type: ignore[arg-type]
        return DeviceExecutor(model, TorchAttention(pages.layers, *heads), pages, allowed, device, team=team)

    def ahead(executor: Any, steps: Sequence[Step]) -> list[StepResult]:
        results, under_way = [], deque[Any]()
        for one in steps:
            if len(under_way) == executor.depth:
                results.append(executor.collect(under_way.popleft()))
            under_way.append(executor.launch(one, 0))
        return [*results, *(executor.collect(one) for one in under_way)]

    alone = ahead(executor(None), steps_of(params))

    def rank(group: ThreadGroup) -> tuple[list[StepResult], Any]:
        mine = executor(group)
        results: list[StepResult] = []
        if group.is_first:
            first = lead(mine, group, Nobody())  # type: ignore[arg-type]
            assert isinstance(first, PipelinedParallelExecutor)
            results = ahead(first, steps_of(params))
            first.close()
        else:
            follow(mine, group)  # type: ignore[arg-type]
        return results, mine._machine.batch

    (results, batch), (_, other) = on_all_ranks(2, rank)
    assert [plain(one) for one in results] == [plain(one) for one in alone]
    assert "bad_step" in [plain(one) for one in results]
    for name in ("ids", "num_tokens", "num_computed", "tokens", "dead", "page_table"):
        assert np.array_equal(getattr(batch, name), getattr(other, name)), f"{name} differ between the ranks"


class Recorder:
    """A pipelined executor that only notes what it is told."""

    depth = 2
    lost = False
    limits = limits()
    inventory: Any = None
    weight_bytes = num_residents = 0
    step_size: Any = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def execute(self, one: Step, received_ns: int) -> StepResult:
        return self.collect(self.launch(one, received_ns))

    def answer(self, errand: Any) -> None:
        return None

    def transfer(self, order: Any, status: Any) -> None:
        self.calls.append("transfer")

    def clear(self) -> None:
        self.calls.append("clear")

    def launch(self, one: Step, received_ns: int) -> int:
        self.calls.append(f"launch {one.step_id}")
        return one.step_id

    def collect(self, launched: int) -> StepResult:
        self.calls.append(f"collect {launched}")
        return StepResult(1, launched)


def test_every_rank_settles_a_step_at_the_same_place_among_the_launches() -> None:
    """A step that is settled before another is launched may take rows out of it."""

    def rank(group: ThreadGroup) -> list[str]:
        mine = Recorder()
        if group.is_first:
            first = lead(mine, group, Nobody())  # type: ignore[arg-type]
            assert isinstance(first, PipelinedParallelExecutor)
            one, two = (first.launch(step(number, {}), 0) for number in (1, 2))
            first.collect(one)
            three = first.launch(step(3, {}), 0)
            first.collect(two)
            first.collect(three)
            first.clear()
            first.execute(step(4, {}), 0)
            first.close()
        else:
            follow(mine, group)  # type: ignore[arg-type]
        return mine.calls

    first, other = on_all_ranks(2, rank)
    assert first == other
    assert isinstance(decode(encode(End(collected=0))), End)
