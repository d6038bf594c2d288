"""The GPU check's phases over a stand-in for FlashInfer: right where it is right, and failing where it is broken.

Whether the real kernels are right, and how fast they are, is what the command itself is for.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ops import gpu_check
from ops.gpu import ceilings, kernels, loop, model, operations, roofline, speed, truncated, unpack
from ops.gpu.report import FAILED, MEASURED, MET, MISSED, OK, SKIPPED, table
from ops.gpu.setting import Setting
from runner.cuda.device import HostDevice
from tests.ops.gpu_kit import Collected, setting_of
from tests.runner import flashinfer_kernels
from tests.runner import flashinfer_reference as reference
from tests.runner.flashinfer_kit import LIBRARIES, library

LENGTHS, DECODES = (17, 65, 70), 6


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=LIBRARIES)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our copy of FlashInfer's interface, and FlashInfer's own Python; beneath both are kernels in plain torch."""
    return library(request.param, monkeypatch)


def test_attention_of_the_stand_in_is_right(module: Any) -> None:
    checks = Collected()
    kernels.run(checks, setting_of(module=module), kernels.SMALL)
    assert set(checks.outcomes().values()) == {OK}, table(checks.results)
    assert len(checks.results) == 11 and checks.of("prefill in chunks").numbers["error"] > 0


@pytest.mark.parametrize(
    ("name", "broken", "seen"),
    [
        ("attend", "scaled", {"borders, pages of 16", "decode on CUDA cores", "recorded decode with padded rows"}),
        ("append", "elsewhere", {"only this step's slots are written"}),
        ("attend", "stale", {"unwritten slots don't matter"}),
    ],
)
def test_attention_that_is_wrong_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: str, seen: set[str]
) -> None:
    """The checks must be able to fail: kernels that scale wrongly, write elsewhere, or read slots nobody wrote."""
    attend, append = flashinfer_kernels.attend, flashinfer_kernels.PageModule.append_paged_kv_cache

    def scaled(*args: Any, **more: Any) -> None:
        attend(*args, **{**more, "sm_scale": more["sm_scale"] * 1.1})

    def stale(*args: Any, **more: Any) -> None:
        attend(*args, **more)
        args[7].add_(float(args[2].double().sum()) * 0)  # NaN in any slot, owned or not, reaches the output

    def elsewhere(*args: Any, **more: Any) -> None:
        append(*args, **more)
        args[5][-1] = 0.0

    if name == "append":
        monkeypatch.setattr(flashinfer_kernels.PageModule, "append_paged_kv_cache", elsewhere)
    else:
        monkeypatch.setattr(flashinfer_kernels, "attend", {"scaled": scaled, "stale": stale}[broken])
    checks = Collected()
    kernels.run(checks, setting_of(), kernels.SMALL)
    assert seen <= {result.name for result in checks.results if result.outcome == FAILED}, table(checks.results)


def test_operations_and_sampling_of_the_stand_in_are_right(module: Any) -> None:
    checks = Collected()
    operations.run(checks, setting_of(module=module), operations.SMALL)
    assert set(checks.outcomes().values()) == {OK}, table(checks.results)
    assert checks.of("tokens with FlashInfer's thresholds, as on the CPU").numbers["wrong"] == 0


def test_a_sampler_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = flashinfer_kernels.SamplingModule.top_k_mask_logits

    def one_too_few(self: Any, logits: Any, top_k: Any, *more: Any) -> Any:
        return mask(self, logits, (top_k - 1).clamp(min=1), *more)

    monkeypatch.setattr(flashinfer_kernels.SamplingModule, "top_k_mask_logits", one_too_few)
    monkeypatch.setattr(operations, "device_uniforms", lambda *columns: columns[0].double())
    checks = Collected()
    operations.run(checks, setting_of(), operations.SMALL)
    failed = [result.name for result in checks.results if result.outcome == FAILED]
    assert failed == ["random numbers, bit for bit", "thresholds of top-k and top-p"]


@pytest.fixture(scope="module")
def small_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack's model, with fewer layers and prompts."""
    from ops.models import DEFAULT_MODEL, resolve_model

    folder, source = tmp_path_factory.mktemp("pack"), resolve_model(DEFAULT_MODEL)
    truncated.truncate(source, folder / unpack.MODEL, layers=2, vocabulary=4096)
    asked = truncated.prompts(source, 4096, LENGTHS)
    found = list(truncated.expectations(folder / unpack.MODEL, asked, DECODES))
    truncated.save(folder / unpack.EXPECTED, found)
    return folder


def test_what_the_cpu_says_is_kept_with_the_model(small_pack: Path) -> None:
    found = truncated.load(small_pack / unpack.EXPECTED)
    assert [len(one.prompt) for one in found] == list(LENGTHS)
    for one in found:
        assert len(one.tokens) == len(one.margins) == len(one.logits) == DECODES + 1
        assert one.ids[:, 0].tolist() == one.tokens, "the largest logit is the first of those kept"
        assert 0 < one.noise < 1 and sum(one.clear) > 0


def test_the_real_model_s_checks_hold_over_the_stand_in(small_pack: Path, module: Any) -> None:
    checks = Collected()
    model.run(checks, setting_of(small_pack, module))
    pool = checks.outcomes().pop("the pool is measured")
    assert pool == SKIPPED, "there is no GPU memory here"
    others = {name: outcome for name, outcome in checks.outcomes().items() if name != "the pool is measured"}
    assert set(others.values()) == {OK} and len(others) == 8 + len(LENGTHS), table(checks.results)
    assert checks.of("recorded logits are the launched ones").numbers["bitwise"] == 1


def test_a_model_that_computes_something_else_is_seen(small_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = flashinfer_kernels.RopeModule.apply_rope_pos_ids_cos_sin_cache

    def one_further(
        self: Any, q: Any, k: Any, q_rope: Any, k_rope: Any, table: Any, positions: Any, *more: Any
    ) -> None:
        rope(self, q, k, q_rope, k_rope, table, positions // 2, *more)

    monkeypatch.setattr(flashinfer_kernels.RopeModule, "apply_rope_pos_ids_cos_sin_cache", one_further)
    checks = Collected()
    model.run(checks, setting_of(small_pack))
    failed = {result.name for result in checks.results if result.outcome == FAILED}
    assert f"logits, prompt of {LENGTHS[1]}" in failed, table(checks.results)


def test_without_a_pack_the_model_phase_says_what_to_make(tmp_path: Path) -> None:
    checks = Collected()
    model.run(checks, setting_of(tmp_path))
    assert [result.outcome for result in checks.results] == [FAILED]
    assert checks.results[0].detail == f"{tmp_path / unpack.MODEL} isn't there: make gpu-pack"


def test_ceilings_are_bytes_and_products_over_the_device_s_time() -> None:
    class Clocked(HostDevice):
        """Every run takes 2 ms."""

        def mark(self) -> Any:
            return Namespace(elapsed_time=lambda end: 2.0, synchronize=lambda: None)

    checks = Collected()
    ceilings.run(checks, Setting(Clocked(), reference, Path()), size=1 << 20, side=64)
    memory, matrix = checks.of("memory bandwidth").numbers, checks.of("matrix rate").numbers
    assert memory["bytes_per_s"] == pytest.approx(2 * (1 << 20) / 2e-3)
    assert memory["read_TB_per_s"] == pytest.approx((1 << 20) / 2e-3 / 1e12)
    assert matrix["flops_per_s"] == pytest.approx(2 * 64**3 / 2e-3)


def test_speed_is_told_for_every_point_that_fits_and_judged_from_64_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"ceilings.bytes_per_s": 1e9, "ceilings.flops_per_s": 1e9}
    monkeypatch.setattr(speed, "DECODE_GOAL_FROM", 3)
    monkeypatch.setattr(speed.Speed, "decode_seconds", lambda self, executor, batch, context: batch * 1e-3)
    checks = Collected()
    speed.run(checks, Setting(HostDevice(), reference, Path(), given), speed.SMALL)
    outcomes = checks.outcomes()
    assert outcomes["decode 1 × 32, of the bandwidth"] == MEASURED
    assert outcomes["decode 3 × 48, of the bandwidth"] in (MET, MISSED)
    assert not any("4096" in name for name in outcomes), "3 rows of 4,096 tokens don't fit 1 MiB"
    assert checks.of("decode 3 × 48, step").numbers["tokens_per_s"] == pytest.approx(1000)
    middle = 48 + speed.SMALL.warm_up + speed.SMALL.steps // 2
    fraction = roofline.decode_bytes(speed.SMALL.shape, 3, middle) / 1e9 / 3e-3
    assert checks.of("decode 3 × 48, of the bandwidth").numbers["fraction"] == pytest.approx(fraction)


def test_steps_of_a_random_model_are_timed_on_the_runner_s_executor() -> None:
    checks = Collected()
    speed.run(checks, setting_of(), speed.SMALL)
    assert list(checks.outcomes()) == ["random model", "decode 1 × 32, step", "decode 3 × 48, step", "prefill 32, step"]
    assert set(checks.outcomes().values()) == {OK}, table(checks.results)


def test_points_without_time_are_skipped() -> None:
    checks = Collected(budget_s=0.0)
    speed.run(checks, setting_of(), speed.SMALL)
    assert checks.outcomes() == {
        "random model": OK,
        "decode 1 × 32, step": SKIPPED,
        "decode 3 × 48, step": SKIPPED,
        "prefill 32, step": SKIPPED,
    }


def test_the_real_scheduler_drives_the_timed_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes, a tiny random model, steps that are replayed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    root = Path(gpu_check.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'tests'}")
    checks = Collected(budget_s=250)
    loop.run(checks, setting_of(), replace(loop.SMALL, start_s=200.0))
    assert checks.of("scheduler and runner serve").outcome == OK, table(checks.results)
    idle = checks.of("device idle, 3 streams")
    assert idle.outcome in (MET, MISSED)
    assert idle.numbers["steps"] >= 20 and idle.numbers["period_ms"] * 1e3 > idle.numbers["launch_us"] > 0
