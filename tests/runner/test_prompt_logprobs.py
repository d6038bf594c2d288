"""What a step says of prompts: which tokens, how they are counted, in bounded memory, and in the order of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from protocol.columns import f32, i32
from protocol.messages import Limits, PromptLogprobs, SamplingParams, StepResult
from runner import prompt_table
from runner.attention.torch_paged import TorchAttention
from runner.cuda.device import HostDevice
from runner.cuda.executor import DeviceExecutor
from runner.cuda.pages import DevicePages
from runner.kv import KvPool
from runner.loader import LoadedModel
from runner.model_executor import ModelExecutor
from runner.prompt_table import tabulate
from runner.prompts import SLICE_ROWS, Part, Told
from tests.runner.kit import new, pages_for, sim, step, tokens_of

PAGE = 16
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, 504, 3575]  # 18 ids
OTHER = [1, 4093, 198, 28, 30, 340, 282, 905, 1480]
Executor = ModelExecutor | DeviceExecutor


def asking(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "prompt_logprobs": count, **changes})


@pytest.fixture(scope="module", params=["at once", "launched and collected"])
def resident(smollm2_float32: LoadedModel, request: pytest.FixtureRequest) -> Executor:
    """An executor of each kind over the real model in float32."""
    limits = Limits("m", PAGE, 64, 256, 49152, 8, 128)
    shape = smollm2_float32.config
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale)
    if request.param == "at once":
        pool = KvPool(shape, limits.num_blocks, PAGE, torch.float32, 0)
        return ModelExecutor(smollm2_float32, TorchAttention(pool.layers, *heads), pool, limits)
    device = HostDevice()
    pages = DevicePages(shape, limits.num_blocks, PAGE, torch.float32, device, 0)
    return DeviceExecutor(smollm2_float32, TorchAttention(pages.layers, *heads), pages, limits, device)


@pytest.fixture
def executor(resident: Executor) -> Iterator[Executor]:
    resident.clear()
    yield resident


def in_chunks(executor: Executor, chunk: int, asked: int, **arrival: Any) -> list[PromptLogprobs]:
    """All that is told of PROMPT, computed `chunk` tokens at a time."""
    told: list[PromptLogprobs] = []
    computed = arrival.get("num_computed", 0)
    one = new(1, PROMPT, pages_for(len(PROMPT) + 1, PAGE, 1), params=asking(asked), **arrival)
    for number, begin in enumerate(range(computed, len(PROMPT), chunk), 1):
        count = min(chunk, len(PROMPT) - begin)
        result = executor.execute(step(number, {1: count}, arrivals=[one] if number == 1 else []), 0)
        assert result.failure is None, result.failure
        told += result.prompt_logprobs
    executor.clear()
    return told


def joined(told: Sequence[PromptLogprobs], asked: int) -> tuple[npt.NDArray[Any], ...]:
    """Parts that follow each other as (positions, log-probabilities, ranks, ids [N, k], their log-probabilities)."""
    assert all(before.end == after.position for before, after in pairwise(told))
    ids = np.concatenate([i32(part.top_ids) for part in told]).reshape(-1, asked)
    values = np.concatenate([f32(part.top_logprobs) for part in told]).reshape(-1, asked)
    positions = np.arange(told[0].position, told[-1].end)
    own = np.concatenate([f32(part.logprobs) for part in told])
    return positions, own, np.concatenate([i32(part.ranks) for part in told]), ids, values


@pytest.mark.parametrize("chunk", [1, 5, 17])
def test_chunks_tell_what_the_whole_prompt_tells(executor: Executor, chunk: int) -> None:
    whole = in_chunks(executor, 64, 3)
    assert [(part.id, part.incarnation, part.position, part.end) for part in whole] == [(1, 1, 1, 18)]
    expected, found = joined(whole, 3), joined(in_chunks(executor, chunk, 3), 3)
    for name, wanted, got in zip(("positions", "own", "ranks", "ids", "values"), expected, found, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=name)


def test_the_numbers_of_a_prompt_fit_together(executor: Executor) -> None:
    positions, own, ranks, ids, values = joined(in_chunks(executor, 7, 20), 20)
    tokens = np.array(PROMPT)[positions]
    assert (np.diff(values, axis=1) <= 0).all() and (ranks >= 1).all()
    among = ranks <= 20
    assert among.any() and not among.all()
    assert (ids[among, ranks[among] - 1] == tokens[among]).all()
    assert (values[among, ranks[among] - 1] == own[among]).all(), "the same number, bit for bit"
    assert (own[~among] <= values[~among, -1]).all()


def test_without_alternatives_only_the_prompts_own_tokens_are_told(executor: Executor) -> None:
    (alone,), (rich,) = in_chunks(executor, 64, 0), in_chunks(executor, 64, 20)
    assert alone.top_ids == alone.top_logprobs == b""
    assert (alone.logprobs, alone.ranks) == (rich.logprobs, rich.ranks)


def test_what_is_known_already_is_not_told_again(executor: Executor) -> None:
    whole = joined(in_chunks(executor, 64, 2), 2)
    for first_told in (9, 18):
        arrival = new(1, PROMPT, [1, 2], params=asking(2), told=first_told)
        result = executor.execute(step(1, {1: 18}, arrivals=[arrival]), 0)
        executor.clear()
        assert len(tokens_of(result)) == 1
        if first_told == len(PROMPT):
            assert result.prompt_logprobs == []
        else:
            rest = joined(result.prompt_logprobs, 2)
            assert rest[0].tolist() == list(range(first_told, 18))
            np.testing.assert_allclose(rest[1], whole[1][first_told - 1 :], atol=1e-4)


def test_a_prompt_that_begins_on_cached_pages_is_told_from_there(executor: Executor) -> None:
    whole = joined(in_chunks(executor, 64, 2), 2)
    executor.execute(step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2])]), 0)
    cached = new(2, PROMPT, [1, 3], num_computed=16, params=asking(2))
    (part,) = executor.execute(step(2, {2: 2}, arrivals=[cached]), 0).prompt_logprobs
    assert (part.id, part.position, part.end) == (2, 17, 18)
    np.testing.assert_allclose(f32(part.logprobs), whole[1][-1:], atol=1e-4)


def test_each_row_of_a_step_is_told_its_own_and_decodes_tell_nothing(executor: Executor) -> None:
    whole = joined(in_chunks(executor, 64, 2), 2)
    arrivals = [new(1, PROMPT, [9, 3], params=asking(2)), new(2, OTHER, [5]), new(3, [7], [6], params=asking(5))]
    first = executor.execute(step(1, {2: 9, 1: 6, 3: 1}, arrivals=arrivals), 0)
    second = executor.execute(step(2, {1: 12, 2: 1, 4: 9}, arrivals=[new(4, OTHER, [8], params=asking(1))]), 0)
    third = executor.execute(step(3, {4: 1, 1: 1}), 0)
    parts = [[(part.id, part.position, part.end) for part in one.prompt_logprobs] for one in (first, second, third)]
    assert parts == [[(1, 1, 7)], [(1, 7, 18), (4, 1, 9)], []]
    found = joined([first.prompt_logprobs[0], second.prompt_logprobs[0]], 2)
    np.testing.assert_allclose(found[1], whole[1], atol=1e-4)
    assert [list(tokens_of(one)) for one in (first, second, third)] == [[2, 3], [1, 2, 4], [4, 1]]


@pytest.mark.parametrize("changes", [{}, {"logprobs": 2}], ids=["plain", "reporting"])
def test_tokens_are_the_same_with_and_without(executor: Executor, changes: dict[str, int]) -> None:
    said: list[list[int]] = []
    for count in (-1, 4):
        results: list[StepResult] = [
            executor.execute(one, 0)
            for one in (
                step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2], params=asking(count, **changes))]),
                step(2, {1: 1}),
            )
        ]
        said.append([token for result in results for token in tokens_of(result).values()])
        assert [len(result.logprobs) for result in results] == [int("logprobs" in changes)] * 2
        executor.clear()
    assert said[0] == said[1]


def test_slices_change_nothing(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = joined(in_chunks(executor, 64, 3), 3)
    monkeypatch.setattr(prompt_table, "SLICE_ROWS", 5)
    for wanted, got in zip(whole, joined(in_chunks(executor, 64, 3), 3), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


# --- without a model ------------------------------------------------------------------------------------------


def test_no_more_logits_exist_at_a_time_than_a_slice_has() -> None:
    vocab, count = 50, 3 * SLICE_ROWS - 7
    weights = torch.randn(8, vocab + 6, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(count + 9, 8, generator=torch.Generator().manual_seed(2))
    where, targets = torch.arange(9, 9 + count), torch.arange(count) % vocab
    asked: list[int] = []

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        asked.append(len(part))
        return part @ weights

    table = tabulate(logits_of, hidden, where, targets, 4, vocab).numpy()
    assert asked == [SLICE_ROWS, SLICE_ROWS, SLICE_ROWS - 7]
    expected = torch.log_softmax((hidden[9:] @ weights)[:, :vocab], 1)
    own = expected.gather(1, targets.unsqueeze(1))
    np.testing.assert_allclose(table[:, :1].view(np.float32), own, atol=1e-5)
    assert table[:, 1].tolist() == ((expected > own).sum(1) + 1).tolist()
    assert (table[:, 2:6] == expected.topk(4, 1).indices.numpy()).all(), "padding ids of the head are none"
    assert tabulate(logits_of, hidden, where, targets, 4, vocab, leads=False).numel() == 0 and len(asked) == 6


def test_what_is_no_number_is_told_as_the_floor() -> None:
    hidden = torch.tensor([[0.0, -torch.inf, 1.0], [torch.nan, 0.0, 0.0]])
    table = tabulate(lambda part: part, hidden, torch.arange(2), torch.tensor([1, 0]), 3, 3).numpy()
    assert table[:, :1].view(np.float32).tolist() == [[-9999.0], [-9999.0]]
    assert np.isfinite(table[:, 5:].view(np.float32)).all() and table[0, 1] == 3


def test_parts_take_as_many_alternatives_as_each_asked_for() -> None:
    told = Told([Part(7, 1, 3, 2, 1), Part(9, 4, 1, 1, 0)], np.arange(3), np.arange(3), 2)
    table = np.arange(18, dtype=np.int32).reshape(3, 6)
    first, second = told.messages(table)
    assert (first.id, first.incarnation, first.position, first.end) == (7, 1, 3, 5)
    assert i32(first.logprobs).tolist() == [0, 6] and i32(first.ranks).tolist() == [1, 7]
    assert i32(first.top_ids).tolist() == [2, 8] and i32(first.top_logprobs).tolist() == [4, 10]
    assert (second.end, second.top_ids) == (2, b"") and i32(second.ranks).tolist() == [13]


def test_the_simulator_tells_the_uniform_distribution_and_no_more_than_the_limits_allow() -> None:
    executor = sim()
    first = executor.execute(step(1, {1: 4}, arrivals=[new(1, range(10, 20), [1, 2, 3], params=asking(500))]), 0)
    second = executor.execute(step(2, {1: 6}), 0)
    (one,), (two,) = first.prompt_logprobs, second.prompt_logprobs
    assert (one.position, one.end, two.position, two.end) == (1, 5, 5, 10)
    assert len(i32(two.top_ids)) == 5 * 20 and set(i32(two.ranks).tolist()) == {1}
    assert len({*f32(one.logprobs).tolist(), *f32(two.top_logprobs).tolist()}) == 1


def test_a_row_that_failed_alone_tells_nothing_more() -> None:
    executor = sim()
    bad = new(1, range(10, 20), [1, 2, 3], params=asking(1, allowed_token_ids=(5000,)))
    result = executor.execute(step(1, {1: 4}, arrivals=[bad]), 0)
    assert [error.code for error in result.errors] == ["no_allowed_tokens"] and result.prompt_logprobs == []
