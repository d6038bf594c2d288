"""What an executor asks of its fellow ranks while it is made and while it computes. One rank alone asks nobody.

Settings, sizes and limits must be the same on all ranks; whatever one of them can't do, none does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from protocol.messages import Limits
from runner.batch import Batch, Int64s, StepError
from runner.errors import StartError
from runner.kernels.build import KernelError
from runner.model.decoder import Peers
from runner.model.errors import ModelError
from runner.parallel.group import Group
from runner.pool import PoolSize
from runner.steps import Sampled

log = logging.getLogger("triptych.runner")

T = TypeVar("T")

OTHER_RANK = "other_rank"
"""Failure of a step whose sampling failed on the first rank, as the others see it."""
_NONE = -1
"""In place of the token of a row that fails alone."""
_SAMPLED, _FAILED = 0, 1


class Samples(Protocol):
    """What turns logits into tokens: a `Sampler`."""

    def sample(self, logits: Tensor, batch: Batch, slots: Int64s) -> Sampled: ...


class Team(Protocol):
    """The ranks of a runner, from one rank's point of view. All make the same calls in the same order."""

    @property
    def peers(self) -> Peers | None:
        """With whom the decoder is split."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this is the rank that samples."""
        ...

    def agreed(self, make: Callable[[], T]) -> T:
        """What `make` returns. If it raises on any rank, all raise: StartError names the rank."""
        ...

    def memory(self, available: int) -> int:
        """The part of this host's available bytes that is this rank's to count on."""
        ...

    def least(self, make: Callable[[], PoolSize], available: int) -> PoolSize:
        """The pool that every rank can hold. StartError with the numbers of the rank that has the least `available`
        bytes of those for which `make` raises it."""
        ...

    def same(self, limits: Limits) -> None:
        """StartError unless all ranks have these limits: they were started with different settings."""
        ...

    def sampler(self, sampler: Samples) -> Samples:
        """One that gives every rank the first one's tokens."""
        ...

    def from_first(self, make: Callable[[], Tensor], count: int, device: torch.device) -> Tensor:
        """What `make` returns on the first rank, int64 [count], in order with the work of `device`. Others don't make
        it: they have only a part of the logits."""
        ...

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Around what ranks compute together. An error here on one rank alone ends the runner, since the others go on
        in a step that it has left; one that all know of passes."""
        ...


class Alone:
    """A team of one."""

    peers: Peers | None = None
    leads = True

    def agreed(self, make: Callable[[], T]) -> T:
        return make()

    def memory(self, available: int) -> int:
        return available

    def least(self, make: Callable[[], PoolSize], available: int) -> PoolSize:
        return make()

    def same(self, limits: Limits) -> None:
        pass

    def sampler(self, sampler: Samples) -> Samples:
        return sampler

    def from_first(self, make: Callable[[], Tensor], count: int, device: torch.device) -> Tensor:
        return make()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


ALONE = Alone()


class _Offer(msgspec.Struct):
    """What one rank can hold, or why it can't."""

    available: int
    size: PoolSize | None = None
    refusal: str = ""


class AgreedStartError(StartError):
    """Every rank knows of it."""


class SharedFailure(Exception):
    """Every rank knows of `error`: the step fails, the runner goes on."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Ranks:
    """A team over a `Group`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.peers: Peers | None = group
        self.leads = group.is_first

    def agreed(self, make: Callable[[], T]) -> T:
        error: Exception | None = None
        try:
            value = make()
        except Exception as raised:
            error = raised
            if not isinstance(raised, ModelError | KernelError | StartError):
                log.exception("not foreseen")
        texts = self._group.exchange(f"{type(error).__name__}: {error}".encode() if error is not None else b"")
        for rank, text in enumerate(texts):
            if text:
                raise AgreedStartError(f"rank {rank}: {text.decode()}") from error
        return value

    def memory(self, available: int) -> int:
        return available // self._group.place.local_size if self._group.device.type == "cpu" else available

    def least(self, make: Callable[[], PoolSize], available: int) -> PoolSize:
        offer = _Offer(available)
        try:
            offer.size = make()
        except StartError as error:
            offer.refusal = str(error)
        offers = [msgspec.json.decode(one, type=_Offer) for one in self._group.exchange(msgspec.json.encode(offer))]
        if refusals := [(one.available, rank, one.refusal) for rank, one in enumerate(offers) if one.refusal]:
            _, rank, refusal = min(refusals)
            raise AgreedStartError(f"rank {rank}: {refusal}")
        sizes = [one.size for one in offers if one.size is not None]
        return PoolSize(
            num_blocks=min(size.num_blocks for size in sizes),
            max_model_len=min(size.max_model_len for size in sizes),
            host_blocks=min(size.host_blocks for size in sizes),
        )

    def same(self, limits: Limits) -> None:
        everyone = [msgspec.json.decode(one, type=Limits) for one in self._group.exchange(msgspec.json.encode(limits))]
        for rank, other in enumerate(everyone):
            for name in Limits.__struct_fields__:
                value, expected = getattr(other, name), getattr(everyone[0], name)
                if value != expected:
                    numbers = f"{name} {value!r} on rank {rank}, {expected!r} on rank 0"
                    raise AgreedStartError(f"the ranks were started with different settings: {numbers}")

    def sampler(self, sampler: Samples) -> Samples:
        return _FirstSamples(self._group, sampler) if self._group.is_first else _OthersLearn(self._group)

    def from_first(self, make: Callable[[], Tensor], count: int, device: torch.device) -> Tensor:
        mine = make() if self._group.is_first else torch.empty(count, dtype=torch.int64, device=device)
        return self._group.share(mine)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        try:
            yield
        except SharedFailure as failure:
            raise failure.error from failure
        except Exception as error:
            self._group.lose(f"a step failed on rank {self._group.place.rank}: {type(error).__name__}: {error}")
            raise


class _FirstSamples:
    """Samples, and tells the others: [outcome, token, token, …] int32."""

    def __init__(self, group: Group, sampler: Samples) -> None:
        self._group = group
        self._sampler = sampler

    def sample(self, logits: Tensor, batch: Batch, slots: Int64s) -> Sampled:
        outcome = torch.zeros(1 + len(slots), dtype=torch.int32)
        try:
            sampled = self._sampler.sample(logits, batch, slots)
        except Exception as error:
            outcome[0] = _FAILED
            self._group.share(outcome)
            raise SharedFailure(error) from error
        outcome[1:] = torch.from_numpy(np.asarray(sampled.tokens, np.int32))
        outcome[1:][list(sampled.bad)] = _NONE
        self._group.share(outcome)
        return sampled


class _OthersLearn:
    """Takes the first rank's tokens. Nobody reads what this rank would say of a row, so log-probabilities are left out
    and errors have no text."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def sample(self, logits: Tensor, batch: Batch, slots: Int64s) -> Sampled:
        outcome = self._group.share(torch.empty(1 + len(slots), dtype=torch.int32))
        if int(outcome[0]) == _FAILED:
            raise SharedFailure(StepError(OTHER_RANK, "sampling failed on rank 0"))
        tokens = outcome[1:].numpy()
        bad = {int(row): (OTHER_RANK, "see rank 0") for row in np.flatnonzero(tokens == _NONE)}
        return Sampled(tokens, bad=bad)
