"""Where FlashInfer comes from. It is imported when a GPU runner starts, never before: that alone takes seconds."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from runner.kernels.build import KernelError

log = logging.getLogger(__name__)

PINNED = "0.6.14"
"""The release whose wrappers this code knows inside, see runner/attention/flashinfer_wrappers.py."""


def load_flashinfer() -> Any:
    """The flashinfer package. KernelError, saying what to install, if it can't be imported."""
    # Without this it prefers norms that it compiles at run time where nvidia-cutlass-dsl happens to be installed.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        module = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelError(f"flashinfer can't be imported ({error}); install triptych[gpu]") from error
    if module.__version__ != PINNED:
        log.warning("flashinfer %s: this is tested with %s, and plans more slowly", module.__version__, PINNED)
    return module
