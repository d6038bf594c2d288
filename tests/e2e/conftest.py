"""Running servers for the end-to-end tests: started once a session, real processes, real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Server, running_server


@pytest.fixture(scope="session")
def exact() -> Iterator[Server]:
    """The real model in float32, where outputs must be equal bit for bit, with a pool that is soon full."""
    with running_server("--dtype", "float32", "--num-blocks-override", "49", "--max-model-len", "640") as server:
        yield server


@pytest.fixture(scope="session")
def served() -> Iterator[Server]:
    """The real model as `make serve` runs it."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def simulated() -> Iterator[Server]:
    """The simulated model: 2 ms a step, text of 50,000 tokens if nobody stops it."""
    with running_server("--backend", "sim", "--sim-step-ms", "2", "--sim-max-model-len", "50000") as server:
        yield server
