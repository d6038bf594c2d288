"""What every phase is given: a device, FlashInfer, the pack, and what earlier phases measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.gpu.report import Skipped
from runner.cuda.device import Device


@dataclass(frozen=True, slots=True)
class Setting:
    """`module` is flashinfer, or what stands in for it on a CPU. `given`: numbers of earlier phases, by name."""

    device: Device
    module: Any
    pack: Path
    given: Mapping[str, float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real thing."""
        return self.device.torch.type == "cuda"

    def kernels_for(self, part: str) -> None:
        """Skipped unless a compiled attention kernel whose name has this part is there (on a CPU, all are)."""
        if not self.on_gpu:
            return
        from ops.gpu.unpack import compiled_modules

        if not any(part in name for name in compiled_modules()):
            raise Skipped(f"no compiled kernel has {part} in its name")
