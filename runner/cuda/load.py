"""From settings to an executor on a GPU: load, measure what a step needs, give the rest of the memory to KV pages.

Memory is measured, not estimated: the largest legal step runs once with a pool just large enough for it, and what it
took at most beside the pool is kept free. So is what recorded graphs take, by what the first ones took.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.columns import pack_i32, pack_u64
from protocol.messages import Limits, NewRequest, SamplingParams, Step
from runner.attention.base import AttentionError
from runner.attention.flashinfer import FlashInferAttention, PlanLimits
from runner.config import RunnerConfig
from runner.cuda.device import CudaDevice, Device
from runner.cuda.executor import DEPTH, DeviceExecutor
from runner.cuda.graphs import DecodeGraphs, buckets_up_to
from runner.cuda.library import load_flashinfer
from runner.cuda.ops import FlashInferOps
from runner.cuda.pages import DevicePages
from runner.errors import StartError
from runner.grammar.engine import Grammars
from runner.kernels.build import KernelError
from runner.loader import LoadedModel, ModelError, default_cache_dir, load_model
from runner.parallel.team import ALONE, Team
from runner.pool import GIB, PoolSize, pool_size
from runner.quantize import quantized
from runner.sizing import limits_of, needs_of, vocab_of, warm_up

log = logging.getLogger("triptych.runner")

FILTERED = SamplingParams(max_tokens=2, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=1)


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes executors over one loaded model, with pools of any size. `module`: flashinfer, or what stands in for it."""

    config: RunnerConfig
    model: LoadedModel
    device: Device
    module: Any
    team: Team = ALONE
    grammars: Grammars | None = None

    def build(self, size: PoolSize, buckets: list[int]) -> DeviceExecutor:
        """An executor with this pool that records graphs for these numbers of decode rows."""
        config, shape, limits = self.config, self.model.config, self.limits(size)
        pages = DevicePages(shape, size.num_blocks, config.block_size, self.kv_dtype, self.device, size.host_blocks)
        rows = limits.max_num_seqs
        attention = FlashInferAttention(
            *(pages.layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale),
            limits=PlanLimits(rows, limits.max_num_batched_tokens, self._most_pages(size)),
            device=self.device,
            depth=DEPTH + 1,
            q_dtype=self.model.dtype,
            graph_rows=max(buckets, default=0),
            module=self.module,
        )
        graphs = DecodeGraphs(self.device, self.model.decoder, attention.for_graph, buckets) if buckets else None
        return DeviceExecutor(
            *(self.model, attention, pages, limits, self.device),
            graphs=graphs,
            kernels=self.module.sampling,
            weight_bytes=self.model.weight_bytes,
            team=self.team,
            grammars=self.grammars,
        )

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the pages."""
        return torch.float8_e4m3fn if self.config.kv_cache_dtype == "fp8_e4m3" else self.model.dtype

    def limits(self, size: PoolSize) -> Limits:
        """What the scheduler is told of such an executor."""
        return limits_of(self.config, self.model, size, self.kv_dtype)

    def _most_pages(self, size: PoolSize) -> int:
        """Page references of one step at most: rows may share pages, but none is longer than a request may be."""
        longest = -(-size.max_model_len // self.config.block_size)
        return self.config.max_num_seqs * longest

    def pool(self) -> PoolSize:
        """The pool for what memory is left. StartError, with numbers, if nothing is."""
        needs = needs_of(self.config, self.model, self.kv_dtype)
        if self.config.num_blocks_override or self.config.kv_cache_memory_bytes:
            return pool_size(self.config, needs, 0)
        return pool_size(self.config, needs, *self._measure())

    def _measure(self) -> tuple[int, str]:
        """Bytes for pages, and how they came about."""
        free, total = self.device.memory()
        taken = total - free
        step, graphs = self._step_bytes(), self._graph_bytes()
        allowed = int(total * self.config.gpu_memory_utilization)
        left = allowed - taken - step - graphs
        origin = (
            f"gpu_memory_utilization {self.config.gpu_memory_utilization:g} of {total / GIB:.2f} GiB, less "
            f"{taken / GIB:.2f} taken by weights and others, {step / GIB:.2f} for the largest step, "
            f"{graphs / GIB:.2f} for graphs"
        )
        log.info("%.2f GiB for KV pages: %s", left / GIB, origin)
        return max(left, 0), origin

    def _smallest(self) -> PoolSize:
        """Just enough pages for the largest step: each row may end within a page."""
        config = self.config
        longest = min(config.max_model_len or self.model.config.max_context, self.model.decoder.max_positions)
        blocks = -(-config.step_tokens // config.block_size) + config.max_num_seqs + 1
        return PoolSize(blocks, longest, 0)

    def _step_bytes(self) -> int:
        """What the largest step takes beside weights and pages: as many tokens as are allowed, in as many rows, all of
        which sample with every filter."""
        executor = self.build(self._smallest(), [])
        peak = self.device.peak(partial(run_largest, executor))
        del executor
        gc.collect()
        return peak

    def _graph_bytes(self) -> int:
        """What the graphs will take: the largest, and for each further one what the second took."""
        buckets = buckets_of(self.config)
        if not buckets:
            return 0
        base = self._taken_with([])
        first, both = self._taken_with(buckets[-1:]) - base, self._taken_with(buckets[-2:]) - base
        return max(0, first) + max(0, both - first) * (len(buckets) - 1)

    def _taken_with(self, buckets: list[int]) -> int:
        executor = self.build(self._smallest(), buckets)
        free, total = self.device.memory()
        del executor
        gc.collect()
        return total - free


def buckets_of(config: RunnerConfig) -> list[int]:
    """For how many decode rows graphs are recorded."""
    return [] if config.enforce_eager else buckets_up_to(config.max_num_seqs)


def run_largest(executor: DeviceExecutor) -> None:
    """The largest legal step, of requests that sample with every filter and are told of their prompts, and forget it.
    StartError if it fails."""
    limits = executor.limits
    params = msgspec.structs.replace(FILTERED, prompt_logprobs=limits.max_logprobs)
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    lengths = [limits.max_num_batched_tokens // rows] * rows
    lengths[0] += limits.max_num_batched_tokens - sum(lengths)
    lengths = [min(length, limits.max_model_len) for length in lengths]
    page, arrivals = 1, []
    for request, length in enumerate(lengths):
        count = -(-length // limits.block_size)
        pages = pack_i32(list(range(page, page + count)))
        arrivals.append(NewRequest(request, 0, pack_i32([1] * length), length, 0, pages, params))
        page += count
    step = Step(0, 0, pack_u64(list(range(rows))), pack_i32(lengths), new=arrivals)
    failure = executor.execute(step, time.monotonic_ns()).failure
    executor.clear()
    if failure is not None:
        raise StartError(
            f"the largest step ({limits.max_num_batched_tokens} tokens in {rows} rows) can't be computed: "
            f"{failure.message}. Lower max_num_batched_tokens or max_num_seqs"
        )


def load_device_executor(config: RunnerConfig, team: Team = ALONE) -> DeviceExecutor:
    """Load the model, or this rank's part of it, onto the GPU, size and make the pool, record the graphs. StartError
    says what to change."""
    if not torch.cuda.is_available():
        raise StartError("device cuda: torch sees no GPU here; use device cpu")
    if not config.model:
        raise StartError("model is not set: it takes a GGUF file or a Hugging Face directory")
    began = time.monotonic()
    log.info("loading %s", config.model)
    try:
        module = load_flashinfer()
        device = CudaDevice(torch.cuda.current_device())
        model = team.agreed(
            lambda: load_model(
                Path(config.model),
                config.dtype,
                lambda dtype: quantized(FlashInferOps(dtype, module), config.quantization, device.torch),
                max_model_len=config.max_model_len or None,
                device=device.torch,
                cache_dir=default_cache_dir(),
                peers=team.peers,
            )
        )
        grammars = Grammars.of_model(Path(config.model), vocab_of(model), soon=team.leads)
        builder = Builder(config, model, device, module, team, grammars)
        size = team.least(builder.pool, device.memory()[0])
        team.same(builder.limits(size))
        executor = builder.build(size, buckets_of(config))
    except (ModelError, KernelError, AttentionError) as error:
        raise StartError(f"{config.model}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise StartError(f"{config.model} doesn't fit the GPU: {error}") from error
    warm_up(executor)
    log.info("loaded in %.1f s", time.monotonic() - began)
    if config.forbid_waiting:
        device.forbid_waiting()
    return executor
