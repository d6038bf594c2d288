"""Launched ahead and collected behind: the same results, in the same order, whatever fails and whenever it is seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from protocol.messages import Limits, SamplingParams, Step, StepResult
from runner.attention.torch_paged import TorchAttention
from runner.cuda.device import Event, HostDevice
from runner.cuda.executor import DeviceExecutor
from runner.cuda.feeding import Inputs, Ring
from runner.cuda.pages import DevicePages
from runner.kv import KvPool
from runner.loader import LoadedModel
from runner.model_executor import ModelExecutor
from tests.runner.kit import GREEDY, new, random_hash, step, tokens_of

PAGE = 16
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, 504, 3575]  # 18 ids
OTHER = [1, 4093, 198, 28, 30, 340, 282, 905, 1480]
SEEDED = SamplingParams(max_tokens=64, temperature=0.9, top_p=0.95, top_k=200, seed=42)
PENALISED = SamplingParams(max_tokens=64, temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3)
REPORTING = SamplingParams(max_tokens=64, temperature=0.7, seed=9, logprobs=3, prompt_logprobs=2)
TELLING = SamplingParams(max_tokens=64, temperature=0.7, seed=9, prompt_logprobs=2)


def limits_of(**changes: Any) -> Limits:
    values: dict[str, Any] = {"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return Limits(**{"model": "m", "block_size": PAGE, "vocab_size": 49152, "host_blocks": 8, **values, **changes})


def heads(model: LoadedModel) -> tuple[int, int, int, float]:
    shape = model.config
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale


@pytest.fixture
def made(smollm2_float32: LoadedModel) -> Callable[..., DeviceExecutor]:
    """Executors on a device that lags behind the host."""

    def build(device: HostDevice | None = None) -> DeviceExecutor:
        limits, device = limits_of(), device or HostDevice()
        shape = smollm2_float32.config
        pages = DevicePages(shape, limits.num_blocks, PAGE, torch.float32, device, limits.host_blocks)
        attention = TorchAttention(pages.layers, *heads(smollm2_float32))
        return DeviceExecutor(smollm2_float32, attention, pages, limits, device)

    return build


@pytest.fixture
def at_once(smollm2_float32: LoadedModel) -> ModelExecutor:
    return in_order(smollm2_float32)


def in_order(smollm2_float32: LoadedModel) -> ModelExecutor:
    """An executor that ends each step before it takes the next."""
    limits = limits_of()
    pool = KvPool(smollm2_float32.config, limits.num_blocks, PAGE, torch.float32, limits.host_blocks)
    return ModelExecutor(smollm2_float32, TorchAttention(pool.layers, *heads(smollm2_float32)), pool, limits)


def ahead(executor: DeviceExecutor, steps: Sequence[Step], depth: int = 2) -> list[StepResult]:
    """Each step launched before the one `depth` - 1 before it is collected."""
    results: list[StepResult] = []
    under_way: deque[Any] = deque()
    for one in steps:
        if len(under_way) == depth:
            results.append(executor.collect(under_way.popleft()))
        under_way.append(executor.launch(one, 0))
    return [*results, *(executor.collect(launched) for launched in under_way)]


def plain(result: StepResult) -> tuple[Any, ...]:
    """A result without what it took."""
    failure = None if result.failure is None else result.failure.code
    parts = (result.step_id, result.ids, result.incarnations, result.positions, result.tokens)
    reports = (result.logprobs, result.prompt_logprobs)
    return (*parts, *reports, [(error.id, error.code) for error in result.errors], failure)


def history(first: int, second: int) -> list[Step]:
    """Chunks, decodes, an arrival into the pages of one that leaves, swaps, a return with two known outputs, and
    prompts that are told of, one of them of a request whose slot is another's when its step is collected."""
    return [
        step(1, {1: 10}, arrivals=[new(1, PROMPT, [1, 2], params=SEEDED)]),
        step(2, {1: 8, 2: 9}, arrivals=[new(2, OTHER, [5, 7])], filled={1: random_hash(1)}),
        step(3, {2: 1, 1: 1}),
        step(4, {1: 1, 2: 1}),
        step(5, {2: 1}, left=[1], swap_out=[1, 4, 2, 0]),
        step(6, {3: 9, 2: 1}, arrivals=[new(3, OTHER, [2, 1], params=PENALISED)]),
        step(7, {3: 1, 2: 1}),
        step(8, {3: 1}, left=[2]),
        step(
            9,
            {1: 1, 3: 1},
            arrivals=[
                new(1, [*PROMPT, first, second], [9, 11], params=SEEDED, num_prompt=18, num_computed=19, incarnation=2)
            ],
            swap_in=[9, 4, 11, 0],
        ),
        step(10, {1: 1, 3: 1, 4: 9}, arrivals=[new(4, OTHER, [13], params=REPORTING)]),
        step(11, {4: 1, 3: 1, 1: 1}),
        step(12, {}, left=[3, 4]),
        step(13, {1: 1}),
        step(14, {5: 9, 1: 1}, arrivals=[new(5, OTHER, [13], params=TELLING)]),
        step(15, {1: 1, 6: 10}, left=[5], arrivals=[new(6, PROMPT, [14, 15], params=TELLING)]),
        step(16, {6: 8}),
    ]


@pytest.fixture(scope="module")
def one_after_the_other(smollm2_float32: LoadedModel) -> tuple[list[Step], list[tuple[Any, ...]]]:
    """Steps, and what they give."""
    executor = in_order(smollm2_float32)
    opening = [tokens_of(executor.execute(one, 0)) for one in history(0, 0)[:3]]
    steps = history(opening[1][1], opening[2][1])
    executor.clear()
    return steps, [plain(executor.execute(one, 0)) for one in steps]


@pytest.mark.parametrize(("depth", "patience"), [(1, 1), (2, 0), (2, 1), (2, 5), (3, 5)])
def test_steps_launched_ahead_give_what_steps_one_after_the_other_give(
    made: Callable[..., DeviceExecutor],
    one_after_the_other: tuple[list[Step], list[tuple[Any, ...]]],
    depth: int,
    patience: int,
) -> None:
    steps, expected = one_after_the_other
    assert [plain(result) for result in ahead(made(HostDevice(patience)), steps, depth)] == expected


def test_a_token_is_not_there_before_the_device_is_done(made: Callable[..., DeviceExecutor]) -> None:
    executor = made(HostDevice(patience=2))
    launched = executor.launch(step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2])]), 0)
    assert [launched.ready for _ in range(3)] == [False, False, True] and launched.result is None
    assert tokens_of(executor.collect(launched)).keys() == {1}


class Failing(HostDevice):
    """A device whose `number`-th copy of tokens never arrives."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__()
        self._left, self._error = number, error

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        self._left -= 1
        event = super().copy_out(source, target)
        return Never(self._error) if self._left == 0 else event


class Never:
    """An event of work that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code", "lost"),
    [
        (torch.AcceleratorError("an illegal memory access"), "device_error", True),
        (torch.OutOfMemoryError("no memory"), "out_of_memory", False),
    ],
    ids=["fault", "memory"],
)
def test_a_step_that_fails_on_the_device_takes_the_one_behind_it_along_and_no_other(
    made: Callable[..., DeviceExecutor], at_once: ModelExecutor, error: Exception, code: str, lost: bool
) -> None:
    executor = made(Failing(2, error))
    opening = step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2], params=SEEDED)])
    expected = tokens_of(at_once.execute(opening, 0))
    steps = [
        opening,
        step(2, {1: 1, 2: 9}, arrivals=[new(2, OTHER, [5, 7])], filled={1: random_hash(1)}),
        step(3, {2: 1, 1: 1, 3: 9}, arrivals=[new(3, OTHER, [9])]),
    ]
    first, second, third = ahead(executor, steps)
    assert tokens_of(first) == expected
    assert [second.failure and second.failure.code, third.failure and third.failure.code] == [code, "voided_page"]
    assert executor.lost is lost and executor.num_residents == 0
    assert executor.inventory.export() == (b"", b""), "pages that the failed step may have half written are forgotten"
    again = [
        step(4, {1: 18, 2: 9}, arrivals=[new(1, PROMPT, [1, 2], params=SEEDED, incarnation=2), new(2, OTHER, [5, 7])]),
        step(5, {1: 1, 2: 1}),
    ]
    assert tokens_of(ahead(executor, again)[0])[1] == expected[1]


def test_a_step_that_can_t_be_taken_in_leaves_the_one_before_it_its_tokens(made: Callable[..., DeviceExecutor]) -> None:
    executor = made()
    good = step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2])])
    bad = step(2, {1: 1, 99: 1})
    first, second, third = ahead(executor, [good, bad, step(3, {1: 1})])
    assert tokens_of(first).keys() == {1}
    assert second.failure is not None and second.failure.code == "unknown_request"
    assert third.failure is None and third.ids == b"", "its only row was in the failed step"


def test_a_row_found_not_finite_while_the_next_step_runs_says_nothing_more(
    made: Callable[..., DeviceExecutor],
) -> None:
    executor = made()
    arrivals = [new(1, PROMPT, [1, 2]), new(2, OTHER, [3], incarnation=4)]
    executor.execute(step(1, {1: 18, 2: 9}, arrivals=arrivals), 0)
    executor.pages.layers[3][3] = float("nan")
    second, third, fourth = ahead(
        executor, [step(2, {1: 1, 2: 1}, filled={3: random_hash(3)}), step(3, {1: 1, 2: 1}), step(4, {1: 1, 2: 1})]
    )
    assert [(error.id, error.incarnation, error.code) for error in second.errors] == [(2, 4, "non_finite_logits")]
    assert [tokens_of(result).keys() for result in (second, third, fourth)] == [{1}, {1}, {1}]
    assert not third.errors and not fourth.errors
    assert executor.inventory.export()[0] == b""


def test_a_request_that_left_while_its_step_ran_still_gets_that_step_s_token(
    made: Callable[..., DeviceExecutor],
) -> None:
    steps = [
        step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2])]),
        step(2, {1: 1}),
        step(3, {2: 9}, left=[1], arrivals=[new(2, OTHER, [1])]),
        step(4, {2: 1}),
    ]
    results = ahead(made(), steps)
    assert [tokens_of(result).keys() for result in results] == [{1}, {1}, {2}, {2}]
    alone = ahead(made(), [step(1, {2: 9}, arrivals=[new(2, OTHER, [1])]), step(2, {2: 1})])
    assert [tokens_of(result)[2] for result in results[2:]] == [tokens_of(result)[2] for result in alone]


def test_a_staging_buffer_is_written_again_only_after_what_read_it_is_done() -> None:
    waited: list[int] = []

    class Fence:
        def __init__(self, number: int) -> None:
            self.number = number

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waited.append(self.number)

    ring = Ring(HostDevice(), depth=2, count=4)
    first, second = ring.take(), ring.take()
    ring.give_back(first, Fence(1))
    ring.give_back(second, Fence(2))
    assert waited == []
    assert ring.take() is first and waited == [1]
    assert ring.take() is second and waited == [1, 2]


def test_columns_arrive_as_they_were_sent() -> None:
    inputs = Inputs(HostDevice(), depth=2, capacity=16)
    for number in range(5):
        ints, reals = np.arange(number, number + 3), np.array([0.5, -1e300]) * number
        sent = inputs.send([ints, np.zeros(0, np.int64), reals])
        assert [part.tolist() for part in sent] == [ints.tolist(), [], reals.tolist()]
        assert [part.dtype for part in sent] == [torch.int64, torch.int64, torch.float64]


def test_a_new_scheduler_waits_for_what_runs(made: Callable[..., DeviceExecutor]) -> None:
    executor = made()
    launched = executor.launch(step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2], params=GREEDY)]), 0)
    executor.clear()
    assert launched.ready and executor.num_residents == 0
    assert tokens_of(executor.collect(launched)).keys() == {1}
