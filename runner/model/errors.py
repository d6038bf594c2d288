"""The one exception of the model boundary: a checkpoint that can't be served, and why."""

from __future__ import annotations


class ModelError(Exception):
    """A model can't be loaded. `code` is for machines, the message names what was found and what was wanted.

    Codes: `bad_config`, `unsupported_architecture`, `unsupported_rope`, `unsupported_format`, `missing_file`,
    `damaged_file`, `missing_tensor`, `unexpected_tensor`, `wrong_shape`, `duplicate_tensor`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
