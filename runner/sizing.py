"""What the scheduler is told of a loaded model, what the pool must know of it, and first steps that prove it works."""

from __future__ import annotations

import time

import torch

from protocol.columns import pack_i32, pack_u64
from protocol.messages import Limits, NewRequest, SamplingParams, Step
from runner.config import RunnerConfig
from runner.errors import StartError
from runner.executor import Executor
from runner.kv import block_bytes
from runner.loader import LoadedModel
from runner.pool import ModelNeeds, PoolSize

MAX_LOGPROBS = 20
_WARM_UP_TOKENS = 32


def vocab_of(model: LoadedModel) -> int:
    """Ids that may be sampled: those of the tokenizer, never of a padded head."""
    return min(model.vocab_size, model.tokenizer_vocab_size or model.vocab_size)


def limits_of(config: RunnerConfig, model: LoadedModel, size: PoolSize, kv_dtype: torch.dtype) -> Limits:
    """What the scheduler may count on."""
    vocab = vocab_of(model)
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
        kv_bytes_per_block=block_bytes(model.config, config.block_size, kv_dtype),
        max_logprobs=min(MAX_LOGPROBS, vocab),
        host_blocks=size.host_blocks,
    )


def needs_of(config: RunnerConfig, model: LoadedModel, kv_dtype: torch.dtype) -> ModelNeeds:
    """What sizing must know of the model, whose pages are of `kv_dtype`."""
    shape = model.config
    return ModelNeeds(
        block_bytes=block_bytes(shape, config.block_size, kv_dtype),
        max_context=shape.max_context,
        vocab_width=shape.vocab_size,
        widest_layer=2 * shape.intermediate_size,
        dtype_bytes=model.dtype.itemsize,
    )


def warm_up(executor: Executor) -> None:
    """Run a short prefill and a decode, so that whatever is slow or broken at first use shows before anyone connects.

    StartError if the model can't compute, or computes numbers that are not finite.
    """
    limits = executor.limits
    length = min(_WARM_UP_TOKENS, limits.max_model_len - 1, limits.max_num_batched_tokens)
    pages = range(1, 2 + length // limits.block_size)
    request = NewRequest(
        *(0, 0, pack_i32([position % limits.vocab_size for position in range(length)]), length, 0),
        *(pack_i32(list(pages)), SamplingParams(2, 1.0, logprobs=limits.max_logprobs, prompt_logprobs=0)),
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
