"""Running servers for the end-to-end tests: started once for each file that uses them, real processes, real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Server, running_server


@pytest.fixture(scope="module")
def exact() -> Iterator[Server]:
    """The real model in float32, where outputs must be equal bit for bit, with a pool that is soon full."""
    flags = ("--dtype", "float32", "--num-blocks-override", "49", "--max-model-len", "640", "--num-threads", "1")
    with running_server(*flags) as server:
        yield server


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """The real model as `make serve` runs it, on one thread: tests run beside each other."""
    with running_server("--num-threads", "1") as server:
        yield server


@pytest.fixture(scope="module")
def simulated() -> Iterator[Server]:
    """The simulated model: 2 ms a step, text of 50,000 tokens if nobody stops it."""
    with running_server("--backend", "sim", "--sim-step-ms", "2", "--sim-max-model-len", "50000") as server:
        yield server
