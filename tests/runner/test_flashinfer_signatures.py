"""Our calls against the real flashinfer: signatures, and that planning directly leaves a wrapper as its `plan` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.attention.flashinfer import FlashInferAttention, PlanLimits
from runner.cuda.device import HostDevice
from runner.cuda.library import PINNED, load_flashinfer
from runner.cuda.ops import FlashInferOps
from runner.cuda.sampling import sample_on_device
from runner.kernels.build import KernelError
from tests.runner import flashinfer_kernels as kernels
from tests.runner import flashinfer_reference as reference
from tests.runner.flashinfer_kit import real_flashinfer
from tests.runner.test_attention_paged import MIXED, Case
from tests.runner.test_flashinfer_sampling import columns, on_device

DECODES = [(15, 1), (40, 1), (7, 1)]
NOT_READ = {
    "_cached_module",  # the same compiled module, or one like it
    "_max_q_len",  # these are for other backends than fa2: cudnn, trtllm-gen
    "_max_kv_len",
    "_kv_lens_buffer",
    "_seq_lens_kv",
    "_seq_lens_q",
    "_workspace_size",  # of the same workspace
    "_pin_memory_int_workspace_buffer",  # each plan's own
}


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    return real_flashinfer(monkeypatch)


def made(module: Any, case: Case, **options: Any) -> FlashInferAttention:
    limits = PlanLimits(rows=16, tokens=256, pages=512)
    given = {"limits": limits, "device": HostDevice(), "graph_rows": 4, "module": module, **options}
    return FlashInferAttention([case.pool], *case.heads, 0.125, **given)


def every_call() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What the runner calls, from running all of it over the reference."""
    reference.CALLS.clear()
    for dtype, tensor_cores in ((torch.bfloat16, True), (torch.float16, False)):
        case = Case(MIXED, dtype)
        attention = made(reference, case, tensor_cores=tensor_cores)
        attention.plan(case.meta)
        attention.run(0, case.q, case.k, case.v)
        step = Case(DECODES, dtype, seed=1)
        graph = attention.for_graph(3)
        graph.plan(step.meta)
        graph.run(0, step.q, step.k, step.v)
        case.pool = torch.zeros_like(case.pool).to(torch.float8_e4m3fn)
        small = made(reference, case, q_dtype=dtype, kv_scales=(0.1, 0.2))
        small.plan(case.meta)
        small.run(0, case.q, case.k, case.v)
        ops = FlashInferOps(dtype, reference)
        ops.rms_norm(torch.ones(2, 64, dtype=dtype), torch.ones(64, dtype=dtype), 1e-5)
        ops.head_norm(case.q, torch.ones(64, dtype=dtype), 1e-5)
        ops.silu_and_mul(torch.ones(2, 64, dtype=dtype))
        ops.rope(case.q, case.k, torch.arange(len(case.q)), torch.ones(256, 64))
    asked = columns(temperature=[1.0], top_k=[4], top_p=[0.5], min_p=[0.1])
    sample_on_device(torch.randn(1, 20), asked, on_device(asked), 20, reference.sampling)
    return list(reference.CALLS)


def resolve(module: Any, path: str) -> Callable[..., Any]:
    for name in path.split("."):
        module = getattr(module, name)
    return module  # type: ignore[no-any-return]


def test_every_call_binds_to_the_real_signature(real: Any) -> None:
    calls = every_call()
    for name, args, kwargs in calls:
        inspect.signature(resolve(real, name)).bind(*args, **kwargs)
    public = {name for name, value in vars(reference).items() if getattr(value, "__module__", "") == reference.__name__}
    called = {name.split(".")[0] for name, _, _ in calls}
    assert called == {name for name in public if not name.startswith("_")}, "the reference has what nobody calls"


@pytest.mark.parametrize("name", sorted({name for name, _, _ in every_call()}))
def test_the_references_signatures_are_the_real_ones_or_their_beginning(name: str, real: Any) -> None:
    ours = inspect.signature(resolve(reference, name)).parameters
    theirs = inspect.signature(resolve(real, name)).parameters
    positional = [key for key, value in theirs.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    mine = [key for key, value in ours.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    assert mine == positional[: len(mine)]
    rest = {key: value.kind for key, value in ours.items() if key not in mine}
    assert rest.items() <= {key: value.kind for key, value in theirs.items()}.items()
    for key, value in ours.items():
        assert value.default == theirs[key].default, key


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_planning_directly_leaves_a_wrapper_as_its_own_plan_does(
    real: Any, tensor_cores: bool, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[tuple[Any, ...]] = []
    for module in (kernels.DecodeModule, kernels.PrefillModule):
        plan = module.plan
        monkeypatch.setattr(module, "plan", lambda self, *args, plan=plan: (passed.append(args), plan(self, *args))[1])
    rows = DECODES if graph else MIXED
    first, second = Case(rows[:2], torch.bfloat16), Case(rows, torch.bfloat16, seed=2)

    def wrappers(*steps: Case) -> list[dict[str, Any]]:
        attention = made(real, second, tensor_cores=tensor_cores)
        backend: Any = attention.for_graph(4) if graph else attention
        for step in steps:
            passed.clear()
            backend.plan(step.meta)
        used = [backend._kernel] if graph else [attention._decode, attention._prefill]
        return [vars(kernel._wrapper) for kernel in used]

    own, own_passed = wrappers(second), list(passed)
    direct, direct_passed = wrappers(first, Case(MIXED if not graph else DECODES, torch.bfloat16), second), list(passed)
    assert len(own_passed) == len(direct_passed) == len(own)
    for one, other in zip(own_passed, direct_passed, strict=True):
        assert len(one) == len(other)
        assert all(equal(a, b) for a, b in zip(one[3:], other[3:], strict=True)), "the planner gets other arguments"
    # Without tensor cores nobody reads which queries are whose: they are in order.
    unread = NOT_READ if tensor_cores or graph else {*NOT_READ, "_qo_indptr_buf"}
    for number, (one, other) in enumerate(zip(own, direct, strict=True)):
        assert one.keys() == other.keys()
        ignored = unread if number == 0 else NOT_READ
        assert [key for key in one if key not in ignored and not _same(key, one, other)] == []


def _same(key: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = one[key], other[key]
    if isinstance(a, Tensor) and "workspace" in key:
        return bool(a.shape == b.shape and a.dtype == b.dtype)  # filled by planning; compared through what it was given
    return equal(a, b)


def test_the_library_that_is_installed_is_the_one_this_is_written_for(real: Any) -> None:
    assert load_flashinfer() is real and reference.__version__ == PINNED


def test_a_library_that_cannot_be_imported_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("runner.cuda.library.importlib.import_module", missing)
    with pytest.raises(KernelError, match=r"No module named 'flashinfer'.*triptych\[gpu\]"):
        load_flashinfer()
