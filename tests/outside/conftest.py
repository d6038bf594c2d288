"""What every outside client gets: the servers' addresses, and a way to put its version and numbers on record."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable

import pytest
from place import KEY, Place


@pytest.fixture(scope="session")
def server() -> Place:
    """The real model, open to all."""
    return Place(int(os.environ["CONFORMANCE_PORT"]))


@pytest.fixture(scope="session")
def narrow() -> Place:
    """A simulated model that wants a key, runs one request at a time and lets one wait: for refusals and retries."""
    return Place(int(os.environ["CONFORMANCE_NARROW_PORT"]), KEY)


@pytest.fixture(scope="session")
def exact() -> Place:
    """The real model's weights in bfloat16, computed in float32."""
    return Place(int(os.environ["CONFORMANCE_EXACT_PORT"]))


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """`note(text)` puts a line about this test into the recorded result."""
    return lambda text: record_property("note", text)


@pytest.fixture(scope="module", autouse=True)
def _version(request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]) -> None:
    """Record the version of each package that the test file names in `CLIENTS`, and our commit."""
    record_testsuite_property("commit", os.environ.get("CONFORMANCE_REVISION", ""))
    for package in getattr(request.module, "CLIENTS", ()):
        record_testsuite_property("client", f"{package} {importlib.metadata.version(package)}")
