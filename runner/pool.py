"""How many KV pages a runner gets: arithmetic over a memory reading, with every refusal in numbers. Allocates nothing.

The reading is taken once, after the weights are loaded. From it comes off what the largest legal step needs beside the
pages (activations, and the sampler's float32 rows with log-probabilities), then `memory_utilization` takes its part.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from runner.config import RunnerConfig
from runner.errors import StartError
from runner.prompts import slice_bytes

log = logging.getLogger("triptych.runner")

GIB = 1 << 30
CPU_POOL_LIMIT = 4 * GIB  # a CPU's cache hierarchy and neighbours gain nothing from more
SAMPLER_COPIES = 6  # of [max_num_seqs, vocabulary] float32: logits, log-probabilities, penalties, weights, running sums
ACTIVATION_COPIES = 8  # of [max_num_batched_tokens, widest layer]


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool as it will be made. `num_blocks` includes the null block; `max_model_len` may have been lowered."""

    num_blocks: int
    max_model_len: int
    host_blocks: int


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What sizing must know of a model, in bytes and tokens."""

    block_bytes: int
    max_context: int
    vocab_width: int
    widest_layer: int
    dtype_bytes: int


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process could still take: the kernel's estimate, or what the cgroup has left if that is less."""
    available = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            bound = (root / limit).read_text().strip()
            if bound != "max":
                available = min(available, max(0, int(bound) - int((root / used).read_text())))
        except (OSError, ValueError):
            continue  # this machine has no such cgroup
    return available


def step_reserve(config: RunnerConfig, needs: ModelNeeds) -> int:
    """Bytes that the largest legal step needs beside the pages."""
    # Never both at a time: what is told of prompts comes before anything is sampled.
    sampler = max(SAMPLER_COPIES * config.max_num_seqs * needs.vocab_width * 4, slice_bytes(needs.vocab_width))
    activations = ACTIVATION_COPIES * config.step_tokens * needs.widest_layer * needs.dtype_bytes
    return sampler + activations


def pool_size(config: RunnerConfig, needs: ModelNeeds, available: int, measured: str = "") -> PoolSize:
    """The pool for this model and memory. StartError, with numbers, if not even one request could run.

    `available`: bytes that are free after loading; with `measured`, which says how they came about, those for pages.
    A `max_model_len` that was asked for is never lowered; one that only comes from the model is, with a warning.
    """
    wanted = config.max_model_len or needs.max_context
    if wanted > needs.max_context:
        raise StartError(f"max_model_len is {wanted}, the model's limit is {needs.max_context} tokens")
    size = config.block_size
    num_blocks, origin = _num_blocks(config, needs, available, wanted, measured)
    capacity = (num_blocks - 1) * size
    if capacity < wanted:
        numbers = (
            f"the KV pool holds {max(capacity, 0)} tokens ({max(num_blocks - 1, 0)} blocks of {size}, "
            f"{needs.block_bytes} bytes each; {origin})"
        )
        if config.max_model_len or capacity < 2 * size:
            share = "gpu_memory_utilization" if measured else "memory_utilization"
            raise StartError(
                f"{numbers}, less than one request of {wanted} tokens. Lower max_model_len, or raise "
                f"kv_cache_memory_bytes, {share} or num_blocks_override"
            )
        log.warning("%s, less than the model's %d: max_model_len is lowered to that", numbers, wanted)
        wanted = capacity
    return PoolSize(num_blocks, wanted, config.swap_space_bytes // needs.block_bytes)


def _num_blocks(
    config: RunnerConfig, needs: ModelNeeds, available: int, longest: int, measured: str
) -> tuple[int, str]:
    if config.num_blocks_override:
        return config.num_blocks_override, "from num_blocks_override"
    if config.kv_cache_memory_bytes:
        return config.kv_cache_memory_bytes // needs.block_bytes, "from kv_cache_memory_bytes"
    # More than every slot at full length can never be used.
    useful = config.max_num_seqs * -(-longest // config.block_size) + 1
    if measured:
        return min(available // needs.block_bytes, useful), measured
    reserve = step_reserve(config, needs)
    limited = min(int(max(0, available - reserve) * config.memory_utilization), CPU_POOL_LIMIT)
    origin = (
        f"{available / GIB:.2f} GiB available, {reserve / GIB:.2f} GiB kept for the largest step, "
        f"memory_utilization {config.memory_utilization:g}"
    )
    return min(limited // needs.block_bytes, useful), origin
