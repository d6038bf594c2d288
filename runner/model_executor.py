"""The executor that computes: decoder, attention over KV pages, sampler, around the common step transaction."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from protocol.columns import pack_i32, pack_u64
from protocol.messages import FetchKv, KvStatus, Limits, NewRequest, SamplingParams, Step, StepResult
from runner.attention.base import AttentionBackend
from runner.batch import Rows, StepError
from runner.config import RunnerConfig
from runner.errands import Answer, Errand, unable
from runner.errors import StartError
from runner.executor import Executor
from runner.kernels.build import KernelError
from runner.kernels.select import select_attention, select_ops
from runner.kv import KvPool, block_bytes
from runner.loader import LoadedModel, ModelError, default_cache_dir, load_model
from runner.metadata import build, check
from runner.model.parameters import fused_shapes, layout
from runner.pool import ModelNeeds, PoolSize, available_memory, pool_size
from runner.sampler import Sampler
from runner.steps import DEVICE_ERROR, OUT_OF_MEMORY, Sampled, StepMachine, StepSize, swap_pairs

log = logging.getLogger("triptych.runner")

MAX_LOGPROBS = 20
NO_MEMORY = "can't allocate memory"
"""What torch's CPU allocator says in a plain RuntimeError."""
_WARM_UP_TOKENS = 32


class ModelExecutor:
    """An `Executor` over a loaded model. One thread calls it; torch uses as many as it was given."""

    def __init__(
        self, model: LoadedModel, attention: AttentionBackend, pool: KvPool, limits: Limits, weight_bytes: int = 0
    ) -> None:
        self.limits = limits
        self.weight_bytes = weight_bytes
        self._decoder = model.decoder
        self._attention = attention
        self._pool = pool
        self._machine = StepMachine(limits)
        self._sampler = Sampler(limits.vocab_size)
        self.inventory = self._machine.inventory
        self._copy_ns = 0

    @property
    def num_residents(self) -> int:
        """Requests in the batch."""
        return len(self._machine.batch)

    @property
    def step_size(self) -> StepSize:
        """Of the step that ran last."""
        return self._machine.size

    def clear(self) -> None:
        """Forget all residents; pages and inventory stay."""
        self._machine.clear()

    def execute(self, step: Step, received_ns: int) -> StepResult:
        """Run one step."""
        self._copy_ns = 0
        with torch.inference_mode():
            result = self._machine.run(step, self._compute)
        return msgspec.structs.replace(result, copy_ns=self._copy_ns) if self._copy_ns else result

    def answer(self, errand: Errand) -> Answer | None:
        """Neither grammars nor KV sources are part of this executor."""
        return unable(errand)

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        """Nothing will arrive, but the pages have changed hands."""
        self._machine.transfer(order, status)

    def _compute(self, step: Step, rows: Rows) -> Sampled:
        """The step's tokens. StepError if memory or the device fails: the next step may well run."""
        try:
            return self._forward(step, rows)
        except torch.OutOfMemoryError as error:
            raise StepError(OUT_OF_MEMORY, str(error)) from error
        except torch.AcceleratorError as error:
            raise StepError(DEVICE_ERROR, str(error)) from error
        except RuntimeError as error:
            if NO_MEMORY in str(error):
                raise StepError(OUT_OF_MEMORY, str(error)) from error
            raise

    def _forward(self, step: Step, rows: Rows) -> Sampled:
        if step.swap_out or step.swap_in:
            self._swap(step)
        if len(rows) == 0:
            return Sampled(np.zeros(0, np.int32))
        batch, size = self._machine.batch, self.limits.block_size
        widest = -(-int((rows.starts + rows.counts).max()) // size)
        meta = build(batch.page_table[rows.slots, :widest], rows.starts, rows.counts, size)
        check(meta, size, self.limits.num_blocks)  # a kernel would leave its pages without a word
        token_rows = np.repeat(rows.slots, rows.counts)
        token_ids = torch.from_numpy(batch.tokens[token_rows, meta.positions].astype(np.int64))
        self._attention.plan(meta)
        hidden = self._decoder.forward(token_ids, torch.from_numpy(meta.positions), self._attention)
        last = meta.qo_indptr[1:][rows.samples].astype(np.int64) - 1
        if len(last) == 0:
            return Sampled(np.zeros(0, np.int32))
        logits = self._decoder.logits(hidden[torch.from_numpy(last)])
        return self._sampler.sample(logits, batch, rows.slots[rows.samples])

    def _swap(self, step: Step) -> None:
        """Out before anything is written (the pages may have new owners already), in before anything is read."""
        began = time.monotonic_ns()
        self._pool.swap_out(swap_pairs(step.swap_out))
        self._pool.swap_in(swap_pairs(step.swap_in))
        self._copy_ns = time.monotonic_ns() - began


def load_executor(config: RunnerConfig) -> ModelExecutor:
    """Load the model, size and make the pool. StartError, saying what to change, if that can't be done."""
    if config.device == "cuda":
        why = "attention and page copies for it are not part of this build" if torch.cuda.is_available() else "no GPU"
        raise StartError(f"device cuda: {why}; use device cpu")
    if not config.model:
        raise StartError("model is not set: it takes a GGUF file or a Hugging Face directory")
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    choice = config.attention_backend
    began = time.monotonic()
    log.info("loading %s", config.model)
    try:
        model = load_model(
            Path(config.model),
            config.dtype,
            lambda dtype: select_ops(dtype, "cpu", choice),  # type: ignore[arg-type]  # checked by the settings
            max_model_len=config.max_model_len or None,
            cache_dir=default_cache_dir(),
        )
        available = available_memory()
        size = pool_size(config, _needs(model, config), available)
        pool = KvPool(model.config, size.num_blocks, config.block_size, model.dtype, size.host_blocks)
        attention = select_attention(
            *(pool.layers, model.config.num_heads, model.config.num_kv_heads, model.config.head_dim),
            *(model.config.attention_scale, choice),  # type: ignore[arg-type]
        )
    except (ModelError, KernelError) as error:
        raise StartError(f"{config.model}: {error}") from error
    log.info("loaded in %.1f s, %.2f GiB available for KV and work", time.monotonic() - began, available / 2**30)
    executor = ModelExecutor(model, attention, pool, _limits(config, model, size), _weight_bytes(model))
    warm_up(executor)
    return executor


def warm_up(executor: Executor) -> None:
    """Run a short prefill and a decode, so that whatever is slow or broken at first use shows before anyone connects.

    StartError if the model can't compute, or computes numbers that are not finite.
    """
    limits = executor.limits
    length = min(_WARM_UP_TOKENS, limits.max_model_len - 1, limits.max_num_batched_tokens)
    pages = range(1, 2 + length // limits.block_size)
    request = NewRequest(
        *(0, 0, pack_i32([position % limits.vocab_size for position in range(length)]), length, 0),
        *(pack_i32(list(pages)), SamplingParams(max_tokens=2, temperature=1.0, logprobs=limits.max_logprobs)),
    )
    for step in (
        Step(0, 0, pack_u64([0]), pack_i32([length]), new=[request]),
        Step(0, 1, pack_u64([0]), pack_i32([1])),
    ):
        result = executor.execute(step, time.monotonic_ns())
        if result.failure is not None:
            raise StartError(f"the model can't compute: {result.failure.message}")
        if result.errors:
            raise StartError(
                f"the model can't compute in {limits.dtype}: {result.errors[0].message}; try another dtype"
            )
    executor.clear()


def _weight_bytes(model: LoadedModel) -> int:
    shapes = fused_shapes(layout(model.config)).values()
    return sum(math.prod(shape) for shape in shapes) * model.dtype.itemsize


def _needs(model: LoadedModel, config: RunnerConfig) -> ModelNeeds:
    shape = model.config
    return ModelNeeds(
        block_bytes=block_bytes(shape, config.block_size, model.dtype),
        max_context=shape.max_context,
        vocab_width=shape.vocab_size,
        widest_layer=2 * shape.intermediate_size,
        dtype_bytes=model.dtype.itemsize,
    )


def _limits(config: RunnerConfig, model: LoadedModel, size: PoolSize) -> Limits:
    vocab = min(model.vocab_size, model.tokenizer_vocab_size or model.vocab_size)
    return Limits(
        model=config.served_model_name,
        block_size=config.block_size,
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        vocab_size=vocab,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens,
        eos_token_ids=model.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_bytes_per_block=block_bytes(model.config, config.block_size, model.dtype),
        max_logprobs=min(MAX_LOGPROBS, vocab),
        host_blocks=size.host_blocks,
    )
