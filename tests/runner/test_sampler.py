"""The sampler: what each parameter does, and that a row's token depends on nothing but the row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.columns import f32, i32
from protocol.messages import SamplingParams, TokenLogprobs
from runner.batch import Batch
from runner.params import ParamError
from runner.sampler import Sampler, exponentials, keep_min_p, keep_top_k, keep_top_p, pick, ranks_of
from runner.steps import Sampled
from tests.runner.kit import limits, new

VOCAB = 100


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "seed": 5, **changes})  # type: ignore[arg-type]


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingParams], tokens: Sequence[Sequence[int]] = (), num_prompt: int = 3
) -> Sampled:
    """Sample one row per parameter set; `tokens` are what each request knows, default 1, 2, 3."""
    batch = Batch(limits(max_num_seqs=len(rows) + 2))
    batch.add(new(99, [1], [1]))  # slots don't start at 0
    slots = []
    for number, row in enumerate(rows):
        known = list(tokens[number]) if tokens else [1, 2, 3]
        slot = batch.add(new(number, known, [1] * (len(known) // 4 + 1), num_prompt=num_prompt))
        batch.params.set(slot, row)
        slots.append(slot)
    return Sampler(VOCAB).sample(logits.clone(), batch, np.array(slots))


def tokens(*args: object, **kwargs: object) -> list[int]:
    result = sample(*args, **kwargs)  # type: ignore[arg-type]
    assert not result.bad, result.bad
    return result.tokens.tolist()


def random_logits(rows: int, seed: int = 0, width: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


MIXED = [
    params(),
    params(temperature=0.8, seed=42),
    params(temperature=1.3, top_k=7, seed=2**64 - 1),
    params(temperature=1.0, top_p=0.7, min_p=0.02, seed=3, choice=1),
    params(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, seed=9),
    params(temperature=0.0, logit_bias=((5, 50.0), (6, -50.0)), logprobs=3),
    params(temperature=1.0, allowed_token_ids=(4, 8, 15), seed=77),
    params(temperature=0.7, min_tokens=5, eos_token_ids=(2,), stop_token_ids=(3,), seed=1),
]


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(4)
    assert tokens(logits, [params()] * 4) == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 9e-6])
def test_a_temperature_below_the_threshold_is_greedy(temperature: float) -> None:
    logits = random_logits(1)
    assert tokens(logits, [params(temperature=temperature)]) == logits.argmax(1).tolist()


def test_a_tiny_temperature_above_the_threshold_stays_finite() -> None:
    logits = random_logits(1) * 1e4
    assert tokens(logits, [params(temperature=1e-5)]) == logits.argmax(1).tolist()


def test_a_row_is_the_same_alone_and_at_every_place_of_a_mixed_batch() -> None:
    logits = random_logits(len(MIXED), 3)
    alone = [tokens(logits[row : row + 1], [MIXED[row]])[0] for row in range(len(MIXED))]
    assert tokens(logits, MIXED) == alone
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(1)).tolist()
    assert tokens(logits[order], [MIXED[row] for row in order]) == [alone[row] for row in order]


def test_a_seeded_row_beside_plain_greedy_ones_keeps_its_token() -> None:
    logits = random_logits(3, 8)
    seeded = params(temperature=0.8, seed=42)
    alone = tokens(logits[1:2], [seeded])[0]
    assert tokens(logits, [params(), seeded, params()])[1] == alone


def test_repeats_are_equal_and_choices_differ() -> None:
    logits = torch.zeros(3, VOCAB)
    rows = [params(temperature=1.0, seed=42, choice=choice) for choice in range(3)]
    first = tokens(logits, rows)
    assert len(set(first)) == 3 and tokens(logits, rows) == first


def test_each_position_draws_anew_and_only_the_position_counts() -> None:
    logits = torch.zeros(1, VOCAB)
    row = [params(temperature=1.0, seed=42)]
    drawn = [tokens(logits, row, [list(range(1, 4 + length))])[0] for length in range(20)]
    assert len(set(drawn)) > 12
    # Where the prompt ended and how the tokens came to be known doesn't matter: a resumed request draws the same.
    assert [tokens(logits, row, [list(range(1, 4 + n))], num_prompt=1)[0] for n in range(20)] == drawn


def test_the_distribution_is_that_of_the_softmax() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125])).repeat(4000, 1)
    draws = torch.from_numpy(np.random.default_rng(0).random(4000))
    shares = torch.bincount(pick(logits, draws), minlength=4).double() / 4000
    expected = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    chi_square = (4000 * (shares - expected).square() / expected).sum()
    assert chi_square < 16.3  # 0.1 % tail of 3 degrees of freedom


def test_draws_over_seeds_are_uniform() -> None:
    from runner.uniform import uniforms

    seeds = np.arange(20000, dtype=np.uint64)
    drawn = uniforms(seeds, np.zeros_like(seeds), np.full(20000, 17))
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = np.bincount((drawn * 20).astype(int), minlength=20)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 0.1 % tail of 19 degrees of freedom
    by_position = uniforms(np.zeros(20000, np.uint64), np.zeros(20000, np.uint64), np.arange(20000))
    assert ((np.bincount((by_position * 20).astype(int), minlength=20) - 1000) ** 2 / 1000).sum() < 43.8


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_extreme_draws_never_hit_an_id_without_probability(draw: float) -> None:
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2], logits[0, 4] = 0.0, -1.0
    assert pick(logits, torch.tensor([draw], dtype=torch.float64)).item() == (2 if draw == 0 else 4)


def test_masked_and_vanishing_ids_weigh_nothing_and_all_others_weigh_the_same_to_the_bit() -> None:
    order = torch.randperm(3003, generator=torch.Generator().manual_seed(4))
    gone = torch.tensor([-float("inf"), -87.4, -95.0, -103.9, -200.0, -1e9]).repeat(167)
    exponents = torch.cat([-torch.linspace(0, 86.7, 2001), gone])[order]
    weights, plain = exponentials(exponents.clone()), exponents.exp()
    counting = exponents >= -86.7
    assert torch.equal(weights[counting], plain[counting])
    assert counting.sum() == 2001 and not weights[~counting].any()


def test_ranks_count_what_is_above() -> None:
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0], [float("nan"), 1.0, 1.0, -float("inf")]])
    assert ranks_of(values, values[:, 2:3]).tolist() == [3, 1]
    assert ranks_of(values, values[:, 3:]).tolist() == [1, 3]


def test_top_k_keeps_ties_and_is_clamped_to_the_vocabulary() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0], [3.0, 1.0, 2.0, 2.0], [3.0, 1.0, 2.0, 2.0]])
    keep_top_k(logits, torch.tensor([2, 0, 10**9]))
    assert torch.isfinite(logits).tolist() == [[True, False, True, True], [True] * 4, [True] * 4]
    assert tokens(random_logits(1), [params(temperature=1.0, top_k=10**9)])


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**31), st.floats(0.0, 1.0), st.integers(2, 1500), st.floats(0.01, 8))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed: int, top_p: float, width: int, spread: float) -> None:
    """Against the definition: sort, cumulate, cut. Flat rows need more than the first look of 1,024 ids."""
    logits = random_logits(1, seed, width) * spread / 3
    kept = logits.clone()
    keep_top_p(kept, torch.tensor([top_p]))
    probabilities, order = torch.softmax(logits[0].double(), 0).sort(descending=True)
    before = probabilities.cumsum(0) - probabilities
    clear = (before - torch.tensor(top_p).double()).abs() > 1e-6  # at the very border rounding may decide
    wanted = (before < torch.tensor(top_p).double()) | (torch.arange(width) == 0) | (top_p >= 1)
    got = torch.isfinite(kept[0])[order]
    assert bool((got == wanted)[clear].all()) and bool(got[0])


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.29, 0.11]]))
    keep_min_p(logits, torch.tensor([0.4]))
    assert torch.isfinite(logits).tolist() == [[True, True, False]]
    assert tokens(random_logits(1), [params(temperature=2.0, min_p=1.0)]) == random_logits(1).argmax(1).tolist()


def test_penalties_follow_their_definitions() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :6] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, -1.0])
    # 0 in the prompt, 1 twice in the output, 2 once in the output
    known, prompt = [[0, 50, 51, 1, 1, 2]], 3

    def best(**changes: float) -> int:
        return tokens(logits, [params(**changes)], known, prompt)[0]

    assert best() == 0
    assert best(repetition_penalty=1.6) == 3  # 9/1.6, 8/1.6, 7/1.6 < 6
    assert best(presence_penalty=9.0) == 0  # the prompt doesn't count
    assert best(frequency_penalty=-1.0) == 1  # 8 + 2 over 9
    assert best(presence_penalty=-1.5) == 1
    assert best(repetition_penalty=0.5) == 0  # 18 over 16


def test_a_repetition_penalty_makes_negative_logits_smaller() -> None:
    logits = torch.full((1, VOCAB), -3.0)
    logits[0, 1], logits[0, 7] = -1.0, -1.5
    assert tokens(logits, [params(repetition_penalty=2.0)]) == [7]


def test_min_tokens_masks_all_end_ids_until_it_is_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 3], logits[0, 9] = 9.0, 8.0, 7.0
    row = [params(min_tokens=2, eos_token_ids=(2,), stop_token_ids=(3,))]
    assert tokens(logits, row, [[1, 1, 1]]) == [9]
    assert tokens(logits, row, [[1, 1, 1, 5]]) == [9]
    assert tokens(logits, row, [[1, 1, 1, 5, 5]]) == [2]


@pytest.mark.parametrize("wild", [-1, VOCAB, VOCAB + 27, VOCAB + 28, 999999, 2**31, 2**63 - 1])
def test_ids_outside_the_vocabulary_touch_neither_this_row_nor_its_neighbours(wild: int) -> None:
    logits = random_logits(3, 4, VOCAB + 28)
    alone = tokens(logits[:, :VOCAB], [params()] * 3)
    odd = params(min_tokens=5, stop_token_ids=(wild,), logit_bias=((wild, 100.0),))
    assert tokens(logits, [params(), odd, params()]) == alone
    some = params(allowed_token_ids=(wild, 7))
    assert tokens(logits, [params(), some, params()]) == [alone[0], 7, alone[2]]


def test_the_ids_at_the_border_of_the_vocabulary_work() -> None:
    logits = torch.zeros(2, VOCAB)
    assert tokens(logits, [params(logit_bias=((0, 1.0),)), params(logit_bias=((VOCAB - 1, 1.0),))]) == [0, VOCAB - 1]


def test_an_allow_list_with_no_usable_id_is_a_row_error() -> None:
    batch = Batch(limits())
    with pytest.raises(ParamError) as caught:
        batch.params.set(0, params(allowed_token_ids=(VOCAB,)))
    assert caught.value.code == "no_allowed_tokens"
    clash = params(allowed_token_ids=(2,), min_tokens=3, eos_token_ids=(2,))
    result = sample(random_logits(2), [params(), clash])
    assert list(result.bad) == [1] and result.bad[1][0] == "no_allowed_tokens"
    assert result.tokens[0] == random_logits(2)[0].argmax()


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_parameters_that_are_not_usable_numbers_are_a_row_error(name: str, value: float) -> None:
    with pytest.raises(ParamError):
        Batch(limits()).params.set(0, params(**{name: value}))
    with pytest.raises(ParamError):
        Batch(limits()).params.set(0, params(logit_bias=((1, value),)))


def test_pad_ids_of_a_wider_head_are_never_sampled_nor_listed() -> None:
    logits = torch.zeros(1, VOCAB + 28)
    logits[:, VOCAB:] = 100.0
    for seed in range(20):
        result = sample(logits, [params(temperature=2.0, seed=seed, logprobs=20)])
        assert result.tokens[0] < VOCAB
        assert max(i32(result.logprobs[0].top_ids)) < VOCAB
        assert result.logprobs[0].logprob == pytest.approx(-math.log(VOCAB), abs=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [[params()] * 3, [MIXED[1], MIXED[5], MIXED[3]]], ids=["plain", "mixed"])
def test_a_row_with_non_finite_logits_fails_alone(poison: float, rows: list[SamplingParams]) -> None:
    logits = random_logits(3, 6)
    healthy = tokens(logits, rows)
    logits[1, 17] = poison
    result = sample(logits, rows)
    assert list(result.bad) == [1] and result.bad[1][0] == "non_finite_logits"
    assert [result.tokens[0], result.tokens[2]] == [healthy[0], healthy[2]]
    assert all(entry.id != 1 for entry in result.logprobs)


def test_non_finite_pad_columns_of_the_head_do_no_harm() -> None:
    logits = random_logits(1, 0, VOCAB + 4)
    logits[:, VOCAB:] = math.nan
    assert tokens(logits, [params()]) == logits[:, :VOCAB].argmax(1).tolist()


def reported(logits: torch.Tensor, row: SamplingParams) -> TokenLogprobs:
    (entry,) = sample(logits, [row]).logprobs
    return entry


def test_logprobs_are_those_of_the_model_sorted_and_of_the_asked_length() -> None:
    logits = random_logits(1, 2)
    expected = torch.log_softmax(logits[0], 0)
    for asked in (0, 1, 5, 20):
        entry = reported(logits, params(logprobs=asked, temperature=0.7, logit_bias=((3, 100.0),)))
        ids, values = i32(entry.top_ids), f32(entry.top_logprobs)
        assert len(ids) == len(values) == asked
        assert (np.diff(values) <= 0).all()
        np.testing.assert_allclose(values, expected[torch.from_numpy(ids.copy()).long()], atol=1e-5)
        assert entry.logprob == pytest.approx(expected[3].item(), abs=1e-5)
        assert entry.rank == int((expected > expected[3]).sum()) + 1
        assert entry.position == 3


def test_logprobs_are_finite_however_unlikely_the_token() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 0] = 3e4
    entry = reported(logits, params(logprobs=5, allowed_token_ids=(7,)))
    assert entry.logprob == -9999.0 and np.isfinite(f32(entry.top_logprobs)).all()
    assert f32(entry.top_logprobs).min() >= -9999


def test_nothing_to_sample_gives_nothing() -> None:
    assert Sampler(VOCAB).sample(torch.zeros(0, VOCAB), Batch(limits()), np.zeros(0, np.int64)).tokens.tolist() == []
