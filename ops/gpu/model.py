"""Phase `model`: a real model's first layers on the GPU, against what the CPU said of them when the pack was made.

Then what must not depend on how steps are run: recorded or launched, one ahead or one at a time, swapped out between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.gpu import truncated
from ops.gpu.report import Checks, Skipped
from ops.gpu.setting import Setting
from ops.gpu.stepping import GREEDY, ahead, arrival, step
from ops.gpu.truncated import PAGE, Expected, OneRow, rms
from ops.gpu.unpack import EXPECTED, MODEL
from protocol.messages import NewRequest, SamplingParams, Step
from runner.attention.flashinfer import FlashInferAttention, PlanLimits
from runner.config import RunnerConfig
from runner.cuda.executor import DeviceExecutor
from runner.cuda.graphs import DecodeGraphs
from runner.cuda.load import Builder, buckets_of
from runner.cuda.ops import FlashInferOps
from runner.cuda.pages import DevicePages
from runner.loader import LoadedModel, load_model
from runner.metadata import build
from runner.pool import PoolSize
from runner.sizing import warm_up

SEEDED = SamplingParams(max_tokens=1 << 20, temperature=0.9, top_p=0.95, top_k=200, min_p=0.001, seed=42)
PENALISED = SamplingParams(max_tokens=1 << 20, temperature=0.8, seed=7, repetition_penalty=1.2, logprobs=2)
NOISE = 2.0
"""By how much more than on the CPU bfloat16 may be off here: kernels add in other orders."""
LONGEST, BLOCKS, HOST_BLOCKS, ROWS = 1024, 400, 64, 16


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model on the device, and what makes executors over it."""

    setting: Setting
    model: LoadedModel
    expected: list[Expected]

    def executor(self, **changes: Any) -> DeviceExecutor:
        """One over a small pool with host pages. `changes` are settings."""
        builder = self.builder(**changes)
        return builder.build(PoolSize(BLOCKS, LONGEST, HOST_BLOCKS), buckets_of(builder.config))

    def builder(self, **changes: Any) -> Builder:
        values = {"max_model_len": LONGEST, "max_num_seqs": ROWS, "max_num_batched_tokens": 512, **changes}
        config = RunnerConfig(device="cuda", model=str(self.setting.pack / MODEL), **values)
        return Builder(config, self.model, self.setting.device, self.setting.module)


def run(checks: Checks, setting: Setting) -> None:
    """Load it, compare, vary."""
    loaded = _load(checks, setting)
    if loaded is None:
        return
    _logits(checks, loaded)
    _recorded_logits(checks, loaded)
    _greedy(checks, loaded)
    _measured_pool(checks, loaded)
    _swaps(checks, loaded)
    _depths(checks, loaded)
    _no_waiting(checks, loaded)


def _load(checks: Checks, setting: Setting) -> Loaded | None:
    with checks.attempt("load") as found:
        for name in (MODEL, EXPECTED):
            found.need((setting.pack / name).is_file(), f"{setting.pack / name} isn't there: make gpu-pack")
        module, device = setting.module, setting.device.torch
        path = setting.pack / MODEL
        model = load_model(
            path, "bfloat16", lambda dtype: FlashInferOps(dtype, module), max_model_len=LONGEST, device=device
        )
        loaded = Loaded(setting, model, truncated.load(setting.pack / EXPECTED))
        found.numbers |= {"layers": model.config.num_layers, "MiB": model.weight_bytes / 2**20}
        return loaded
    return None


def _attention(loaded: Loaded, rows: int, graph_rows: int = 0) -> FlashInferAttention:
    """Over pages of its own for so many sequences."""
    shape, device = loaded.model.config, loaded.setting.device
    pools = truncated.pools_for(loaded.model, device.torch, rows)
    return FlashInferAttention(
        *(pools, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale),
        limits=PlanLimits(rows, 512, len(pools[0])),
        device=device,
        graph_rows=graph_rows,
        module=loaded.setting.module,
    )


def _logits(checks: Checks, loaded: Loaded) -> None:
    for expected in loaded.expected:
        with checks.attempt(f"logits, prompt of {len(expected.prompt)}") as found:
            row, fed, got = OneRow(loaded.model, _attention(loaded, 1)), expected.prompt, list[Tensor]()
            for position, token in enumerate(expected.tokens):
                got.append(row.feed(fed).cpu()[expected.ids[position]])
                fed = [token]
            noise = rms(torch.stack(got) - expected.logits)
            found.within("noise_of_cpu", noise / expected.noise, NOISE)


def _recorded_logits(checks: Checks, loaded: Loaded) -> None:
    """The same decode step, launched and replayed in a graph that is wider."""
    with checks.attempt("recorded logits are the launched ones") as found, torch.inference_mode():
        rows, size, bucket = 5, 17, 8
        device, decoder = loaded.setting.device, loaded.model.decoder
        attention = _attention(loaded, bucket, bucket)
        graphs = DecodeGraphs(device, decoder, attention.for_graph, [bucket])
        table = np.arange(1, 1 + 2 * rows, dtype=np.int32).reshape(rows, 2)
        ids = torch.arange(100, 100 + rows * size).to(device.torch)
        starts = np.zeros(rows, np.int32)
        meta = build(table, starts, np.full(rows, size, np.int32), PAGE)
        attention.plan(meta)
        decoder.forward(ids, torch.from_numpy(meta.positions).to(device.torch), attention)
        meta = build(table, starts + size, np.ones(rows, np.int32), PAGE)
        ids, positions = ids[:rows].contiguous(), torch.from_numpy(meta.positions).to(device.torch)
        attention.plan(meta)
        launched = decoder.logits(decoder.forward(ids, positions, attention))
        replayed = [graphs.run(meta, ids, positions).clone() for _ in range(2)]
        found.need(torch.equal(*replayed), "two replays differ")
        found.numbers["bitwise"] = float(torch.equal(replayed[0], launched))
        # With more rows cuBLAS may add in another order, after which bfloat16 rounds otherwise.
        noise = max(one.noise for one in loaded.expected)
        found.within("noise_of_cpu", rms(replayed[0] - launched) / noise, NOISE)


def _said(executor: DeviceExecutor, prompt: Sequence[int], count: int, params: SamplingParams = GREEDY) -> list[int]:
    """`count` tokens of one request alone, in whole steps, two under way."""
    new = arrival(1, prompt, 1, len(prompt) + count, PAGE, params=params)
    steps = [step(1, {1: len(prompt)}, arrivals=[new]), *(step(2 + n, {1: 1}) for n in range(count - 1))]
    said = [tokens[1] for tokens in ahead(executor, steps)]
    executor.clear()
    return said


def _greedy(checks: Checks, loaded: Loaded) -> None:
    for name, changes in (("recorded", {}), ("launched", {"enforce_eager": True})):
        with checks.attempt(f"greedy tokens, {name}") as found:
            executor = loaded.executor(**changes)
            warm_up(executor)
            compared = 0
            for expected in loaded.expected:
                said = _said(executor, expected.prompt, len(expected.tokens))
                for got, wanted, clear in zip(said, expected.tokens, expected.clear, strict=True):
                    if got != wanted and not clear:
                        break  # either is right, and what follows is another text
                    found.need(got == wanted, f"{got} after {len(expected.prompt)} + {compared}, the CPU says {wanted}")
                    compared += 1
            found.numbers["tokens"] = compared
            found.need(compared >= sum(map(len, (one.tokens for one in loaded.expected))) // 3, "too few are clear")


def _measured_pool(checks: Checks, loaded: Loaded) -> None:
    with checks.attempt("the pool is measured") as found:
        if not loaded.setting.on_gpu:
            raise Skipped("there is no GPU memory to measure")
        size = loaded.builder(gpu_memory_utilization=0.5).pool()
        found.numbers |= {"blocks": size.num_blocks, "tokens": size.max_model_len}
        found.need(size.num_blocks > ROWS, f"{size.num_blocks} blocks were left")


def _swaps(checks: Checks, loaded: Loaded) -> None:
    device = loaded.setting.device
    with checks.attempt("swapped pages come back as they went") as found:
        pages = DevicePages(loaded.model.config, 40, PAGE, torch.bfloat16, device, 40)
        for layer in pages.layers:
            layer.normal_()
        before = [layer.clone() for layer in pages.layers]
        out = np.array([[page, 39 - page] for page in range(1, 36)], np.int32)
        pages.swap_out(out)
        for layer in pages.layers:
            layer[1:36] = float("nan")  # may only happen after the copies, whatever runs beside
        back = np.array([[page % 35 + 1, 39 - page] for page in range(1, 36)], np.int32)
        pages.swap_in(back)
        for layer, old in zip(pages.layers, before, strict=True):
            moved = torch.from_numpy(back[:, 0].astype(np.int64)).to(device.torch)
            found.need(torch.equal(layer[moved], old[1:36]), "a page came back changed")
            found.need(torch.equal(layer[36:], old[36:]) and torch.equal(layer[0], old[0]), "another page changed")
    with checks.attempt("a request that was swapped says what it would have said") as found:
        prompt, executor = loaded.expected[-1].prompt[:40], loaded.executor()
        whole = _said(executor, prompt, 12, SEEDED)
        out_pairs = [number for page in range(1, 5) for number in (page, page + 9)]
        in_pairs = [number for page in range(1, 5) for number in (page + 100, page + 9)]
        first = arrival(1, prompt, 1, 52, PAGE, params=SEEDED)
        steps = [step(1, {1: 40}, arrivals=[first]), *(step(2 + n, {1: 1}) for n in range(5))]
        said = [tokens[1] for tokens in ahead(executor, steps)]
        other = arrival(2, prompt[::-1], 1, 64, PAGE)  # takes the pages that were left
        ahead(executor, [step(8, {2: 40}, arrivals=[other], left=[1], swap_out=out_pairs), step(9, {2: 1})])
        known = [*prompt, *said]
        again = arrival(1, known, 101, 52, PAGE, params=SEEDED, computed=len(known) - 1, incarnation=2)
        returning = step(10, {1: 1}, arrivals=[again], left=[2], swap_in=in_pairs)
        said += [tokens[1] for tokens in ahead(executor, [returning, *(step(11 + n, {1: 1}) for n in range(5))])]
        found.need(said == whole, f"{said} instead of {whole}")


def _history(expected: Sequence[Expected]) -> list[Step]:
    """Arrivals, chunks, decodes and departures of requests with all kinds of sampling."""
    prompts = [one.prompt for one in expected[-3:]]
    params = (SEEDED, GREEDY, PENALISED)

    def new(index: int) -> NewRequest:
        return arrival(index + 1, prompts[index], 1 + 40 * index, len(prompts[index]) + 20, PAGE, params=params[index])

    lengths = [len(prompt) for prompt in prompts]
    return [
        step(1, {1: lengths[0] - 5}, arrivals=[new(0)]),
        step(2, {1: 5, 2: lengths[1]}, arrivals=[new(1)]),
        step(3, {2: 1, 1: 1}),
        step(4, {1: 1, 2: 1, 3: lengths[2] - 60}, arrivals=[new(2)]),
        step(5, {3: 60, 2: 1, 1: 1}),
        *(step(6 + n, {1: 1, 2: 1, 3: 1}) for n in range(4)),
        step(10, {1: 1, 3: 1}, left=[2]),
        *(step(11 + n, {1: 1, 3: 1}) for n in range(3)),
    ]


def _depths(checks: Checks, loaded: Loaded) -> None:
    with checks.attempt("two steps under way say what one at a time says") as found:
        steps, said = _history(loaded.expected), []
        for depth in (1, 2, 2):
            executor = loaded.executor()
            said.append(ahead(executor, steps, depth))
            executor.clear()
        found.numbers["steps"] = len(steps)
        found.need(said[0] == said[1], "depth 2 differs from depth 1")
        found.need(said[1] == said[2], "depth 2 differs from itself")


def _no_waiting(checks: Checks, loaded: Loaded) -> None:
    """Last: from here on this device forbids waiting."""
    with checks.attempt("steady decode never waits unasked") as found:
        device, executor = loaded.setting.device, loaded.executor()
        prompt = loaded.expected[-1].prompt[:50]
        news = [arrival(n + 1, prompt, 1 + 8 * n, 110, PAGE, params=(GREEDY, SEEDED)[n % 2]) for n in range(8)]
        counts = {n + 1: 1 for n in range(8)}
        ahead(executor, [step(1, {n + 1: 50 for n in range(8)}, arrivals=news), *map(partial(_decode, counts), (2, 3))])
        device.forbid_waiting()
        try:
            ahead(executor, [_decode(counts, number) for number in range(4, 44)])
            swapping = step(44, counts, swap_out=[100, 1, 101, 2], swap_in=[102, 1])
            ahead(executor, [swapping, _decode(counts, 45)])
        finally:
            if loaded.setting.on_gpu:
                torch.cuda.set_sync_debug_mode("default")
        found.numbers["steps"] = 42


def _decode(counts: dict[int, int], number: int) -> Step:
    return step(number, counts)
