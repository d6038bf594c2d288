"""FlashInfer's two forms for tests on a CPU, and a device that watches its staging memory.

`reference`: our own copy of the wrappers' interface. `flashinfer`: the real package, whose Python runs as it is; only
its compiled modules are replaced by the stand-ins, pinned memory by plain memory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.cuda.device import Event, HostDevice
from runner.cuda.library import PINNED
from tests.runner import flashinfer_kernels as kernels
from tests.runner import flashinfer_reference

LIBRARIES = ["reference", "flashinfer"]


def real_flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The installed flashinfer over the stand-in kernels. Skips, with the reason, where it can't be imported."""
    try:
        module = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"flashinfer can't be imported: {error}")
    if module.__version__ != PINNED:
        pytest.skip(f"flashinfer {module.__version__} is installed, the runner is written for {PINNED}")
    made: dict[tuple[str, str], Callable[..., Any]] = {
        ("decode", "get_batch_decode_module"): kernels.DecodeModule,
        ("decode", "get_batch_prefill_module"): kernels.PrefillModule,
        ("prefill", "get_batch_prefill_module"): kernels.PrefillModule,
        ("page", "get_page_module"): kernels.PageModule,
        ("norm", "get_norm_module"): kernels.NormModule,
        ("rope", "get_rope_module"): kernels.RopeModule,
        ("activation", "get_act_and_mul_module"): lambda name: kernels.ActivationModule(),
        ("sampling", "get_sampling_module"): kernels.SamplingModule,
    }
    for (part, name), maker in made.items():
        monkeypatch.setattr(sys.modules[f"flashinfer.{part}"], name, maker)
    for part in ("decode", "prefill", "norm", "activation"):
        monkeypatch.setattr(sys.modules[f"flashinfer.{part}"], "device_support_pdl", lambda device: False)
    monkeypatch.setattr(sys.modules["flashinfer.norm"], "_USE_CUDA_NORM", True)
    empty = torch.empty

    def unpinned(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    return module


def library(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of LIBRARIES."""
    return flashinfer_reference if name == "reference" else real_flashinfer(monkeypatch)


class RewrittenError(AssertionError):
    """Staging memory was written although a copy that reads it may not have run."""


class _Fence:
    """An event that is reached only when somebody waits for it."""

    def __init__(self, read: list[tuple[Tensor, Tensor]]) -> None:
        self._read = read
        self.waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.check()
        self.waited = True

    def check(self) -> None:
        """The memory that was read from must be as it was when the event was recorded."""
        for buffer, before in () if self.waited else self._read:
            if not torch.equal(buffer, before):
                raise RewrittenError("a staging buffer was rewritten before its fence was waited for")


class WatchedDevice(HostDevice):
    """A device that is always behind. What was written to staging memory before an event must stay until it is waited
    for; `check` says so at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.fences: list[_Fence] = []

    def staging(self, count: int, dtype: torch.dtype) -> Tensor:
        buffer = super().staging(min(count, 1 << 16), dtype)  # large ones are never filled here
        self._buffers.append((buffer, buffer.clone()))
        return buffer

    def event(self) -> Event:
        changed = [index for index, (buffer, seen) in enumerate(self._buffers) if not torch.equal(buffer, seen)]
        for index in changed:
            buffer = self._buffers[index][0]
            self._buffers[index] = (buffer, buffer.clone())
        fence = _Fence([self._buffers[index] for index in changed])
        self.fences.append(fence)
        return fence

    def check(self) -> None:
        """RewrittenError if any fence that nobody waited for covers memory that has changed."""
        for fence in self.fences:
            fence.check()
