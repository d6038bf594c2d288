"""Decode rows for CUDA graphs: padding that nobody sees, and memory that stays where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runner.attention.base import AttentionError
from runner.attention.flashinfer import FlashInferAttention, FlashInferGraphAttention, PlanLimits
from runner.cuda.device import HostDevice
from runner.metadata import build
from tests.runner import flashinfer_reference
from tests.runner.flashinfer_kit import LIBRARIES, library
from tests.runner.test_attention_paged import Case

STEPS = [[(15, 1)], [(16, 1), (31, 1), (0, 1)], [(3, 1), (200, 1), (47, 1), (63, 1), (64, 1)]]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=LIBRARIES)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return library(request.param, monkeypatch)


def made(module: Any, pool: torch.Tensor, heads: tuple[int, int, int], **options: Any) -> FlashInferAttention:
    limits = PlanLimits(rows=8, tokens=64, pages=512)
    return FlashInferAttention(
        [pool], *heads, heads[2] ** -0.5, limits=limits, device=HostDevice(), graph_rows=8, module=module, **options
    )


def padded(x: torch.Tensor, rows: int, value: float) -> torch.Tensor:
    return torch.cat((x, torch.full((rows - len(x), *x.shape[1:]), value, dtype=x.dtype)))


def run(graph: FlashInferGraphAttention, case: Case, guard: float) -> torch.Tensor:
    """A step whose padded rows carry `guard` in queries, keys and values."""
    graph.plan(case.meta)
    return graph.run(0, *(padded(x, graph.rows, guard) for x in (case.q, case.k, case.v)))


@pytest.mark.parametrize(
    ("step", "rows", "tensor_cores", "guard"),
    [
        (STEPS[0], 5, False, NAN),
        (STEPS[0], 6, True, INF),
        (STEPS[0], 8, False, 7.0),
        (STEPS[1], 5, True, 7.0),
        (STEPS[1], 6, False, NAN),
        (STEPS[1], 8, True, INF),
        (STEPS[2], 5, False, INF),
        (STEPS[2], 6, True, 7.0),
        (STEPS[2], 8, True, NAN),
    ],
)
def test_nothing_of_the_padding_reaches_a_row(
    module: Any, step: list[tuple[int, int]], rows: int, tensor_cores: bool, guard: float
) -> None:
    """Unused slots, the null page and the padded rows all hold the guard value."""
    case = Case(step, torch.bfloat16, filler=guard)
    graph = made(module, case.pool, case.heads, tensor_cores=tensor_cores).for_graph(rows)
    got = run(graph, case, guard)
    assert got.shape == (rows, 6 * 64)
    assert (got[: len(step)].double() - case.expected()).abs().max() <= 2e-2


def test_padded_rows_write_the_first_slot_of_the_null_page_only(module: Any) -> None:
    case = Case(STEPS[1], torch.bfloat16, filler=7.0)
    before = case.pool.clone()
    run(made(module, case.pool, case.heads).for_graph(8), case, 3.0)
    changed = (case.pool != before).any(-1).any(-1).any(1).nonzero().tolist()
    assert sorted(page * 16 + offset for page, offset in changed) == sorted([0, *case.meta.slot_mapping.tolist()])
    assert bool((case.pool[0, :, 0] == 3.0).all())


def test_a_step_of_nobody_can_be_planned_to_record_a_graph(module: Any) -> None:
    pool = torch.zeros(4, 2, 16, 2, 64, dtype=torch.bfloat16)
    graph = made(module, pool, (6, 2, 64)).for_graph(3)
    nobody = np.zeros(0, np.int32)
    graph.plan(build(np.zeros((0, 1), np.int32), nobody, nobody, 16))
    q, k = torch.ones(3, 6, 64, dtype=torch.bfloat16), torch.ones(3, 2, 64, dtype=torch.bfloat16)
    assert torch.equal(graph.run(0, q, k, k), torch.ones(3, 6 * 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_a_run_reads_the_same_memory_whatever_was_planned(module: Any, tensor_cores: bool) -> None:
    """What a graph records are addresses."""
    pool = torch.zeros(300, 2, 16, 2, 64, dtype=torch.bfloat16)
    attention = made(module, pool, (6, 2, 64), tensor_cores=tensor_cores)
    graph = attention.for_graph(5)
    seen = set()
    for step in STEPS * 2:
        case = Case(step, torch.bfloat16)
        attention.plan(Case([(3, 4), (5, 1)], torch.bfloat16).meta)  # eager steps come in between
        graph.plan(case.meta)
        wrapper, where = graph._kernel._wrapper, graph._where
        fixed = [wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf]
        fixed += [wrapper._int_workspace_buffer, wrapper._float_workspace_buffer]
        fixed += [where.batch_indices, where.positions, where.indptr, where.indices, where.last_page_len]
        fixed += [wrapper._qo_indptr_buf] if tensor_cores else []
        seen.add(tuple((tensor.data_ptr(), tensor.shape) for tensor in fixed))
        assert where.indptr[:6].tolist() == [
            *case.meta.kv_indptr.tolist(),
            *(case.meta.kv_indptr[-1] + 1 + i for i in range(5 - len(step))),
        ]
    assert len(seen) == 1


def test_graphs_of_all_sizes_and_eager_steps_take_turns(module: Any) -> None:
    cases = [Case(step, torch.bfloat16, seed=seed) for seed, step in enumerate([*STEPS, [(0, 30), (7, 1)]])]
    pool = torch.full_like(max((case.pool for case in cases), key=len), float("nan"))
    attention = made(module, pool, cases[0].heads)
    graphs = {rows: attention.for_graph(rows) for rows in (8, 5, 3)}
    for turn in range(3):
        for case in cases:
            pool[: len(case.pool)] = case.pool
            count = len(case.rows)
            if max(tokens for _, tokens in case.rows) > 1:
                attention.plan(case.meta)
                got = attention.run(0, case.q, case.k, case.v)
            else:
                graph = graphs[min(rows for rows in graphs if rows >= count + (turn == 0 and count < 5))]
                got = run(graph, case, float("nan"))[: len(case.q)]
            assert (got.double() - case.expected()).abs().max() <= 2e-2


def test_an_eager_run_after_a_graphs_plan_is_refused(module: Any) -> None:
    """They share the device's index memory."""
    case = Case(STEPS[0], torch.bfloat16)
    attention = made(module, case.pool, case.heads)
    graph = attention.for_graph(2)
    with pytest.raises(AttentionError, match="before plan"):
        graph.run(0, case.q, case.k, case.v)
    attention.plan(case.meta)
    graph.plan(case.meta)
    with pytest.raises(AttentionError, match="before plan"):
        attention.run(0, case.q, case.k, case.v)
    with pytest.raises(AttentionError, match="for 2 rows, not 1"):
        graph.run(0, case.q, case.k, case.v)


def test_a_graphs_wrapper_takes_the_memory_that_it_is_lent() -> None:
    """Neither a workspace nor planning memory of its own: there are dozens of graphs."""
    attention = made(flashinfer_reference, torch.zeros(4, 2, 16, 2, 64, dtype=torch.bfloat16), (6, 2, 64))
    wrappers = [attention.for_graph(rows)._kernel._wrapper for rows in (1, 2)]
    assert len({wrapper._float_workspace_buffer.data_ptr() for wrapper in wrappers}) == 1
    assert len({wrapper._int_workspace_buffer.data_ptr() for wrapper in wrappers}) == 1
    assert all(wrapper._pin_memory_int_workspace_buffer is None for wrapper in wrappers)
