"""What a runner says when it can't start."""

from __future__ import annotations


class StartError(Exception):
    """The runner can't serve with these settings on this machine; the message has the numbers and what to change."""
