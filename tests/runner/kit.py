"""Steps by hand: what a scheduler would send, without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import Limits, NewRequest, SamplingParams, Step, StepResult
from runner.config import RunnerConfig
from runner.sim import SimulatedExecutor

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, seed=1)


def limits(**changes: object) -> Limits:
    """Small limits for tests of index work: blocks of 4 tokens."""
    values: dict[str, object] = {
        "model": "test",
        "block_size": 4,
        "num_blocks": 64,
        "max_model_len": 64,
        "vocab_size": 100,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "host_blocks": 8,
    }
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


def new(
    request: int,
    tokens: Sequence[int],
    pages: Sequence[int],
    *,
    params: SamplingParams = GREEDY,
    num_prompt: int | None = None,
    num_computed: int = 0,
    incarnation: int = 1,
    told: int = 0,
) -> NewRequest:
    """A NewRequest from plain lists."""
    prompt = len(tokens) if num_prompt is None else num_prompt
    columns = pack_i32(list(tokens)), pack_i32(list(pages))
    return NewRequest(request, incarnation, columns[0], prompt, num_computed, columns[1], params, told)


def step(
    number: int,
    counts: dict[int, int],
    *,
    epoch: int = 1,
    arrivals: Sequence[NewRequest] = (),
    left: Sequence[int] = (),
    grow: dict[int, Sequence[int]] | None = None,
    filled: dict[int, bytes] | None = None,
    swap_out: Sequence[int] = (),
    swap_in: Sequence[int] = (),
) -> Step:
    """A Step from plain dicts: `counts` request -> tokens, `grow` request -> pages, `filled` page -> hash."""
    order = list(counts)
    grow, filled = grow or {}, filled or {}
    return Step(
        epoch,
        number,
        pack_u64(order),
        pack_i32(list(counts.values())),
        new=list(arrivals),
        left=pack_u64(list(left)),
        grow_rows=pack_i32([order.index(request) for request in grow]),
        grow_counts=pack_i32([len(pages) for pages in grow.values()]),
        grow_blocks=pack_i32([page for pages in grow.values() for page in pages]),
        filled_blocks=pack_i32(list(filled)),
        filled_hashes=b"".join(filled.values()),
        swap_out=pack_i32(list(swap_out)),
        swap_in=pack_i32(list(swap_in)),
    )


def tokens_of(result: StepResult) -> dict[int, int]:
    """request -> sampled token. Fails on a step failure."""
    assert result.failure is None, result.failure
    return dict(zip(u64(result.ids).tolist(), i32(result.tokens).tolist(), strict=True))


def sim(**changes: object) -> SimulatedExecutor:
    """A simulated executor with small limits whose steps take no time."""
    values: dict[str, object] = {
        "backend": "sim",
        "block_size": 4,
        "sim_num_blocks": 64,
        "sim_max_model_len": 64,
        "sim_vocab_size": 1000,
        "sim_step_ms": 0.0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return SimulatedExecutor(RunnerConfig(**{**values, **changes}))  # type: ignore[arg-type]


def pages_for(length: int, size: int, first: int) -> list[int]:
    """As many consecutive page ids from `first` as `length` tokens need."""
    return list(range(first, first + -(-length // size)))


def generate(
    run: Callable[[Step], StepResult],
    prompt: Sequence[int],
    count: int,
    *,
    size: int,
    params: SamplingParams = GREEDY,
    chunk: int = 1 << 30,
    emitted: Sequence[int] = (),
    first_page: int = 1,
    request: int = 1,
    incarnation: int = 1,
    first_step: int = 1,
) -> list[int]:
    """Outputs number len(emitted)+1 … `count` of one request run alone, with all its pages from the start."""
    known = [*prompt, *emitted]
    pages = pages_for(len(prompt) + count, size, first_page)
    arrival = new(request, known, pages, params=params, num_prompt=len(prompt), incarnation=incarnation)
    outputs: list[int] = []
    number, computed = first_step, 0
    while len(emitted) + len(outputs) < count:
        length = min(chunk, len(known) + len(outputs) - computed)
        result = run(step(number, {request: length}, arrivals=[arrival] if computed == 0 else []))
        computed += length
        number += 1
        sampled = tokens_of(result)
        assert bool(sampled) == (computed == len(known) + len(outputs)), "samples exactly at the last known token"
        outputs += sampled.values()
    return outputs


def random_hash(seed: int) -> bytes:
    """16 bytes that look like a block hash."""
    return np.random.default_rng(seed).bytes(16)
