"""Phase `kernels`: FlashInfer's attention, as the runner calls it, against dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ops.gpu.attention_case import Case, Rows
from ops.gpu.report import Checks
from ops.gpu.setting import Setting
from runner.metadata import build

MOST = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Error on values of unit variance: outputs are rounded to 8 or 11 bits, probabilities inside the kernel too."""
FP8_MOST = 4e-2  # scores and sums go through the scales once more
MIXED: Rows = [(0, 1), (15, 1), (16, 1), (0, 33), (40, 24), (191, 1), (0, 16), (1, 70)]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are: full on a GPU, small where a CPU stands in."""

    borders: tuple[int, ...] = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 1000)
    page_sizes: tuple[int, ...] = (1, 16, 64)
    groups: tuple[int, ...] = (1, 2, 3, 4, 7, 8)
    head_dims: tuple[int, ...] = (64, 128)
    decodes: int = 96
    longest: int = 3000
    alone: int = 60_000
    chunk: int = 2048
    graph_rows: int = 32


SMALL = Sizes((1, 16, 17), (16,), (1, 3, 7), (64,), decodes=5, longest=60, alone=300, chunk=40, graph_rows=4)


def run(checks: Checks, setting: Setting, sizes: Sizes | None = None) -> None:
    """All of them; each kind is one result with the largest error of its cases."""
    sizes = sizes or Sizes()
    for page_size in sizes.page_sizes:
        with checks.attempt(f"borders, pages of {page_size}") as found:
            for length in sizes.borders:
                for rows in ([(0, length)], [(length, 1)]):
                    case = Case(rows, setting, page_size=page_size)
                    found.within("error", case.error(case.run()), MOST[torch.bfloat16])
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
        for head_dim in sizes.head_dims:
            with checks.attempt(f"mixed steps, {name}, heads of {head_dim}") as found:
                setting.kernels_for(f"batch_prefill_with_kv_cache_dtype_q_{name}_dtype_kv_{name}")
                for group in sizes.groups:
                    case = Case(MIXED, setting, dtype, q_heads=2 * group, kv_heads=2, head_dim=head_dim)
                    found.within("error", case.error(case.run()), MOST[dtype])
    _decodes(checks, setting, sizes)
    with checks.attempt("prefill in chunks") as found:
        for rows in ([(0, sizes.chunk)], [(sizes.chunk // 2 + 1, sizes.chunk)], [(7, sizes.chunk // 4)] * 3):
            case = Case(rows, setting)
            found.within("error", case.error(case.run()), MOST[torch.bfloat16])
    with checks.attempt("fp8 pages") as found:
        setting.kernels_for("dtype_kv_e4m3")
        for tensor_cores in (None, False):
            found.within("error", _fp8_error(setting, tensor_cores), FP8_MOST)
    _nothing_leaks(checks, setting)
    _graphs(checks, setting, sizes)


def _decodes(checks: Checks, setting: Setting, sizes: Sizes) -> None:
    lengths = torch.linspace(1, sizes.longest, sizes.decodes).long().tolist()
    for tensor_cores, name in ((False, "CUDA cores"), (True, "tensor cores")):
        with checks.attempt(f"decode on {name}") as found:
            for rows in ([(length, 1) for length in lengths], [(sizes.alone, 1)], [(0, 1)] * 3):
                case = Case(rows, setting)
                found.within("error", case.error(case.run(tensor_cores=tensor_cores)), MOST[torch.bfloat16])
    with checks.attempt("plan after plan") as found:
        steps = [Case(rows, setting, seed=seed) for seed, rows in enumerate([MIXED, [(5, 1)], MIXED[::-1], [(0, 9)]])]
        pool = torch.full_like(max((case.pool for case in steps), key=len), float("nan"))
        attention = steps[0].backend(pool)
        for case in steps * 2:
            pool[: case.num_pages] = case.pool
            attention.plan(case.meta)
            got = attention.run(0, case.q, case.k, case.v)
            found.within("error", case.error(got), MOST[torch.bfloat16])


def _fp8_error(setting: Setting, tensor_cores: bool | None) -> float:
    """Pages of e4m3 with scales, for the mixed step, against attention over what such pages hold."""
    case = Case(MIXED, setting, filler=0.0)
    scales = (0.02, 0.01)

    def stored(x: Tensor, scale: float) -> Tensor:
        return (x / scale).to(torch.float8_e4m3fn)

    pool = torch.stack([stored(case.pool[:, i], scale) for i, scale in enumerate(scales)], 1)
    case.keys = [(stored(keys, scales[0]).float() * scales[0]).double() for keys in case.keys]
    case.values = [(stored(values, scales[1]).float() * scales[1]).double() for values in case.values]
    return case.error(case.run(pool, q_dtype=torch.bfloat16, kv_scales=scales, tensor_cores=tensor_cores))


def _nothing_leaks(checks: Checks, setting: Setting) -> None:
    with checks.attempt("unwritten slots don't matter") as found:
        rows = [(0, 17), (17, 1), (33, 1), (1, 30)]
        clean = Case(rows, setting, filler=0.0).run()
        for filler in (float("nan"), float("inf")):
            found.need(torch.equal(Case(rows, setting, filler=filler).run(), clean), f"slots of {filler} leak")
    with checks.attempt("only this step's slots are written") as found:
        case = Case(MIXED, setting, filler=7.0)
        before = case.pool.clone()
        case.run()
        slots = torch.from_numpy(case.meta.slot_mapping).to(before.device)
        written = case.pool.transpose(1, 2).flatten(0, 1)[slots]
        found.need(
            torch.equal(written[:, 0], case.k) and torch.equal(written[:, 1], case.v), "what was written differs"
        )
        kept = torch.ones(before.shape[0] * before.shape[2], dtype=torch.bool, device=before.device)
        kept[slots] = False
        same = [pool.transpose(1, 2).flatten(0, 1)[kept] for pool in (case.pool, before)]
        found.need(torch.equal(*same), "another slot has changed")


def _graphs(checks: Checks, setting: Setting, sizes: Sizes) -> None:
    """A recorded decode that is larger than its step: right rows, and padding that stays on the null page."""
    rows, most = sizes.graph_rows - 1, sizes.graph_rows
    with checks.attempt("recorded decode with padded rows") as found:
        lengths = [1 + 13 * row for row in range(rows)]
        steps = [Case([(length, 1) for length in lengths], setting, filler=7.0, seed=seed) for seed in range(2)]
        case, pool = steps[0], steps[0].pool.clone()
        attention = case.backend(pool, graph_rows=most).for_graph(most)
        shape = (most, *case.q.shape[1:])
        q = torch.full(shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
        k = torch.full((most, *case.k.shape[1:]), float("nan"), dtype=q.dtype, device=q.device)
        v, out = k.clone(), torch.zeros(most, q[0].numel(), dtype=q.dtype, device=q.device)
        attention.plan(build(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32), 16))
        out.copy_(attention.run(0, q, k, v))  # what is compiled or allocated first, is so before the recording
        graph = setting.device.capture(lambda: out.copy_(attention.run(0, q, k, v)))
        for step in (*steps, steps[0]):
            pool.copy_(step.pool)
            for target, source in ((q, step.q), (k, step.k), (v, step.v)):
                target[:rows].copy_(source)
            attention.plan(step.meta)
            graph.replay()
            found.within("error", step.error(out[:rows]), MOST[torch.bfloat16])
            changed = (pool != step.pool).any(-1).any(-1).any(1).nonzero().tolist()
            own = set(step.meta.slot_mapping.tolist())
            strays = {page * 16 + offset for page, offset in changed} - own - {0}
            found.need(not strays, f"padding was written to slots {sorted(strays)[:4]}")
