"""What a rank that is not the first is told at its start, as JSON on its standard input."""

from __future__ import annotations

import msgspec

from runner.config import RunnerConfig
from runner.parallel.place import Place


class Assignment(msgspec.Struct, frozen=True):
    """Its settings, its place, and where it meets the others: an inherited descriptor, or a store over TCP.

    It ends with the process `parent`.
    """

    config: RunnerConfig
    place: Place
    parent: int
    store_fd: int = -1
    store_host: str = ""
    store_port: int = 0


def encode(assignment: Assignment) -> bytes:
    """For the standard input."""
    return msgspec.json.encode(assignment)


def decode(text: bytes) -> Assignment:
    """What `encode` made. msgspec.ValidationError for anything else."""
    return msgspec.json.decode(text, type=Assignment)
