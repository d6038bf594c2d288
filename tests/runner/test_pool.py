"""Sizing the KV pool: numbers in, numbers or a refusal with numbers out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from runner.config import RunnerConfig
from runner.errors import StartError
from runner.pool import CPU_POOL_LIMIT, GIB, ModelNeeds, available_memory, pool_size, step_reserve
from runner.prompts import SLICE_ROWS, slice_bytes

NEEDS = ModelNeeds(block_bytes=1 << 20, max_context=4096, vocab_width=50000, widest_layer=3072, dtype_bytes=2)


def config(**changes: object) -> RunnerConfig:
    return RunnerConfig(**{"max_num_seqs": 16, **changes})  # type: ignore[arg-type]


def test_the_pool_takes_its_part_of_what_is_free_after_the_largest_step() -> None:
    settings = config(memory_utilization=0.5)
    available = 4 * GIB
    size = pool_size(settings, NEEDS, available)
    assert size.num_blocks == int((available - step_reserve(settings, NEEDS)) * 0.5) // NEEDS.block_bytes
    assert size.max_model_len == 4096


def test_the_reserve_covers_float32_rows_of_the_whole_vocabulary() -> None:
    small, large = step_reserve(config(max_num_seqs=1), NEEDS), step_reserve(config(max_num_seqs=257), NEEDS)
    assert large - small >= 2 * 256 * NEEDS.vocab_width * 4


def test_the_reserve_covers_what_is_told_of_prompts_whatever_the_number_of_slots() -> None:
    few = step_reserve(config(max_num_seqs=1, max_num_batched_tokens=1), NEEDS)
    assert few >= slice_bytes(NEEDS.vocab_width) >= 3 * SLICE_ROWS * NEEDS.vocab_width * 4
    assert few < 2048 * NEEDS.vocab_width * 4, "and no more than that: not the logits of a whole prompt"


def test_a_large_machine_gives_a_bounded_pool_and_never_more_than_can_be_used() -> None:
    assert pool_size(config(), NEEDS, 1000 * GIB).num_blocks == CPU_POOL_LIMIT // NEEDS.block_bytes
    assert pool_size(config(max_num_seqs=1), NEEDS, 1000 * GIB).num_blocks == 4096 // 16 + 1


def test_explicit_sizes_win_over_measuring() -> None:
    assert pool_size(config(num_blocks_override=300), NEEDS, 0).num_blocks == 300
    assert pool_size(config(kv_cache_memory_bytes=2 * GIB), NEEDS, 0).num_blocks == 2048
    assert pool_size(config(swap_space_bytes=10 << 20), NEEDS, 64 * GIB).host_blocks == 10


def test_a_pool_smaller_than_the_models_context_lowers_the_limit_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        size = pool_size(config(num_blocks_override=101), NEEDS, 0)
    assert size.max_model_len == 1600
    assert "1600 tokens" in caplog.text and "4096" in caplog.text


def test_a_pool_smaller_than_the_length_that_was_asked_for_is_refused_with_numbers() -> None:
    with pytest.raises(StartError, match=r"holds 1600 tokens \(100 blocks of 16.*less than one request of 2048"):
        pool_size(config(num_blocks_override=101, max_model_len=2048), NEEDS, 0)
    assert pool_size(config(num_blocks_override=129, max_model_len=2048), NEEDS, 0).max_model_len == 2048


@pytest.mark.parametrize("available", [0, 1, 100 << 20])
def test_no_memory_is_a_refusal_that_shows_the_reading_and_never_a_negative_pool(available: int) -> None:
    with pytest.raises(StartError, match=r"holds 0 tokens.*GiB available.*kept for the largest step.*memory_util"):
        pool_size(config(max_num_batched_tokens=2048), NEEDS, available)


def test_a_length_beyond_the_models_context_is_refused() -> None:
    with pytest.raises(StartError, match="max_model_len is 5000, the model's limit is 4096"):
        pool_size(config(max_model_len=5000), NEEDS, 64 * GIB)


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / {"meminfo": "proc/meminfo"}.get(name, f"sys/fs/cgroup/memory.{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       100 kB\nMemFree:  1 kB\nMemAvailable:   50 kB\n"


def test_available_memory_is_what_the_kernel_estimates(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, meminfo=MEMINFO)) == 50 * 1024
    assert available_memory(machine(tmp_path, meminfo=MEMINFO, max="max\n", current="7\n")) == 50 * 1024


def test_a_container_limit_counts_when_it_is_less(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, meminfo=MEMINFO, max="30000\n", current="10000\n")) == 20000
    assert available_memory(machine(tmp_path, meminfo=MEMINFO, max="30000\n", current="40000\n")) == 0


def test_this_machine_has_some_memory() -> None:
    assert available_memory() > 64 << 20
