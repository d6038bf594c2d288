"""Two and four real ranks on this machine: the same tokens as one rank, and the same answers to what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.columns import f32, pack_i32
from protocol.messages import FetchKv, KvStatus, SamplingParams
from runner.model_executor import ModelExecutor, load_executor
from tests.runner.kit import GREEDY, generate, new, random_hash, step, tokens_of
from tests.runner.parallel_kit import Running, running_ranks, small_config

PAGE = 4
PROMPT = [1, 40, 93, 19, 17, 80, 31, 4, 26, 35, 75]
OTHER = [1, 40, 30, 28, 9, 3, 40]
OUTPUTS = 12
SEEDED = SamplingParams(
    max_tokens=64, temperature=0.9, top_p=0.95, top_k=50, seed=42, repetition_penalty=1.2, frequency_penalty=0.3
)


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", vocab_size=97).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> ModelExecutor:
    return load_executor(small_config(checkpoint))


@pytest.fixture(scope="module", params=[2, 4])
def ranks(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running_ranks(small_config(checkpoint, tensor_parallel_size=request.param)) as running:
        yield running


@pytest.fixture
def whole(alone: ModelExecutor) -> Callable[..., list[int]]:
    """What one rank generates."""

    def run(prompt: list[int], count: int = OUTPUTS, params: SamplingParams = GREEDY) -> list[int]:
        alone.clear()
        return generate(lambda one: alone.execute(one, 0), prompt, count, size=PAGE, params=params)

    return run


@pytest.fixture(autouse=True)
def cleared(ranks: Running) -> None:
    ranks.executor.clear()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunk", [3, 100])
def test_ranks_generate_what_one_rank_does(
    ranks: Running, whole: Callable[..., list[int]], params: SamplingParams, chunk: int
) -> None:
    assert generate(ranks.run, PROMPT, OUTPUTS, size=PAGE, params=params, chunk=chunk) == whole(PROMPT, params=params)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_request_resumed_at_any_point_goes_on_as_if_nothing_had_happened(
    ranks: Running, whole: Callable[..., list[int]], params: SamplingParams
) -> None:
    expected = whole(PROMPT, params=params)
    for number, cut in enumerate((1, 5), 2):
        rest = generate(
            ranks.run,
            PROMPT,
            OUTPUTS,
            size=PAGE,
            params=params,
            emitted=expected[:cut],
            chunk=4,
            incarnation=number,
        )
        assert expected[:cut] + rest == expected


def test_a_batch_of_prefill_chunks_and_decodes_gives_each_row_its_own_tokens(
    ranks: Running, whole: Callable[..., list[int]]
) -> None:
    steps = [
        step(1, {1: 11}, arrivals=[new(1, PROMPT, [9, 3, 4, 5], params=SEEDED)]),
        step(2, {1: 1, 2: 4}, arrivals=[new(2, OTHER, [7, 8, 12])]),
        step(3, {2: 3, 1: 1}),
        step(4, {2: 1, 1: 1}),
    ]
    results = [tokens_of(ranks.run(one)) for one in steps]
    assert [found[1] for found in results] == whole(PROMPT, 4, SEEDED)
    assert [found[2] for found in results if 2 in found] == whole(OTHER, 2)


def test_swapped_pages_come_back_on_every_rank(ranks: Running, whole: Callable[..., list[int]]) -> None:
    first = tokens_of(ranks.run(step(1, {1: 11}, arrivals=[new(1, PROMPT, [1, 2, 3])])))[1]
    thief = new(2, OTHER, [2, 1])
    ranks.run(step(2, {2: 7}, arrivals=[thief], left=[1], swap_out=[1, 4, 2, 0, 3, 1]))
    back = new(1, [*PROMPT, first], [8, 6, 7], num_prompt=11, num_computed=11, incarnation=2)
    tokens = [first, tokens_of(ranks.run(step(3, {1: 1, 2: 1}, arrivals=[back], swap_in=[8, 4, 6, 0, 7, 1])))[1]]
    assert tokens == whole(PROMPT, 2)


def test_log_probabilities_are_those_of_one_rank(ranks: Running, alone: ModelExecutor) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=5, prompt_logprobs=5)
    alone.clear()
    arrival = step(1, {1: 11}, arrivals=[new(1, PROMPT, [1, 2, 3], params=params)])
    result, expected = ranks.run(arrival), alone.execute(arrival, 0)
    (mine,), (theirs,) = result.logprobs, expected.logprobs
    assert (mine.rank, mine.top_ids) == (theirs.rank, theirs.top_ids)
    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    (mine_of_prompt,), (theirs_of_prompt,) = result.prompt_logprobs, expected.prompt_logprobs
    assert (mine_of_prompt.position, mine_of_prompt.end) == (1, 11)
    assert (mine_of_prompt.ranks, mine_of_prompt.top_ids) == (theirs_of_prompt.ranks, theirs_of_prompt.top_ids)
    assert f32(mine_of_prompt.logprobs) == pytest.approx(f32(theirs_of_prompt.logprobs), abs=1e-4)


def test_a_step_that_breaks_the_rules_fails_on_all_ranks_and_the_next_one_runs(
    ranks: Running, whole: Callable[..., list[int]]
) -> None:
    failed = ranks.run(step(1, {1: 12}, arrivals=[new(1, PROMPT, [1, 2, 3])]))
    assert failed.failure is not None and failed.failure.code == "bad_step"
    malformed = msgspec.structs.replace(step(2, {2: 7}, arrivals=[new(2, OTHER, [1, 2])]), num_tokens=b"\x07\x00\x00")
    assert ranks.run(malformed).failure is not None
    assert generate(ranks.run, PROMPT, 3, size=PAGE, request=7, first_step=3) == whole(PROMPT, 3)


def test_a_row_with_impossible_parameters_fails_alone_on_all_ranks(
    ranks: Running, whole: Callable[..., list[int]]
) -> None:
    never = SamplingParams(max_tokens=4, temperature=0.0, allowed_token_ids=(2,), eos_token_ids=(2,), min_tokens=2)
    both = [new(1, PROMPT, [1, 2, 3], params=never), new(2, OTHER, [5, 6])]
    result = ranks.run(step(1, {1: 11, 2: 7}, arrivals=both))
    assert [error.id for error in result.errors] == [1]
    following = ranks.run(step(2, {1: 1, 2: 1}))
    assert [*tokens_of(result).values(), *tokens_of(following).values()] == whole(OTHER, 2)


def test_a_failure_to_sample_is_known_to_all_ranks(
    ranks: Running, whole: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = ranks.executor._executor._sampler._sampler  # type: ignore[attr-defined]

    def fail(*args: object) -> None:
        raise MemoryError("no room for the sampler's rows")

    with monkeypatch.context() as patched:
        patched.setattr(sampler, "sample", fail)
        result = ranks.run(step(1, {1: 11}, arrivals=[new(1, PROMPT, [1, 2, 3])]))
    assert result.failure is not None and result.failure.code == "out_of_memory"
    assert generate(ranks.run, PROMPT, 3, size=PAGE, request=7, first_step=2) == whole(PROMPT, 3)


def test_transfers_reach_all_ranks(ranks: Running, whole: Callable[..., list[int]]) -> None:
    """A transfer into pages that don't exist fails the next step on every rank, and only that one."""
    ranks.executor.transfer(FetchKv(5, 1, "elsewhere", 8, pack_i32([63, 64])), KvStatus(5, 1, 0))
    failed = ranks.run(step(1, {1: 11}, arrivals=[new(1, PROMPT, [1, 2, 3])]))
    assert failed.failure is not None
    assert generate(ranks.run, PROMPT, 3, size=PAGE, request=7, first_step=2) == whole(PROMPT, 3)


def test_the_inventory_is_the_first_ranks(ranks: Running) -> None:
    ranks.run(step(1, {1: 11}, arrivals=[new(1, PROMPT, [1, 2, 3])], filled={1: random_hash(1), 2: random_hash(2)}))
    assert len(ranks.executor.inventory) == 2 and ranks.executor.num_residents == 1


def test_blocks_weigh_what_one_rank_keeps_of_them(ranks: Running, alone: ModelExecutor) -> None:
    assert ranks.executor.limits.kv_bytes_per_block == alone.limits.kv_bytes_per_block // 2
    assert ranks.executor.limits.num_blocks == 64
