"""Paged attention, all backends: against dense float64 attention, and against what lies around the slots a row owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from runner.attention.base import AttentionBackend, AttentionError
from runner.attention.cpu import CpuAttention, plan_units
from runner.attention.reference import ReferenceAttention
from runner.attention.torch_paged import TorchAttention
from runner.metadata import BatchMetadata, build

Backend = Callable[[list[torch.Tensor], int, int, int, float], AttentionBackend]
Rows = Sequence[tuple[int, int]]  # (tokens already in the pages, tokens of this step)

BACKENDS: list[Backend] = [ReferenceAttention, TorchAttention, CpuAttention]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BORDERS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129]
MIXED: Rows = [(0, 1), (15, 1), (16, 1), (0, 33), (40, 24), (191, 1), (0, 16), (1, 70)]


@pytest.fixture(params=BACKENDS, ids=["reference", "torch", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Case:
    """A step over shuffled pages: the whole history of each row, the pool before the step, and the right answer."""

    def __init__(
        self,
        rows: Rows,
        dtype: torch.dtype = torch.float32,
        *,
        page_size: int = 16,
        q_heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 64,
        filler: float = float("nan"),
        seed: int = 0,
    ) -> None:
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        needed = -(-(starts + counts) // page_size)
        self.rows, self.heads = rows, (q_heads, kv_heads, head_dim)
        self.num_pages = 2 * int(needed.sum()) + 3
        order = rng.permutation(self.num_pages - 1)[: needed.sum()].astype(np.int32) + 1  # never the null page
        table = np.zeros((len(rows), needed.max()), np.int32)
        table[np.arange(needed.max()) < needed[:, None]] = order
        self.meta: BatchMetadata = build(table, starts, counts, page_size)
        self.pool = torch.full((self.num_pages, 2, page_size, kv_heads, head_dim), filler, dtype=dtype)
        self.owned = torch.zeros(self.num_pages, page_size, dtype=torch.bool)
        self.keys, self.values, queries = [], [], []
        for row, (start, count) in enumerate(rows):
            keys, values = torch.randn((2, start + count, kv_heads, head_dim), generator=generator).to(dtype)
            queries.append(torch.randn((count, q_heads, head_dim), generator=generator).to(dtype))
            self.keys.append(keys)
            self.values.append(values)
            at = np.arange(start + count)
            pages, offsets = torch.from_numpy(table[row, at // page_size]).long(), torch.from_numpy(at % page_size)
            self.owned[pages, offsets] = True
            self.pool[pages[:start], 0, offsets[:start]] = keys[:start]
            self.pool[pages[:start], 1, offsets[:start]] = values[:start]
        self.q = torch.cat(queries)
        self.k = torch.cat([keys[start:] for keys, (start, _) in zip(self.keys, rows, strict=True)])
        self.v = torch.cat([values[start:] for values, (start, _) in zip(self.values, rows, strict=True)])

    def run(self, backend: Backend, pool: torch.Tensor | None = None) -> torch.Tensor:
        q_heads, kv_heads, head_dim = self.heads
        attention = backend([self.pool if pool is None else pool], q_heads, kv_heads, head_dim, head_dim**-0.5)
        attention.plan(self.meta)
        return attention.run(0, self.q, self.k, self.v)

    def expected(self) -> torch.Tensor:
        """Dense causal attention in float64, one row and one query head at a time."""
        q_heads, kv_heads, head_dim = self.heads
        out, begin = [], 0
        for (start, count), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            q = self.q[begin : begin + count].double()
            begin += count
            hidden = torch.ones(count, start + count, dtype=torch.bool).triu(start + 1)
            heads = []
            for head in range(q_heads):
                shared = head // (q_heads // kv_heads)
                scores = q[:, head] @ keys[:, shared].double().T * head_dim**-0.5
                heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[:, shared].double())
            out.append(torch.cat(heads, dim=-1))
        return torch.cat(out)

    def check(self, backend: Backend) -> None:
        got, expected = self.run(backend), self.expected()
        assert got.dtype == self.q.dtype
        assert got.shape == expected.shape
        assert (got.double() - expected).abs().max() <= TOLERANCE[self.q.dtype]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", BORDERS)
def test_a_prompt_and_then_one_token_are_right_at_every_border(
    backend: Backend, dtype: torch.dtype, page_size: int, length: int
) -> None:
    Case([(0, length)], dtype, page_size=page_size).check(backend)
    Case([(length, 1)], dtype, page_size=page_size).check(backend)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_query_heads_share_their_key_value_head(
    backend: Backend, dtype: torch.dtype, group: int, head_dim: int
) -> None:
    Case(MIXED, dtype, q_heads=2 * group, kv_heads=2, head_dim=head_dim).check(backend)


@pytest.mark.parametrize(
    ("backend", "page_size"),
    [(ReferenceAttention, 16), (TorchAttention, 4), (CpuAttention, 1), (CpuAttention, 4), (CpuAttention, 16)],
    indirect=["backend"],
)
def test_decodes_prefills_and_chunks_mix_in_one_step_over_two_threads(
    backend: Backend, dtype: torch.dtype, page_size: int, two_threads: None
) -> None:
    Case(MIXED * 3, dtype, page_size=page_size).check(backend)


def test_more_query_heads_than_a_tile_has_rows(backend: Backend, dtype: torch.dtype) -> None:
    Case([(0, 20), (33, 1)], dtype, q_heads=71, kv_heads=1).check(backend)


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_unwritten_slots_never_leak_into_a_result(
    backend: Backend, dtype: torch.dtype, filler: float, length: int
) -> None:
    rows = [(0, length), (length, 1), (length + 16, 1)]
    dirty, clean = Case(rows, dtype, filler=filler), Case(rows, dtype, filler=0.0)
    assert torch.equal(dirty.run(backend), clean.run(backend))


def test_only_the_slots_of_this_steps_tokens_are_written(
    backend: Backend, dtype: torch.dtype, two_threads: None
) -> None:
    case = Case(MIXED, dtype, filler=7.0)
    before = case.pool.clone()
    case.run(backend)
    written = torch.zeros_like(case.owned)
    written.view(-1)[torch.from_numpy(case.meta.slot_mapping)] = True
    kept = ~written[:, None, :, None, None].expand_as(before)
    assert torch.equal(case.pool[kept], before[kept])
    assert bool((case.pool[0] == 7.0).all()), "the null page was written"
    slots = case.pool.transpose(1, 2).flatten(0, 1)[torch.from_numpy(case.meta.slot_mapping)]
    assert torch.equal(slots[:, 0], case.k)
    assert torch.equal(slots[:, 1], case.v)


def test_a_negative_slot_is_written_nowhere(backend: Backend, dtype: torch.dtype) -> None:
    case = Case([(4, 1)], dtype, filler=7.0)
    case.meta.slot_mapping[:] = -1
    before = case.pool.clone()
    case.run(backend)
    assert torch.equal(case.pool, before)


def test_queries_keys_and_values_may_be_slices_of_one_projection(backend: Backend, dtype: torch.dtype) -> None:
    case = Case(MIXED, dtype)
    contiguous = case.run(backend, case.pool.clone())
    tokens = len(case.q)
    fused = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], dim=1)
    q, k, v = fused.split((6 * 64, 2 * 64, 2 * 64), dim=1)
    case.q, case.k, case.v = q.view(tokens, 6, 64), k.view(tokens, 2, 64), v.view(tokens, 2, 64)
    assert not case.q.is_contiguous()
    assert torch.equal(case.run(backend), contiguous)


def test_a_rows_result_is_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, two_threads: None) -> None:
    case = Case(MIXED * 4, dtype)
    together = case.run(CpuAttention, case.pool.clone())
    begin = 0
    for start, count in case.rows[: len(MIXED)]:
        tokens = slice(begin, begin + count)
        row = case.rows.index((start, count))
        pages = case.meta.kv_indices[case.meta.kv_indptr[row] : case.meta.kv_indptr[row + 1]]
        meta = build(pages[None], np.array([start], np.int32), np.array([count], np.int32), 16)
        attention = CpuAttention([case.pool.clone()], *case.heads, 64**-0.5)
        attention.plan(meta)
        assert torch.equal(attention.run(0, case.q[tokens], case.k[tokens], case.v[tokens]), together[tokens])
        begin += count


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_a_tokens_result_is_the_same_bits_whatever_chunks_the_prompt_came_in(dtype: torch.dtype, chunk: int) -> None:
    case = Case([(0, 150)], dtype)
    whole = case.run(CpuAttention, case.pool.clone())
    attention = CpuAttention([case.pool], *case.heads, 64**-0.5)
    for start in range(0, 150, chunk):
        count = min(chunk, 150 - start)
        attention.plan(build(case.meta.kv_indices[None], np.array([start], np.int32), np.array([count], np.int32), 16))
        part = slice(start, start + count)
        assert torch.equal(attention.run(0, case.q[part], case.k[part], case.v[part]), whole[part])


def test_each_layer_has_its_own_pool(backend: Backend) -> None:
    case = Case([(0, 5)], filler=0.0)
    pools = [case.pool, case.pool.clone()]
    attention = backend(pools, *case.heads, 0.125)
    attention.plan(case.meta)
    attention.run(1, case.q, case.k, case.v)
    assert not pools[0].any()
    assert pools[1].any()


def test_large_scores_do_not_overflow(backend: Backend) -> None:
    case = Case([(0, 40), (70, 1)])
    case.q *= 1e4
    case.check(backend)


def test_a_pool_of_another_shape_is_refused_with_the_numbers(backend: Backend) -> None:
    with pytest.raises(AttentionError, match=r"layer 0: pool has shape \(3, 2, 16, 2, 64\).*4, 64"):
        backend([torch.zeros(3, 2, 16, 2, 64)], 8, 4, 64, 1.0)
    with pytest.raises(AttentionError, match="9 query heads can't share 2"):
        backend([torch.zeros(3, 2, 16, 2, 64)], 9, 2, 64, 1.0)


def test_the_native_kernel_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(AttentionError, match="divides by 16, not 24"):
        CpuAttention([torch.zeros(3, 2, 16, 2, 24)], 2, 2, 24, 1.0)
    with pytest.raises(AttentionError, match="float64"):
        CpuAttention([torch.zeros(3, 2, 16, 2, 32, dtype=torch.float64)], 2, 2, 32, 1.0)


def test_another_number_of_tokens_than_planned_is_refused() -> None:
    case = Case([(0, 4)])
    case.q = case.q[:3]
    with pytest.raises(AttentionError, match="planned for 4 tokens, not 3"):
        case.run(CpuAttention)


def test_units_cover_every_token_once_and_the_costliest_come_first() -> None:
    qo_indptr, seq_lens = np.array([0, 1, 41, 42, 45], np.int32), np.array([300, 40, 5, 900], np.int32)
    rows, firsts = plan_units(qo_indptr, seq_lens, 18)
    spans = [(int(r), int(f), int(min(18, np.diff(qo_indptr)[r] - f))) for r, f in zip(rows, firsts, strict=True)]
    assert sorted(spans) == [(0, 0, 1), (1, 0, 18), (1, 18, 18), (1, 36, 4), (2, 0, 1), (3, 0, 3)]
    costs = [count * (seq_lens[row] - np.diff(qo_indptr)[row] + first + count) for row, first, count in spans]
    assert costs == sorted(costs, reverse=True)
