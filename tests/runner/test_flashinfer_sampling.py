"""Sampling on the device: the Sampler's tokens, from the same numbers, with either source of thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import SamplingParams
from runner.batch import Batch
from runner.cuda.sampling import SamplingColumns, device_uniforms, sample_on_device, stays_on_device
from runner.sampler import Sampler
from runner.uniform import uniforms
from tests.runner.flashinfer_kit import LIBRARIES, library
from tests.runner.kit import limits, new

VOCAB = 100
U64 = st.integers(0, 2**64 - 1)
ROWS = {
    "greedy": SamplingParams(max_tokens=8, temperature=0.0, seed=1),
    "tiny temperature": SamplingParams(max_tokens=8, temperature=9e-6, seed=1),
    "temperature": SamplingParams(max_tokens=8, temperature=0.8, seed=42),
    "top-k": SamplingParams(max_tokens=8, temperature=1.3, top_k=7, seed=2**64 - 1),
    "top-k of one": SamplingParams(max_tokens=8, temperature=1.3, top_k=1, seed=5),
    "top-k of all": SamplingParams(max_tokens=8, temperature=1.0, top_k=VOCAB + 5, seed=6),
    "top-p": SamplingParams(max_tokens=8, temperature=1.0, top_p=0.7, seed=3, choice=1),
    "top-p of none": SamplingParams(max_tokens=8, temperature=1.0, top_p=0.0, seed=4),
    "min-p": SamplingParams(max_tokens=8, temperature=1.5, min_p=0.1, seed=7, choice=2**63),
    "all": SamplingParams(max_tokens=8, temperature=0.9, top_k=30, top_p=0.9, min_p=0.02, seed=8),
}


@pytest.fixture(params=["torch", *LIBRARIES])
def thresholds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return None if request.param == "torch" else library(request.param, monkeypatch).sampling


def columns(**given: Sequence[float]) -> SamplingColumns:
    """Columns of rows that differ from plain sampling in what is given."""
    batch, slots = batch_of([SamplingParams(max_tokens=8, temperature=1.0)] * max(map(len, given.values()), default=1))
    for name, values in given.items():
        getattr(batch.params, name)[slots] = values
    return SamplingColumns.of(batch.params, slots, batch.num_tokens[slots])


def on_device(asked: SamplingColumns) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in asked.arrays]


def batch_of(rows: Sequence[SamplingParams], lengths: Sequence[int] = ()) -> tuple[Batch, np.ndarray]:
    """A batch with a request for each row, which knows so many tokens (3); the slots don't start at 0."""
    batch = Batch(limits(max_num_seqs=len(rows) + 2))
    batch.add(new(99, [1], [1]))
    slots = []
    for number, row in enumerate(rows):
        known = lengths[number] if lengths else 3
        slot = batch.add(new(number, [1] * known, [1] * (known // 4 + 1)))
        batch.params.set(slot, row)
        slots.append(slot)
    return batch, np.array(slots)


def both(logits: torch.Tensor, batch: Batch, slots: np.ndarray, kernels: Any) -> tuple[list[int], list[int]]:
    """(the Sampler's tokens, those of the device)."""
    expected = Sampler(VOCAB).sample(logits.clone(), batch, slots).tokens.tolist()
    asked = SamplingColumns.of(batch.params, slots, batch.num_tokens[slots])
    with torch.inference_mode():
        got = sample_on_device(logits.clone(), asked, on_device(asked), VOCAB, kernels)
    assert got.tokens.dtype == torch.int64 and bool(got.finite.all())
    return expected, got.tokens.tolist()


def random_logits(rows: int, seed: int, width: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(U64, U64, st.integers(0, 2**31)), min_size=1, max_size=20))
def test_the_devices_random_numbers_are_the_hosts_bit_for_bit(rows: list[tuple[int, int, int]]) -> None:
    seeds, choices, positions = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    expected = uniforms(seeds, choices, positions.astype(np.int64))
    got = device_uniforms(*(torch.from_numpy(x.view(np.int64)) for x in (seeds, choices, positions)))
    assert got.dtype == torch.float64 and got.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ROWS)
def test_a_kind_of_row_gets_the_samplers_tokens(name: str, thresholds: Any) -> None:
    lengths = [3 + position % 40 for position in range(64)]
    batch, slots = batch_of([ROWS[name]] * 64, lengths)
    expected, got = both(random_logits(64, 1, VOCAB + 28), batch, slots, thresholds)
    assert got == expected
    assert len(set(got)) > 8, "a test that couldn't tell rows apart"


def test_all_kinds_mix_in_one_batch_and_a_row_is_the_same_alone(thresholds: Any) -> None:
    rows = list(ROWS.values()) * 3
    batch, slots = batch_of(rows, [3 + place % 29 for place in range(len(rows))])
    logits = random_logits(len(rows), 2)
    expected, got = both(logits, batch, slots, thresholds)
    assert got == expected
    for place in range(0, len(rows), 4):
        assert both(logits[place : place + 1], batch, slots[place : place + 1], thresholds)[1] == [got[place]]


@settings(max_examples=examples(20), deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0.1, 3),
    st.integers(0, 120),
    st.floats(0.05, 1),
    st.floats(0, 1),
    st.floats(0.1, 9),
)
def test_any_parameters_get_the_samplers_token(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    row = SamplingParams(max_tokens=8, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    batch, slots = batch_of([row] * 4, [3, 4, 5, 6])
    expected, got = both(random_logits(4, seed) * spread / 3, batch, slots, None)
    assert got == expected


def test_ties_at_the_border_stay(thresholds: Any) -> None:
    logits = torch.full((300, VOCAB), -20.0)
    logits[:, :5] = torch.tensor([3.0, 1.0, 2.0, 2.0, -9.0])
    row = SamplingParams(max_tokens=8, temperature=1.0, top_k=2, seed=11)
    batch, slots = batch_of([row] * 300, [1 + place % 60 for place in range(300)])
    batch.params.seed[slots] = np.arange(300, dtype=np.uint64)
    expected, got = both(logits, batch, slots, thresholds)
    assert got == expected and set(got) == {0, 2, 3}


def test_shares_follow_the_probabilities(thresholds: Any) -> None:
    count = 4000
    logits = torch.full((count, VOCAB), float("-inf")).index_fill(1, torch.arange(4), 0.0)
    logits[:, :4] = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    logits = logits.clamp(min=-80)
    asked = columns(temperature=[1.0] * count, seed=list(range(count)), top_p=[0.99999] * count)
    tokens = sample_on_device(logits, asked, on_device(asked), VOCAB, thresholds).tokens
    expected = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    shares = torch.bincount(tokens, minlength=VOCAB).double() / count
    assert shares[4:].sum() == 0
    assert (count * (shares[:4] - expected).square() / expected).sum() < 16.3  # 0.1 % tail of 3 degrees of freedom


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kinds", [["greedy"] * 3, ["top-p", "all", "greedy"]], ids=["greedy", "mixed"])
def test_a_row_that_is_not_finite_is_marked_and_its_neighbours_are_not(
    poison: float, kinds: list[str], thresholds: Any
) -> None:
    batch, slots = batch_of([ROWS[kind] for kind in kinds])
    logits = random_logits(3, 5)
    expected, _ = both(logits, batch, slots, thresholds)
    logits[1, 17] = poison
    asked = SamplingColumns.of(batch.params, slots, batch.num_tokens[slots])
    got = sample_on_device(logits, asked, on_device(asked), VOCAB, thresholds)
    assert got.finite.tolist() == [True, False, True]
    assert (got.tokens[0], got.tokens[2]) == (expected[0], expected[2]) and 0 <= got.tokens[1] < VOCAB


def test_greedy_rows_alone_need_no_columns() -> None:
    batch, slots = batch_of([ROWS["greedy"], ROWS["tiny temperature"]])
    asked = SamplingColumns.of(batch.params, slots, batch.num_tokens[slots])
    logits = random_logits(2, 3)
    assert not asked.random and asked.arrays == ()
    assert sample_on_device(logits, asked, (), VOCAB).tokens.tolist() == logits.argmax(1).tolist()


def test_columns_are_numbers_of_eight_bytes_and_say_what_is_used() -> None:
    asked = columns(temperature=[1.0, 0.0, 1.0], top_k=[0, 5, 0], top_p=[1.0, 0.5, 1.0], min_p=[0.0, 0.0, 0.5])
    assert {array.dtype.itemsize for array in asked.arrays} == {8} and all(len(array) == 3 for array in asked.arrays)
    assert asked.limited == (False, False, True), "only rows that draw count"
    assert columns(temperature=[1.0], top_k=[5]).limited == (True, False, False)
    assert columns(temperature=[1.0], top_p=[0.5]).limited == (False, True, False)


def test_rows_that_need_the_host_are_told_apart() -> None:
    rows = [
        ROWS["all"],
        SamplingParams(max_tokens=8, temperature=1.0, presence_penalty=0.5),
        SamplingParams(max_tokens=8, temperature=0.0, logit_bias=((3, 1.0),)),
        SamplingParams(max_tokens=8, temperature=0.0, logprobs=0),
    ]
    batch, slots = batch_of(rows)
    assert stays_on_device(batch.params, slots).tolist() == [True, False, False, False]
