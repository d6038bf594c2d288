"""Datasets and traces of the load generator: lengths, determinism, shared blocks, arrival processes, bad files."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ops.bench.datasets import RandomDataset, TraceDataset, Vocabulary, arrival_times
from ops.traces import TraceError, TraceRow, read_trace

TRACES = Path(__file__).parent.parent / "data" / "traces"
IDS = Vocabulary(100, 20_000, text=False)
WORDS = Vocabulary(0, 1, text=True)


def random_dataset(**changes: object) -> RandomDataset:
    base = RandomDataset(
        50, input_tokens=40, output_tokens=20, range_ratio=0.0, prefix_tokens=0, vocabulary=IDS, seed=3
    )
    return replace(base, **changes)


def test_random_prompts_have_exactly_the_asked_number_of_ids_inside_the_vocabulary() -> None:
    for index in range(10):
        planned = random_dataset().request(index)
        assert isinstance(planned.prompt, list)
        assert (len(planned.prompt), planned.input_tokens, planned.output_tokens) == (40, 40, 20)
        assert all(100 <= token < 20_000 for token in planned.prompt)


def test_equal_seeds_give_equal_requests_and_other_seeds_or_indices_other_ones() -> None:
    assert random_dataset().request(7) == random_dataset().request(7)
    assert random_dataset().request(7).prompt != random_dataset().request(8).prompt
    assert random_dataset().request(7).prompt != random_dataset(seed=4).request(7).prompt


def test_range_ratio_spreads_lengths_over_both_ends_of_the_interval() -> None:
    spread = random_dataset(range_ratio=0.5, input_tokens=4, output_tokens=2)
    requests = [spread.request(index) for index in range(300)]
    assert {r.input_tokens for r in requests} == {2, 3, 4, 5, 6}
    assert {r.output_tokens for r in requests} == {1, 2, 3}


def test_a_shared_prefix_is_the_same_in_all_prompts_and_comes_on_top_of_their_own_length() -> None:
    first, second = (random_dataset(prefix_tokens=16).request(index) for index in (0, 1))
    assert first.input_tokens == second.input_tokens == 56
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:] != second.prompt[16:]


def test_text_prompts_have_one_word_per_token() -> None:
    prompt = random_dataset(vocabulary=WORDS).request(0).prompt
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 40


def test_equal_hash_ids_give_equal_512_token_blocks_also_where_the_last_one_is_cut() -> None:
    rows = [
        TraceRow(0, 1024, 5, (1, 2)),
        TraceRow(1_000_000_000, 700, 5, (1, 2)),
        TraceRow(2_000_000_000, 1024, 5, (3, 2)),
    ]
    whole, cut, other = (TraceDataset(rows, IDS, seed=0).request(index).prompt for index in range(3))
    assert (len(whole), len(cut)) == (1024, 700)
    assert cut == whole[:700]
    assert other[512:] == whole[512:]
    assert other[:512] != whole[:512]


def test_a_row_without_enough_hash_ids_gets_tokens_of_its_own() -> None:
    rows = [TraceRow(0, 600, 5, (9,)), TraceRow(0, 600, 5, (9,))]
    first, second = (TraceDataset(rows, IDS, seed=0).request(index).prompt for index in range(2))
    assert len(first) == len(second) == 600
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


def test_clipping_bounds_both_lengths_and_a_row_without_output_still_asks_for_one_token() -> None:
    rows = [TraceRow(0, 5000, 900), TraceRow(0, 10, 0)]
    dataset = TraceDataset(rows, IDS, seed=0, max_input=64, max_output=8)
    long, short = dataset.request(0), dataset.request(1)
    assert (len(long.prompt), long.output_tokens) == (64, 8)
    assert (len(short.prompt), short.output_tokens) == (10, 1)


def test_the_azure_format_is_read_with_arrivals_from_its_first_row() -> None:
    rows = read_trace(TRACES / "azure_2023_conv_300.csv.gz", limit=2)
    assert [(r.input_tokens, r.output_tokens, r.hash_ids) for r in rows] == [(374, 44, ()), (396, 109, ())]
    assert rows[0].at_s == 0.0
    assert rows[1].at_s == pytest.approx(4.314579, abs=1e-5)


def test_the_mooncake_format_is_read_with_its_hash_ids_and_milliseconds_become_seconds() -> None:
    rows = read_trace(TRACES / "mooncake_conversation_200.jsonl.gz", time_scale=0.5)
    assert len(rows) == 200
    assert rows[0].input_tokens == 6758
    assert rows[0].hash_ids == tuple(range(14))
    unscaled = read_trace(TRACES / "mooncake_conversation_200.jsonl.gz")
    assert rows[-1].at_s == unscaled[-1].at_s / 2 > 0


def test_rows_out_of_order_are_sorted_by_time(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"timestamp": 3000, "input_length": 3, "output_length": 1}\n'
        '{"timestamp": 1000, "input_length": 1, "output_length": 1}\n'
    )
    assert [(r.at_s, r.input_tokens) for r in read_trace(trace)] == [(0.0, 1), (2.0, 3)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "neither JSON"),
        ("a,b\n1,2\n", "neither JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,2\nyesterday,1,2\n", r":3: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-1,2\n", r":2: negative"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 0}\n', r":2: "),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-4]}\n', r":1: negative"),
    ],
)
def test_a_bad_trace_is_refused_with_the_file_and_the_line(tmp_path: Path, content: str, problem: str) -> None:
    trace = tmp_path / "broken.trace"
    trace.write_text(content)
    with pytest.raises(TraceError, match=problem) as caught:
        read_trace(trace)
    assert "broken.trace" in str(caught.value)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv.gz"
    trace.write_bytes(gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n" * 50)[:-12])
    with pytest.raises(TraceError):
        read_trace(trace)


def test_arrivals_keep_the_rate_on_average_and_burstiness_sets_the_spread_of_gaps() -> None:
    poisson, bursty, regular = (np.diff(arrival_times(20_000, 10.0, b, seed=1)) for b in (1.0, 0.25, 16.0))
    for gaps, burstiness in ((poisson, 1.0), (bursty, 0.25), (regular, 16.0)):
        assert gaps.mean() == pytest.approx(0.1, rel=0.05)
        # A gamma distribution's coefficient of variation is 1 / sqrt(shape).
        assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_rate_is_all_at_once_and_infinite_burstiness_is_evenly_spaced() -> None:
    assert arrival_times(3, math.inf, 1.0, seed=0).tolist() == [0.0, 0.0, 0.0]
    assert arrival_times(3, 4.0, math.inf, seed=0).tolist() == [0.0, 0.25, 0.5]
    assert arrival_times(0, 4.0, 1.0, seed=0).tolist() == []


def test_arrivals_are_a_function_of_the_seed() -> None:
    assert arrival_times(9, 2.0, 1.0, seed=5).tolist() == arrival_times(9, 2.0, 1.0, seed=5).tolist()
    assert arrival_times(9, 2.0, 1.0, seed=5).tolist() != arrival_times(9, 2.0, 1.0, seed=6).tolist()
