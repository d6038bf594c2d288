"""Checks that keep their results, over a stand-in for FlashInfer on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ops.gpu.report import Checks, Result
from ops.gpu.setting import Setting
from runner.cuda.device import HostDevice
from tests.runner import flashinfer_reference as reference


class Collected(Checks):
    """Checks that keep their results."""

    def __init__(self, phase: str = "phase", **more: Any) -> None:
        self.results: list[Result] = []
        super().__init__(phase, self.results.append, **more)

    def of(self, name: str) -> Result:
        """The one result of this name."""
        (found,) = (result for result in self.results if result.name == name)
        return found

    def outcomes(self) -> dict[str, str]:
        """name -> outcome."""
        return {result.name: result.outcome for result in self.results}


def setting_of(path: Path = Path("/nowhere"), module: Any = reference) -> Setting:
    """A phase's setting without a GPU; `path`: the pack."""
    return Setting(HostDevice(), module, path)
