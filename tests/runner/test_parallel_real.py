"""The real model on three ranks (it has 9 query and 3 key/value heads), each with a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.messages import SamplingParams
from runner.config import RunnerConfig
from runner.model_executor import ModelExecutor, load_executor
from tests.runner.kit import GREEDY, generate, new, step, tokens_of
from tests.runner.parallel_kit import Running, running_ranks

PAGE = 16
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, 504, 3575]  # 18 ids
OTHER = [1, 4093, 198, 28, 30, 340, 282, 905, 1480]
OUTPUTS = 8
SEEDED = SamplingParams(max_tokens=64, temperature=0.9, top_p=0.95, top_k=200, seed=42, repetition_penalty=1.2)
REPORTING = SamplingParams(max_tokens=64, temperature=0.0, logprobs=5)


def config_of(path: Path, ranks: int) -> RunnerConfig:
    sizes = {"num_blocks_override": 64, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return RunnerConfig(
        model=str(path), dtype="float32", num_threads=1, tensor_parallel_size=ranks, rank_timeout_s=60.0, **sizes
    )


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> ModelExecutor:
    return load_executor(config_of(smollm2_path, 1))


@pytest.fixture(scope="module")
def ranks(smollm2_path: Path) -> Iterator[Running]:
    with running_ranks(config_of(smollm2_path, 3)) as running:
        yield running


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_three_ranks_generate_what_one_does(ranks: Running, alone: ModelExecutor, params: SamplingParams) -> None:
    alone.clear()
    ranks.executor.clear()
    expected = generate(lambda one: alone.execute(one, 0), PROMPT, OUTPUTS, size=PAGE, params=params)
    assert generate(ranks.run, PROMPT, OUTPUTS, size=PAGE, params=params, chunk=7) == expected


def test_a_row_gets_the_same_bits_alone_and_beside_others(ranks: Running) -> None:
    """A sum over three parts depends on its order, which must not depend on the size of the step."""
    ranks.executor.clear()
    mine = new(1, PROMPT, [1, 2], params=REPORTING)
    alone = [ranks.run(step(1, {1: 18}, arrivals=[mine])), ranks.run(step(2, {1: 1}))]
    ranks.executor.clear()
    other = new(2, OTHER, [5, 6])
    beside = [ranks.run(step(1, {2: 9, 1: 18}, arrivals=[mine, other])), ranks.run(step(2, {2: 1, 1: 1}))]
    for one, both in zip(alone, beside, strict=True):
        assert tokens_of(one)[1] == tokens_of(both)[1]
        assert one.logprobs == both.logprobs
