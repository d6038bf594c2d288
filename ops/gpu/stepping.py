"""Steps by hand, as a scheduler would send them: for checks and measurements without one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ops.gpu.report import Wrong
from protocol.columns import i32, pack_i32, pack_u64, u64
from protocol.messages import NewRequest, SamplingParams, Step, StepResult
from runner.cuda.executor import DeviceExecutor

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, seed=1)


def arrival(
    request: int,
    tokens: Sequence[int],
    first_page: int,
    room: int,
    page_size: int,
    *,
    params: SamplingParams = GREEDY,
    computed: int = 0,
    incarnation: int = 1,
) -> NewRequest:
    """A request with these known tokens and consecutive pages from `first_page` for `room` tokens."""
    pages = list(range(first_page, first_page + -(-room // page_size)))
    known = pack_i32(list(tokens))
    return NewRequest(request, incarnation, known, len(tokens), computed, pack_i32(pages), params)


def step(
    number: int,
    counts: Mapping[int, int],
    *,
    arrivals: Sequence[NewRequest] = (),
    left: Sequence[int] = (),
    swap_out: Sequence[int] = (),
    swap_in: Sequence[int] = (),
) -> Step:
    """One step: request -> tokens, with who arrives before it and who has left. Swaps: device, host, device, host …"""
    return Step(
        1,
        number,
        pack_u64(list(counts)),
        pack_i32(list(counts.values())),
        new=list(arrivals),
        left=pack_u64(list(left)),
        swap_out=pack_i32(list(swap_out)),
        swap_in=pack_i32(list(swap_in)),
    )


def tokens_of(result: StepResult) -> dict[int, int]:
    """request -> sampled token. Wrong if the step or one of its rows failed."""
    if result.failure is not None:
        raise Wrong(f"a step failed: {result.failure.code} {result.failure.message}")
    if result.errors:
        raise Wrong(f"a row failed: {result.errors[0].code} {result.errors[0].message}")
    return dict(zip(u64(result.ids).tolist(), i32(result.tokens).tolist(), strict=True))


def ahead(executor: DeviceExecutor, steps: Iterable[Step], depth: int = 2) -> list[dict[int, int]]:
    """Each step's tokens; a step is launched before the one `depth` - 1 before it is collected."""
    found: list[dict[int, int]] = []
    under_way: deque[Any] = deque()
    for one in steps:
        if len(under_way) == depth:
            found.append(tokens_of(executor.collect(under_way.popleft())))
        under_way.append(executor.launch(one, 0))
    return [*found, *(tokens_of(executor.collect(launched)) for launched in under_way)]
