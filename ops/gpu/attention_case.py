"""One step over shuffled pages, with random history, and dense causal attention over it in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.gpu.setting import Setting
from runner.attention.flashinfer import FlashInferAttention, PlanLimits
from runner.metadata import BatchMetadata, build

Rows = Sequence[tuple[int, int]]
"""For each row: tokens that are in the pages already, tokens of this step."""


class Case:
    """A pool whose unowned slots hold `filler`, and the queries, keys and values of one step."""

    def __init__(
        self,
        rows: Rows,
        setting: Setting,
        dtype: torch.dtype = torch.bfloat16,
        *,
        page_size: int = 16,
        q_heads: int = 32,
        kv_heads: int = 8,
        head_dim: int = 128,
        filler: float = float("nan"),
        seed: int = 0,
    ) -> None:
        device = setting.device.torch
        generator = torch.Generator(device).manual_seed(seed)
        starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        needed = -(-(starts + counts) // page_size)
        self.rows, self.heads, self._setting = rows, (q_heads, kv_heads, head_dim), setting
        self.num_pages = int(needed.sum()) + len(rows) + 3
        order = np.random.default_rng(seed).permutation(self.num_pages - 1)[: needed.sum()].astype(np.int32) + 1
        table = np.zeros((len(rows), needed.max()), np.int32)
        table[np.arange(needed.max()) < needed[:, None]] = order
        self.meta: BatchMetadata = build(table, starts, counts, page_size)
        self.pool = torch.full((self.num_pages, 2, page_size, kv_heads, head_dim), filler, dtype=dtype, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        queries = []
        for row, (start, count) in enumerate(rows):
            shape = (2, start + count, kv_heads, head_dim)
            keys, values = torch.randn(shape, generator=generator, device=device).to(dtype)
            queries.append(torch.randn((count, q_heads, head_dim), generator=generator, device=device).to(dtype))
            self.keys.append(keys)
            self.values.append(values)
            at = np.arange(start)
            pages = torch.from_numpy(table[row, at // page_size].astype(np.int64)).to(device)
            offsets = torch.from_numpy(at % page_size).to(device)
            self.pool[pages, 0, offsets] = keys[:start]
            self.pool[pages, 1, offsets] = values[:start]
        self.q = torch.cat(queries)
        self.k = torch.cat([keys[start:] for keys, (start, _) in zip(self.keys, rows, strict=True)])
        self.v = torch.cat([values[start:] for values, (start, _) in zip(self.values, rows, strict=True)])

    def backend(self, pool: Tensor | None = None, **options: Any) -> FlashInferAttention:
        """FlashInfer over this case's pool, sized for its step."""
        meta = self.meta
        limits = PlanLimits(meta.num_rows, meta.num_tokens, len(meta.kv_indices))
        given: dict[str, Any] = {"limits": limits, "device": self._setting.device, "module": self._setting.module}
        pools = [self.pool if pool is None else pool]
        return FlashInferAttention(pools, *self.heads, self.heads[2] ** -0.5, **{**given, **options})

    def run(self, pool: Tensor | None = None, **options: Any) -> Tensor:
        """What FlashInfer says, [T, Hq * D]."""
        attention = self.backend(pool, **options)
        attention.plan(self.meta)
        return attention.run(0, self.q, self.k, self.v)

    def expected(self) -> Tensor:
        """What is right, float64 [T, Hq * D]: one row at a time."""
        q_heads, kv_heads, head_dim = self.heads
        out, begin = [], 0
        for (start, count), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            q = self.q[begin : begin + count].double().transpose(0, 1)  # [Hq, count, D]
            begin += count
            wide = [x.double().transpose(0, 1).repeat_interleave(q_heads // kv_heads, dim=0) for x in (keys, values)]
            hidden = torch.ones(count, start + count, dtype=torch.bool, device=q.device).triu(start + 1)
            scores = (q @ wide[0].transpose(1, 2) * head_dim**-0.5).masked_fill(hidden, float("-inf"))
            out.append((scores.softmax(-1) @ wide[1]).transpose(0, 1).flatten(1))
        return torch.cat(out)

    def error(self, got: Tensor) -> float:
        """The largest difference to what is right; infinite if anything isn't a number."""
        difference = float((got.double() - self.expected()).abs().max())
        return difference if difference == difference else float("inf")
