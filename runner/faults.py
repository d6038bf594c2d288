"""What torch raises when a step can't be computed, as the protocol names it."""

from __future__ import annotations

import torch

from runner.batch import StepError
from runner.steps import DEVICE_ERROR, OUT_OF_MEMORY

NO_MEMORY = "can't allocate memory"
"""What torch's CPU allocator says in a plain RuntimeError."""


def as_step_error(error: Exception) -> Exception:
    """The StepError that stands for a lack of memory or a fault of the device; any other error as it is."""
    if isinstance(error, torch.OutOfMemoryError):
        return StepError(OUT_OF_MEMORY, str(error))
    if isinstance(error, torch.AcceleratorError):
        return StepError(DEVICE_ERROR, str(error))
    if isinstance(error, RuntimeError) and NO_MEMORY in str(error):
        return StepError(OUT_OF_MEMORY, str(error))
    return error
