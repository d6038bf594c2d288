"""The real small model through the GPU path's attention and operations, over the reference kernels on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.attention.base import AttentionBackend
from runner.attention.flashinfer import FlashInferAttention, PlanLimits
from runner.attention.torch_paged import TorchAttention
from runner.cuda.device import HostDevice
from runner.cuda.ops import FlashInferOps
from runner.loader import LoadedModel, load_model
from runner.metadata import build
from runner.ops import TorchOps
from tests.runner.flashinfer_kit import LIBRARIES, library

PAGE, PAGES = 16, 24
PROMPTS = ([504, 260, 3575, 282, 4649, 314, 12, 99, 7, 1040, 2], [1, 4093, 198, 2683, 359, 253, 5356, 30] * 3)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(real_model_path: Path, smollm2_cache: Path) -> Callable[[str], LoadedModel]:
    """The model in a dtype, in plain torch; loaded once."""

    def load(dtype: str) -> LoadedModel:
        return load_model(real_model_path, dtype, lambda _: TorchOps(), max_model_len=256, cache_dir=smollm2_cache)

    return functools.cache(load)


def pools(model: LoadedModel) -> list[torch.Tensor]:
    shape = model.config
    size = (PAGES, 2, PAGE, shape.num_kv_heads, shape.head_dim)
    return [torch.full(size, float("nan"), dtype=model.dtype) for _ in range(shape.num_layers)]


def heads(model: LoadedModel) -> tuple[int, int, int, float]:
    shape = model.config
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale


def logits(model: LoadedModel, attention: AttentionBackend, graph: AttentionBackend | None = None) -> torch.Tensor:
    """A prompt in chunks beside a decode, then decodes; float32 logits of every row's last token, one below another."""
    first, second = PROMPTS
    table = np.zeros((2, 4), np.int32)
    table[0, :2], table[1, :4] = [7, 3], [5, 9, 2, 11]
    collected = []
    steps: list[Sequence[tuple[int, int, int]]] = [
        [(0, 0, len(first))],
        [(0, len(first), 1), (1, 0, 17)],
        [(1, 17, 7), (0, len(first) + 1, 1)],
        [(0, len(first) + 2, 1), (1, 24, 1)],
        [(1, 25, 1)],
    ]
    known = [[*first, 30, 198, 504, 2], [*second, 3575, 282]]
    for rows in steps:
        owners = np.array([row for row, _, _ in rows])
        starts, counts = (np.array(column, np.int32) for column in zip(*[row[1:] for row in rows], strict=True))
        meta = build(table[owners], starts, counts, PAGE)
        tokens = torch.tensor([known[row][start + i] for row, start, count in rows for i in range(count)])
        positions = torch.from_numpy(meta.positions)
        last = torch.from_numpy(meta.qo_indptr[1:].astype(np.int64) - 1)
        if graph is not None and counts.max() == 1:
            tokens, positions = (torch.nn.functional.pad(x, (0, 4 - len(x)), value=9) for x in (tokens, positions))
            graph.plan(meta)
            hidden = model.decoder.forward(tokens, positions, graph)
        else:
            attention.plan(meta)
            hidden = model.decoder.forward(tokens, positions, attention)
        collected.append(model.decoder.logits(hidden[last]))
    return torch.cat(collected)


def by_torch(model: LoadedModel) -> torch.Tensor:
    return logits(model, TorchAttention(pools(model), *heads(model)))


@pytest.mark.parametrize(("dtype", "name"), [("float16", name) for name in LIBRARIES] + [("bfloat16", "reference")])
def test_logits_are_those_of_plain_torch_in_float32_but_for_rounding(
    dtype: str, name: str, loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits reach from -20 to 27; one rounding more or less anywhere in 30 layers moves those of float16 by 0.02."""
    expected, model = by_torch(loaded("float32")), loaded(dtype)
    module = library(name, monkeypatch)
    monkeypatch.setattr(model.decoder, "_ops", FlashInferOps(model.dtype, module))
    limits = PlanLimits(rows=4, tokens=64, pages=32)
    attention = FlashInferAttention(
        pools(model), *heads(model), limits=limits, device=HostDevice(), graph_rows=4, module=module
    )
    unit = torch.finfo(model.dtype).eps / torch.finfo(torch.float16).eps
    for graph in (None, attention.for_graph(4)):
        got = logits(model, attention, graph)
        apart = (got - expected).abs()
        assert apart.mean() <= 0.05 * unit and apart.max() <= 0.4 * unit
        margin = expected.topk(2).values.diff().abs().flatten()
        clear = margin > 2 * apart.amax(1)
        assert torch.equal(got.argmax(1)[clear], expected.argmax(1)[clear])
