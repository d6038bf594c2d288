"""FlashInfer's attention path on a CPU: everything but the kernels themselves, against dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.attention.base import AttentionBackend, AttentionError
from runner.attention.flashinfer import FlashInferAttention, PlanLimits
from runner.attention.flashinfer_staging import PlanStaging
from runner.attention.flashinfer_wrappers import HeadShape, wants_tensor_cores, workspace_bytes
from runner.cuda.device import HostDevice
from runner.metadata import MetadataError, build
from tests.runner import flashinfer_kernels as kernels
from tests.runner import flashinfer_reference
from tests.runner.flashinfer_kit import LIBRARIES, RewrittenError, WatchedDevice, library
from tests.runner.test_attention_paged import BORDERS, MIXED, Case

LIMITS = PlanLimits(rows=64, tokens=1024, pages=4096)
Make = Callable[..., Callable[..., FlashInferAttention]]


@pytest.fixture(params=LIBRARIES)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(**options) -> a backend as `Case.run` takes it, on either form of FlashInfer."""
    module = library(request.param, monkeypatch)
    return lambda **options: backend_of(module, **options)


def backend_of(module: Any, **options: Any) -> Callable[..., FlashInferAttention]:
    given: dict[str, Any] = {"limits": LIMITS, "device": HostDevice(), "module": module, **options}
    return lambda *args: FlashInferAttention(*args, **given)


def check(case: Case, backend: Callable[..., AttentionBackend]) -> None:
    got, expected = case.run(backend), case.expected()
    assert got.dtype == case.q.dtype and got.shape == expected.shape and got.is_contiguous()
    assert (got.double() - expected).abs().max() <= 2e-2


@pytest.mark.parametrize(
    ("page_size", "length"),
    [*((16, length) for length in BORDERS), *((size, length) for size in (1, 4) for length in (1, 17, 64))],
)
def test_a_prompt_and_then_one_token_are_right_at_every_border(make: Make, page_size: int, length: int) -> None:
    check(Case([(0, length)], torch.bfloat16, page_size=page_size), make())
    check(Case([(length, 1)], torch.bfloat16, page_size=page_size), make())


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [
        (1, 64, torch.bfloat16),
        (2, 128, torch.float16),
        (3, 64, torch.float16),
        (4, 128, torch.bfloat16),
        (7, 64, torch.bfloat16),
        (8, 128, torch.float16),
    ],
)
def test_query_heads_share_their_key_value_head(make: Make, dtype: torch.dtype, group: int, head_dim: int) -> None:
    check(Case(MIXED, dtype, q_heads=2 * group, kv_heads=2, head_dim=head_dim), make())


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("rows", ["decodes first", "prefills first", "mixed", "decodes only", "prefills only"])
def test_rows_may_come_in_any_order(make: Make, rows: str, tensor_cores: bool) -> None:
    decodes, prefills = [(15, 1), (191, 1), (0, 1), (16, 1)], [(0, 33), (40, 24), (0, 16), (1, 70)]
    order = {
        "decodes first": decodes + prefills,
        "prefills first": prefills + decodes,
        "mixed": [row for pair in zip(decodes, prefills, strict=True) for row in pair],
        "decodes only": decodes,
        "prefills only": prefills,
    }
    check(Case(order[rows], torch.bfloat16), make(tensor_cores=tensor_cores))


@settings(max_examples=examples(10), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 5, 40])), min_size=1, max_size=12),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([(3, 1), (4, 4), (8, 1), (14, 2)]),
    st.integers(0, 2**16),
)
def test_any_step_is_right(rows: list[tuple[int, int]], page_size: int, heads: tuple[int, int], seed: int) -> None:
    case = Case(rows, torch.bfloat16, page_size=page_size, q_heads=heads[0], kv_heads=heads[1], seed=seed)
    check(case, backend_of(flashinfer_reference))


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_one_backend_plans_step_after_step(make: Make, tensor_cores: bool) -> None:
    """The second plan and those that follow go to the compiled planner directly."""
    steps = [
        Case(rows, torch.bfloat16, seed=seed) for seed, rows in enumerate([MIXED, [(5, 1)], MIXED[::-1], [(0, 9)]])
    ]
    pool = torch.full_like(max((case.pool for case in steps), key=len), float("nan"))
    attention = make(tensor_cores=tensor_cores)([pool], *steps[0].heads, 64**-0.5)
    for case in steps * 2:
        pool[: len(case.pool)] = case.pool
        attention.plan(case.meta)
        got = attention.run(0, case.q, case.k, case.v)
        assert (got.double() - case.expected()).abs().max() <= 2e-2


def test_another_release_is_planned_by_its_own_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_reference, "__version__", "0.6.15")
    case = Case(MIXED, torch.bfloat16)
    attention = backend_of(flashinfer_reference)([case.pool], *case.heads, 64**-0.5)
    for _ in range(3):
        flashinfer_reference.CALLS.clear()
        attention.plan(case.meta)
        assert [name for name, _, _ in flashinfer_reference.CALLS] == [
            "BatchDecodeWithPagedKVCacheWrapper.plan",
            "BatchPrefillWithPagedKVCacheWrapper.plan",
        ]
    assert (attention.run(0, case.q, case.k, case.v).double() - case.expected()).abs().max() <= 2e-2


@pytest.mark.parametrize("filler", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_unwritten_slots_never_leak_into_a_result(make: Make, filler: float, length: int) -> None:
    rows = [(0, length), (length, 1), (length + 16, 1)]
    dirty, clean = Case(rows, torch.bfloat16, filler=filler), Case(rows, torch.bfloat16, filler=0.0)
    assert torch.equal(dirty.run(make()), clean.run(make()))


def test_only_the_slots_of_this_steps_tokens_are_written(make: Make) -> None:
    case = Case(MIXED, torch.bfloat16, filler=7.0)
    before = case.pool.clone()
    case.run(make())
    written = torch.zeros_like(case.owned)
    written.view(-1)[torch.from_numpy(case.meta.slot_mapping)] = True
    kept = ~written[:, None, :, None, None].expand_as(before)
    assert torch.equal(case.pool[kept], before[kept])
    slots = case.pool.transpose(1, 2).flatten(0, 1)[torch.from_numpy(case.meta.slot_mapping)]
    assert torch.equal(slots[:, 0], case.k) and torch.equal(slots[:, 1], case.v)


def test_a_negative_slot_is_written_to_the_null_page_only(make: Make) -> None:
    case = Case([(4, 1), (0, 3), (7, 1)], torch.bfloat16, filler=7.0)
    case.meta.slot_mapping[[0, 2]] = -1
    before = case.pool.clone()
    case.run(make())
    slots = case.meta.slot_mapping[case.meta.slot_mapping >= 0]
    changed = (case.pool != before).any(-1).any(-1).any(1).nonzero().tolist()
    assert {page * 16 + offset for page, offset in changed} <= {0, *slots.tolist()}


def test_queries_keys_and_values_may_be_slices_of_one_projection(make: Make) -> None:
    case = Case(MIXED, torch.bfloat16)
    contiguous = case.run(make(), case.pool.clone())
    fused = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], dim=1)
    case.q, case.k, case.v = fused.view(len(fused), 10, 64).split((6, 2, 2), dim=1)
    assert not case.q.is_contiguous()
    assert torch.equal(case.run(make()), contiguous)


@pytest.mark.parametrize("tensor_cores", [None, False])
def test_pages_of_fp8_hold_what_their_scales_say(make: Make, tensor_cores: bool | None) -> None:
    case = Case(MIXED, torch.bfloat16, filler=0.0)
    scales = (0.02, 0.01)  # of unit normals: within ±448 by far
    pool = torch.stack([case.pool[:, i].float() / scale for i, scale in enumerate(scales)], 1).to(torch.float8_e4m3fn)
    backend = make(q_dtype=torch.bfloat16, kv_scales=scales, tensor_cores=tensor_cores)
    got = case.run(backend, pool)
    assert (got.double() - case.expected()).abs().max() <= 0.15  # e4m3 keeps 3 bits of mantissa
    case.k *= 1e4
    case.run(backend, pool)
    assert torch.isfinite(pool.float()).all(), "a number beyond the range became NaN"


def test_tensor_cores_decode_where_the_group_asks_for_them() -> None:
    def shape(group: int, kv_dtype: torch.dtype = torch.bfloat16) -> HeadShape:
        return HeadShape(group * 2, 2, 64, 16, 1.0, torch.bfloat16, kv_dtype)

    assert [group for group in range(1, 17) if not wants_tensor_cores(shape(group))] == [1, 2, 3]
    assert wants_tensor_cores(shape(1, torch.float8_e4m3fn))


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40000), st.sampled_from([1, 1, 17, 300, 2048])), min_size=1, max_size=300),
    st.sampled_from([(9, 3), (32, 8), (64, 8), (32, 32), (28, 4), (8, 1), (71, 1)]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([1, 16, 64]),
)
def test_no_plan_needs_more_workspace_than_there_is(
    rows: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, page_size: int
) -> None:
    shape = HeadShape(*heads, head_dim, page_size, 1.0, torch.bfloat16, torch.bfloat16)
    there = workspace_bytes(shape, kernels.MULTIPROCESSORS, graph_rows=len(rows))
    held = [-(-(start + count) // page_size) for start, count in rows]
    tokens = [count for _, count in rows]
    ones = [1] * len(rows)
    common = (*heads, head_dim, page_size)
    assert kernels.prefill_workspace(tokens, held, *common, False) <= there
    assert kernels.prefill_workspace(ones, held, *common, False) <= there
    assert kernels.decode_workspace(held, *common, False) <= there
    assert kernels.decode_workspace(held, *common, True) <= there
    if wants_tensor_cores(shape):
        assert kernels.prefill_workspace(ones, held, *common, True) <= there


@pytest.mark.parametrize("rows", [1, 16, 256, 1024])
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (128, 4), (28, 4), (71, 1)])
def test_graphs_of_many_rows_have_their_workspace(heads: tuple[int, int], rows: int) -> None:
    shape = HeadShape(*heads, 128, 16, 1.0, torch.bfloat16, torch.bfloat16)
    used = kernels.prefill_workspace([1] * rows, [500] * rows, *heads, 128, 16, True)
    there = workspace_bytes(shape, kernels.MULTIPROCESSORS, graph_rows=rows)
    assert used <= there <= max(1.1 * used, workspace_bytes(shape, kernels.MULTIPROCESSORS)), "not too little nor more"


def test_a_step_beyond_the_limits_is_refused_with_the_numbers() -> None:
    case = Case(MIXED, torch.bfloat16)
    for limits in (PlanLimits(7, 1024, 4096), PlanLimits(64, 100, 4096), PlanLimits(64, 1024, 20)):
        attention = backend_of(flashinfer_reference, limits=limits)([case.pool], *case.heads, 1.0)
        with pytest.raises(AttentionError, match="147 tokens in 8 rows with 29 pages exceed"):
            attention.plan(case.meta)
        with pytest.raises(AttentionError, match="before plan"):
            attention.run(0, case.q, case.k, case.v)


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    def made(dtype: torch.dtype, head_dim: int = 64, **options: Any) -> FlashInferAttention:
        pool = torch.zeros(3, 2, 16, 2, head_dim).to(dtype)
        return backend_of(flashinfer_reference, **options)([pool], 2, 2, head_dim, 1.0)

    with pytest.raises(AttentionError, match="head_dim of .*, not 80"):
        made(torch.bfloat16, 80)
    with pytest.raises(AttentionError, match="not torch.float32"):
        made(torch.float32)
    with pytest.raises(AttentionError, match="not torch.float8_e4m3fn"):
        made(torch.float8_e4m3fn)
    with pytest.raises(AttentionError, match="don't go with queries of torch.float16"):
        made(torch.bfloat16, q_dtype=torch.float16)
    with pytest.raises(AttentionError, match="serves 64 key/value heads of 128, not 71"):
        HeadShape(71, 71, 128, 16, 1.0, torch.bfloat16, torch.bfloat16).check()
    with pytest.raises(AttentionError, match="sized for 1 to 8 rows, not 9"):
        made(torch.bfloat16, graph_rows=8).for_graph(9)


def test_another_number_of_tokens_than_planned_is_refused(make: Make) -> None:
    case = Case([(0, 4)], torch.bfloat16)
    attention = make()([case.pool], *case.heads, 1.0)
    with pytest.raises(AttentionError, match="before plan"):
        attention.run(0, case.q, case.k, case.v)
    attention.plan(case.meta)
    with pytest.raises(AttentionError, match="planned for 4 tokens, not 3"):
        attention.run(0, case.q[:3], case.k[:3], case.v[:3])


def test_staging_memory_is_rewritten_only_after_its_fence(make: Make) -> None:
    device = WatchedDevice()
    case = Case(MIXED, torch.bfloat16)
    attention = make(device=device, depth=3, graph_rows=8)([case.pool], *case.heads, 0.125)
    graph = attention.for_graph(4)
    for seed in range(8):
        step = Case(MIXED[: seed + 1] if seed % 3 else [(seed, 1)], torch.bfloat16, seed=seed)
        (attention if seed % 3 else graph).plan(step.meta)
        device.check()
    assert [fence.waited for fence in device.fences] == [True] * 5 + [False] * 3, "no wait before the ring is full"


def test_the_watch_sees_a_buffer_that_is_rewritten_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must be able to fail: a ring that doesn't wait."""
    device = WatchedDevice()
    staging = PlanStaging(device, 2, 64, (64,))
    monkeypatch.setattr("tests.runner.flashinfer_kit._Fence.synchronize", lambda self: None)
    with pytest.raises(RewrittenError):
        for value in range(4):
            with staging.slot() as slot:
                staging.send(slot, [np.full(8, value + 1, np.int32)])
            device.check()


def test_a_plan_that_fails_is_fenced_too() -> None:
    device = WatchedDevice()
    staging = PlanStaging(device, 2, 64)
    with pytest.raises(ZeroDivisionError), staging.slot() as slot:
        staging.send(slot, [np.ones(8, np.int32)])
        raise ZeroDivisionError
    assert len(device.fences) == 1
    with pytest.raises(AttentionError, match="96 indices doesn't fit 64"), staging.slot() as slot:
        staging.send(slot, [np.ones(90, np.int32), np.ones(1, np.int32)])


def test_each_layer_has_its_own_pool(make: Make) -> None:
    case = Case([(0, 5)], torch.bfloat16, filler=0.0)
    pools = [case.pool, case.pool.clone()]
    attention = make()(pools, *case.heads, 0.125)
    attention.plan(case.meta)
    attention.run(1, case.q, case.k, case.v)
    assert not pools[0].any() and pools[1].any()


def test_a_graph_of_more_rows_than_it_has_is_refused(make: Make) -> None:
    attention = make(graph_rows=8)([torch.zeros(9, 2, 16, 2, 64, dtype=torch.bfloat16)], 6, 2, 64, 1.0)
    graph = attention.for_graph(2)
    with pytest.raises(MetadataError, match="3 tokens in 3 rows don't fit 2 decode rows"):
        graph.plan(build(np.array([[1], [2], [3]], np.int32), np.zeros(3, np.int32), np.ones(3, np.int32), 16))
    with pytest.raises(MetadataError, match="2 tokens in 1 rows don't fit 2 decode rows"):
        graph.plan(build(np.array([[1]], np.int32), np.zeros(1, np.int32), np.full(1, 2, np.int32), 16))
