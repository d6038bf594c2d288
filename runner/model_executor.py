"""The executor that computes: decoder, attention over KV pages, sampler, around the common step transaction."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from protocol.messages import CompileGrammar, FetchKv, KvStatus, Limits, PromptLogprobs, Step, StepResult
from runner.attention.base import AttentionBackend
from runner.batch import Rows
from runner.config import RunnerConfig
from runner.errands import Answer, Errand, Promise, unable
from runner.errors import StartError
from runner.faults import as_step_error
from runner.grammar.engine import Grammars
from runner.grammar.masks import Masks
from runner.kernels.build import KernelError
from runner.kernels.select import select_attention, select_ops
from runner.kv import KvPool
from runner.loader import LoadedModel, ModelError, default_cache_dir, load_model
from runner.metadata import build, check
from runner.parallel.team import ALONE, Team
from runner.pool import available_memory, pool_size
from runner.prompt_table import tabulate
from runner.prompts import told_by
from runner.quantize import quantized
from runner.sampler import Sampler
from runner.sizing import limits_of, needs_of, warm_up
from runner.steps import Sampled, StepMachine, StepSize, swap_pairs

log = logging.getLogger("triptych.runner")


class ModelExecutor:
    """An `Executor` over a loaded model. One thread calls it; torch uses as many as it was given."""

    def __init__(
        self,
        model: LoadedModel,
        attention: AttentionBackend,
        pool: KvPool,
        limits: Limits,
        weight_bytes: int = 0,
        team: Team = ALONE,
        grammars: Grammars | None = None,
    ) -> None:
        self.limits = limits
        self.weight_bytes = weight_bytes
        self._grammars = grammars
        self._decoder = model.decoder
        self._attention = attention
        self._pool = pool
        self._machine = StepMachine(limits)
        self._team = team
        masks = Masks(grammars, limits.vocab_size) if grammars is not None else None
        self._sampler = team.sampler(Sampler(limits.vocab_size, masks))
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

    def answer(self, errand: Errand) -> Answer | Promise | None:
        """Grammars are compiled meanwhile; KV sources are no part of this executor."""
        if isinstance(errand, CompileGrammar) and self._grammars is not None:
            return self._grammars.answer(errand)
        return unable(errand)

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        """Nothing will arrive, but the pages have changed hands."""
        self._machine.transfer(order, status)

    def _compute(self, step: Step, rows: Rows) -> Sampled:
        """The step's tokens. StepError if memory or the device fails: the next step may well run."""
        try:
            with self._team.computing():
                return self._forward(step, rows)
        except RuntimeError as error:
            raise as_step_error(error) from error

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
        prompts = self._tell_prompts(hidden, rows)
        last = meta.qo_indptr[1:][rows.samples].astype(np.int64) - 1
        if len(last) == 0:
            return Sampled(np.zeros(0, np.int32), prompts=prompts)
        logits = self._decoder.logits(hidden[torch.from_numpy(last)])
        sampled = self._sampler.sample(logits, batch, rows.slots[rows.samples])
        return replace(sampled, prompts=prompts) if prompts else sampled

    def _tell_prompts(self, hidden: Tensor, rows: Rows) -> list[PromptLogprobs]:
        """What the hidden states of all tokens of a step say of the prompts that are asked about."""
        told, leads = told_by(self._machine.batch, rows), self._team.leads
        if told is None:
            return []
        index = (torch.from_numpy(told.where), torch.from_numpy(told.targets))
        table = tabulate(self._decoder.logits, hidden, *index, told.most, self.limits.vocab_size, leads=leads)
        return told.messages(table.numpy()) if leads else []

    def _swap(self, step: Step) -> None:
        """Out before anything is written (the pages may have new owners already), in before anything is read."""
        began = time.monotonic_ns()
        self._pool.swap_out(swap_pairs(step.swap_out))
        self._pool.swap_in(swap_pairs(step.swap_in))
        self._copy_ns = time.monotonic_ns() - began


def load_executor(config: RunnerConfig, team: Team = ALONE) -> ModelExecutor:
    """Load the model, or this rank's part of it, size and make the pool. StartError, saying what to change, if that
    can't be done."""
    if not config.model:
        raise StartError("model is not set: it takes a GGUF file or a Hugging Face directory")
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    choice = config.attention_backend
    began = time.monotonic()
    log.info("loading %s", config.model)
    try:
        model = team.agreed(
            lambda: load_model(
                Path(config.model),
                config.dtype,
                lambda dtype: quantized(select_ops(dtype, "cpu", choice), config.quantization, "cpu"),  # type: ignore[arg-type]
                max_model_len=config.max_model_len or None,
                cache_dir=default_cache_dir(),
                peers=team.peers,
            )
        )
        available = team.memory(available_memory())
        size = team.least(lambda: pool_size(config, needs_of(config, model, model.dtype), available), available)
        pool = KvPool(model.config, size.num_blocks, config.block_size, model.dtype, size.host_blocks)
        attention = select_attention(
            *(pool.layers, model.config.num_heads, model.config.num_kv_heads, model.config.head_dim),
            *(model.config.attention_scale, choice),  # type: ignore[arg-type]
        )
    except (ModelError, KernelError) as error:
        raise StartError(f"{config.model}: {error}") from error
    log.info("loaded in %.1f s, %.2f GiB available for KV and work", time.monotonic() - began, available / 2**30)
    limits = limits_of(config, model, size, model.dtype)
    team.same(limits)
    grammars = Grammars.of_model(Path(config.model), limits.vocab_size, soon=team.leads)
    executor = ModelExecutor(model, attention, pool, limits, model.weight_bytes, team, grammars)
    warm_up(executor)
    return executor
