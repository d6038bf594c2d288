"""Steps on a device that computes while the host goes on: launched as soon as they come, collected when they are done.

The next step is taken in and launched while this one runs. It needs nothing from it that goes through the host: the
batch counts a launched step as computed, and the tokens that it samples are fed to the next on the device. A step that
samples with penalties, edits of the logits, a grammar or log-probabilities needs all earlier tokens on the host: it
waits for them, and is done when `launch` returns. Log-probabilities of prompts need no token, and make nobody wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from protocol.messages import CompileGrammar, FetchKv, KvStatus, Limits, PromptLogprobs, Step, StepResult
from runner.attention.base import AttentionBackend
from runner.batch import Int64s, StepError
from runner.cuda.device import Device, Event, Mark
from runner.cuda.feeding import Inputs, Ring, StepColumns, TokenFeed, most_numbers
from runner.cuda.graphs import DecodeGraphs
from runner.cuda.pages import DevicePages
from runner.cuda.sampling import SamplingColumns, sample_on_device, stays_on_device
from runner.errands import Answer, Errand, Promise, unable
from runner.faults import as_step_error
from runner.grammar.engine import Grammars
from runner.grammar.masks import Masks
from runner.loader import LoadedModel
from runner.metadata import BatchMetadata, build, check
from runner.parallel.team import ALONE, Team
from runner.prompt_table import tabulate
from runner.prompts import Told, told_by
from runner.sampler import NOT_FINITE, Sampler
from runner.steps import DEVICE_ERROR, Begun, Sampled, StepMachine, StepSize, swap_pairs

DEPTH = 2
"""Steps under way at a time: the one that runs, and the one that follows it without a gap."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """What a step tells of prompts: host memory int32, as `tabulate` makes it, that is filled when it is `there`."""

    told: Told
    table: Tensor
    there: Event

    def messages(self) -> list[PromptLogprobs]:
        """Waits for it."""
        self.there.synchronize()
        return self.told.messages(self.table.numpy().reshape(len(self.told.where), -1))


@dataclass(slots=True, eq=False)
class Launched:
    """A step under way. `result` is there once it is settled."""

    step: Step
    size: StepSize
    begun: Begun | None = None
    done: Event | None = None
    """When the step has ended and its tokens are on the host."""
    tokens: Tensor | None = None
    """Host memory int64 [2 S]: the tokens, then whether their logits were finite."""
    prompts: Prompts | None = None
    copied: tuple[Mark, Mark] | None = None
    """Before and after its swaps."""
    result: StepResult | None = None

    @property
    def ready(self) -> bool:
        """Whether to collect it takes no waiting."""
        return self.result is not None or self.done is None or self.done.query()


class DeviceExecutor:
    """A `PipelinedExecutor` over a model on `device`. One thread calls it.

    Without `graphs` every step is eager; `kernels`: `flashinfer.sampling`, or None to sample with torch alone.
    """

    depth = DEPTH

    def __init__(
        self,
        model: LoadedModel,
        attention: AttentionBackend,
        pages: DevicePages,
        limits: Limits,
        device: Device,
        *,
        graphs: DecodeGraphs | None = None,
        kernels: Any = None,
        weight_bytes: int = 0,
        team: Team = ALONE,
        grammars: Grammars | None = None,
    ) -> None:
        self.limits = limits
        self.weight_bytes = weight_bytes
        self._decoder = model.decoder
        self._attention = attention
        self._pages = pages
        self._device = device
        self._kernels = kernels
        self._graphs = graphs
        self._machine = StepMachine(limits)
        self.inventory = self._machine.inventory
        self._team = team
        self._grammars = grammars
        masks = Masks(grammars, limits.vocab_size) if grammars is not None else None
        self._host_sampler = team.sampler(Sampler(limits.vocab_size, masks))
        rows = limits.max_num_seqs
        self._feed = TokenFeed(device, rows)
        self._inputs = Inputs(device, DEPTH + 1, most_numbers(limits))
        self._outputs = Ring(device, DEPTH + 1, 2 * rows)
        self._unsettled: deque[Launched] = deque()
        self._size = StepSize()
        self.lost = False
        """Whether the device has failed: nothing can be computed on it by this process any more."""

    @property
    def pages(self) -> DevicePages:
        """The KV pages that steps read and write."""
        return self._pages

    @property
    def num_residents(self) -> int:
        """Requests in the batch."""
        return len(self._machine.batch)

    @property
    def step_size(self) -> StepSize:
        """Of the step that was collected last."""
        return self._size

    def clear(self) -> None:
        """Forget all residents; pages and inventory stay."""
        self._settle_all()
        self._machine.clear()

    def answer(self, errand: Errand) -> Answer | Promise | None:
        """Grammars are compiled meanwhile; KV sources are no part of this executor."""
        if isinstance(errand, CompileGrammar) and self._grammars is not None:
            return self._grammars.answer(errand)
        return unable(errand)

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        """Nothing will arrive, but the pages have changed hands."""
        self._machine.transfer(order, status)

    def execute(self, step: Step, received_ns: int) -> StepResult:
        """Run one step to its end."""
        return self.collect(self.launch(step, received_ns))

    def launch(self, step: Step, received_ns: int) -> Launched:
        """Issue a step's work. Never raises; a step that can't be run has its result at once, after all before it."""
        machine, begun = self._machine, None
        launched = Launched(step, StepSize())
        try:
            begun = machine.begin(step)
            launched.size = machine.size
            with torch.inference_mode(), self._team.computing():
                sampled = self._compute(launched, begun)
        except Exception as error:
            self._settle_all()
            launched.result = self._failed(step, error)
            return launched
        machine.proceed(begun)
        if sampled is not None:
            launched.result = self._timed(machine.settle(begun, sampled), launched)
        else:
            launched.begun = begun
            self._unsettled.append(launched)
        return launched

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step's end. Steps are settled in the order of their launches."""
        while launched.result is None:
            self._settle(self._unsettled.popleft())
        self._size = launched.size
        return launched.result

    def _settle_all(self) -> None:
        while self._unsettled:
            self._settle(self._unsettled.popleft())

    def _settle(self, launched: Launched) -> None:
        assert launched.begun is not None and launched.done is not None
        try:
            with self._device.may_wait(), self._team.computing():
                launched.done.synchronize()
                sampled = self._sampled(launched, len(launched.begun.slots))
        except RuntimeError as error:
            if launched.tokens is not None:
                self._outputs.give_back(launched.tokens, launched.done)
            launched.result = self._failed(launched.step, error, launched.begun)
            return
        launched.result = self._timed(self._machine.settle(launched.begun, sampled), launched)

    @staticmethod
    def _timed(result: StepResult, launched: Launched) -> StepResult:
        """With what the device took for the step's swaps."""
        if launched.copied is None:
            return result
        began, ended = launched.copied
        ended.synchronize()  # what goes out may be on its way still when the step has ended
        return msgspec.structs.replace(result, copy_ns=int(began.elapsed_time(ended) * 1e6))

    def _sampled(self, launched: Launched, count: int) -> Sampled:
        prompts = launched.prompts.messages() if launched.prompts is not None else []
        if launched.tokens is None:
            return Sampled(np.zeros(0, np.int32), prompts=prompts)
        host = launched.tokens.numpy()
        broken = np.flatnonzero(host[count : 2 * count] == 0).tolist()
        sampled = Sampled(host[:count].astype(np.int32), bad=dict.fromkeys(broken, NOT_FINITE), prompts=prompts)
        self._outputs.give_back(launched.tokens, launched.done)
        launched.tokens = None
        return sampled

    def _failed(self, step: Step, error: Exception, begun: Begun | None = None) -> StepResult:
        known = as_step_error(error)
        self.lost |= isinstance(known, StepError) and known.code == DEVICE_ERROR
        return self._machine.fail(step, known, begun)

    def _compute(self, launched: Launched, begun: Begun) -> Sampled | None:
        """Issue the step's work. What it sampled, if that had to be waited for."""
        step, rows, batch = begun.step, begun.rows, self._machine.batch
        if step.swap_out or step.swap_in:
            began = self._device.mark()
            self._pages.swap_out(swap_pairs(step.swap_out))
            self._pages.swap_in(swap_pairs(step.swap_in))
            with self._device.beside():  # where the copies run
                launched.copied = began, self._device.mark()
        if len(rows) == 0:
            launched.done = self._device.event()
            return None
        size = self.limits.block_size
        widest = -(-int((rows.starts + rows.counts).max()) // size)
        meta = build(batch.page_table[rows.slots, :widest], rows.starts, rows.counts, size)
        check(meta, size, self.limits.num_blocks)  # a kernel would leave its pages without a word
        columns = StepColumns.of(batch, self._feed, rows, meta)
        sampling = SamplingColumns.of(batch.params, columns.slots, batch.num_tokens[columns.slots])
        told = told_by(batch, rows)
        asked = () if told is None else (told.where, told.targets)
        sent = self._inputs.send([*columns, *asked, *sampling.arrays])
        inputs, sent = StepColumns(*sent[: len(columns)]), sent[len(columns) :]
        self._feed.fill(inputs.token_ids, inputs.fed_where, inputs.fed_slots)
        if told is None:
            logits = self._logits(meta, inputs)
        else:
            hidden = self._hidden(meta, inputs)
            launched.prompts = self._tell_prompts(told, hidden, *sent[:2])
            logits = self._last_logits(hidden, inputs)
        sent = sent[len(asked) :]
        if logits is None:
            launched.done = self._device.event()
            return None
        if not stays_on_device(batch.params, columns.slots).all():
            sampled = self._sample_on_host(logits, columns.slots, inputs.slots)
            if launched.prompts is None:
                return sampled
            with self._device.may_wait():
                return replace(sampled, prompts=launched.prompts.messages())
        vocab = self.limits.vocab_size

        def sample() -> Tensor:
            tokens, finite = sample_on_device(logits, sampling, sent, vocab, self._kernels)
            return torch.cat((tokens, finite.to(torch.int64)))

        count = len(columns.slots)
        both = self._team.from_first(sample, 2 * count, self._device.torch)
        self._feed.remember(batch, columns.slots, inputs.slots, both[:count])
        launched.tokens = self._outputs.take()
        launched.done = self._device.copy_out(both, launched.tokens[: len(both)])
        return None

    def _logits(self, meta: BatchMetadata, inputs: StepColumns) -> Tensor | None:
        """float32 [S, V] of the rows that sample; None if none does."""
        if self._graphs is not None and meta.num_tokens == meta.num_rows and self._graphs.takes(meta.num_rows):
            logits = self._graphs.run(meta, inputs.token_ids, inputs.positions)
            return logits if len(inputs.last) == len(logits) else logits[inputs.last] if len(inputs.last) else None
        return self._last_logits(self._hidden(meta, inputs), inputs)

    def _hidden(self, meta: BatchMetadata, inputs: StepColumns) -> Tensor:
        self._attention.plan(meta)
        return self._decoder.forward(inputs.token_ids, inputs.positions, self._attention)

    def _last_logits(self, hidden: Tensor, inputs: StepColumns) -> Tensor | None:
        return self._decoder.logits(hidden.index_select(0, inputs.last)) if len(inputs.last) else None

    def _tell_prompts(self, told: Told, hidden: Tensor, where: Tensor, targets: Tensor) -> Prompts | None:
        """Issue what tells of prompts, and its way to the host; None on ranks that don't have the logits."""
        leads, vocab = self._team.leads, self.limits.vocab_size
        table = tabulate(self._decoder.logits, hidden, where, targets, told.most, vocab, leads=leads)
        if not leads:
            return None
        host = self._device.staging(table.numel(), torch.int32)
        return Prompts(told, host, self._device.copy_out(table.flatten(), host))

    def _sample_on_host(self, logits: Tensor, slots: Int64s, index: Tensor) -> Sampled:
        """For what needs all earlier tokens on the host, or more than a token back."""
        batch = self._machine.batch
        self._settle_all()
        with self._device.may_wait():
            sampled = self._host_sampler.sample(logits, batch, slots)
            tokens = torch.from_numpy(sampled.tokens.astype(np.int64)).to(self._device.torch)
        self._feed.remember(batch, slots, index, tokens)
        return sampled
