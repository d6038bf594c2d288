"""The cost formulas: worked figures of Llama-3-8B, slow twins that count one token at a time, and the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.costs import main
from scheduler import costs
from scheduler.costs import NAMED_SHAPES, ModelShape, PrefillCost

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
LLAMA = NAMED_SHAPES["llama-3-8b"]
TINY = ModelShape(layers=3, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=12, vocab=20)
OWN_SHAPE = [
    "--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--head-dim", "128",
    "--intermediate", "14336", "--vocab", "128256",
]  # fmt: skip


def test_the_worked_memory_figures_of_llama_3_8b() -> None:
    assert costs.kv_bytes_per_token(LLAMA) == 131_072
    assert costs.pool_blocks(LLAMA, 40 * GIB, 16) == 20_480
    assert costs.pool_blocks(LLAMA, 40 * GIB, 16) * 16 == 327_680


def test_the_worked_prefill_of_llama_3_8b_is_two_flops_per_parameter_and_causal_attention() -> None:
    assert costs.weight_flops(LLAMA, 8192) == 2 * 8_000_000_000 * 8192
    assert costs.attention_flops(LLAMA, 8192) == 2 * 8192**2 * 4096 * 32
    assert costs.prefill_flops(LLAMA, 8192) / 1e12 == pytest.approx(148.7, abs=0.05)


def test_other_ways_to_count_give_other_figures() -> None:
    counted = replace(LLAMA, stated_parameters=0)
    layers_only = replace(LLAMA, stated_parameters=costs.layer_parameters(LLAMA))
    assert costs.prefill_flops(counted, 8192) / 1e12 == pytest.approx(149.2, abs=0.05)
    assert costs.prefill_flops(layers_only, 8192) / 1e12 == pytest.approx(131.9, abs=0.05)


@pytest.mark.parametrize(
    ("gb_per_s", "tflops"),
    [(64, 400), (25, 156)],
    ids=["PCIe 5.0 x16 beside an H100 at 40 %", "PCIe 4.0 x16 in practice beside an A100 at 50 %"],
)
def test_llama_3_8b_ties_at_about_91_percent_survival(gb_per_s: float, tflops: float) -> None:
    swap = costs.swap_seconds(LLAMA, 8192, 16, gb_per_s * 1e9)
    prefill = costs.prefill_at_flops(LLAMA, 8192, tflops * 1e12)
    assert costs.tie_fraction(PrefillCost(prefill.cold), swap) == pytest.approx(0.910, abs=0.0005)
    assert costs.tie_fraction(prefill, swap) == pytest.approx(0.919, abs=0.0005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.55),
        ("llama-2-7b", 6.738),
        ("mistral-7b", 7.242),
        ("qwen3-8b", 8.191),
        ("smollm2-135m", 0.1345),
    ],
)
def test_parameters_counted_from_a_shape_are_those_of_the_published_weights(name: str, billions: float) -> None:
    assert costs.count_parameters(NAMED_SHAPES[name]) / 1e9 == pytest.approx(billions, rel=5e-4)


def test_parameters_are_the_stated_ones_or_else_counted() -> None:
    assert LLAMA.parameters == 8_000_000_000
    assert TINY.parameters == costs.count_parameters(TINY)
    assert costs.count_parameters(replace(TINY, tied_embeddings=True)) == TINY.parameters - 8 * 20


@given(st.integers(0, 40), st.integers(0, 40))
def test_attention_is_half_a_step_less_than_what_each_new_token_sees(cached: int, tokens: int) -> None:
    """A slow twin: the new token at position p attends to p tokens before it and half of itself."""
    per_pair = 4 * TINY.heads * TINY.head_dim * TINY.layers
    slow = sum(per_pair * (position + 0.5) for position in range(cached, cached + tokens))
    assert costs.attention_flops(TINY, tokens, cached) == slow


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_prefix_and_its_rest_cost_what_the_whole_costs(cached: int, tokens: int) -> None:
    parts = costs.prefill_flops(LLAMA, cached) + costs.prefill_flops(LLAMA, tokens, cached)
    assert parts == costs.prefill_flops(LLAMA, cached + tokens)


@given(st.integers(1, 20_000), st.data())
def test_seconds_after_a_surviving_prefix_are_its_flops_at_the_rate(tokens: int, data: st.DataObject) -> None:
    cached = data.draw(st.integers(0, tokens))
    prefill = costs.prefill_at_flops(LLAMA, tokens, 1e12)
    expected = costs.prefill_flops(LLAMA, tokens - cached, cached) / 1e12
    assert prefill.after(cached / tokens) == pytest.approx(expected, rel=1e-9, abs=1e-9)


seconds = st.floats(1e-6, 1e3)


@given(seconds, st.one_of(st.just(0.0), seconds), seconds)
def test_at_the_tie_the_rest_takes_as_long_as_the_swap(linear: float, triangular: float, swap: float) -> None:
    prefill = PrefillCost(linear, triangular)
    tie = costs.tie_fraction(prefill, swap)
    if swap >= prefill.cold:
        assert tie == 0.0
        return
    assert 0 <= tie <= 1
    assert math.isclose(prefill.after(tie), swap, rel_tol=1e-6, abs_tol=1e-9 * prefill.cold)


def test_copies_move_whole_blocks_both_ways() -> None:
    one_block = 16 * costs.kv_bytes_per_token(TINY)
    assert costs.copy_seconds(TINY, 1, 16, 1.0) == one_block
    assert costs.copy_seconds(TINY, 17, 16, 1.0) == 2 * one_block
    assert costs.swap_seconds(TINY, 17, 16, 1.0) == 4 * one_block


def test_a_token_rate_costs_the_same_at_every_position() -> None:
    prefill = costs.prefill_at_tokens(8192, 4096.0)
    assert (prefill.cold, prefill.after(0.5), prefill.after(1.0)) == (2.0, 1.0, 0.0)


@pytest.mark.parametrize("change", [{"layers": 0}, {"kv_heads": 3}, {"stated_parameters": -1}, {"dtype_bytes": 0}])
def test_a_shape_that_no_model_has_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        replace(TINY, **change)


# --- the command --------------------------------------------------------------------------------------------------


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_command_prints_the_worked_figures_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    table = capsys.readouterr().out
    for figure in ("131,072 B", "20,480 blocks = 327,680 tokens", "148.7 TFLOP", "91.0 %"):
        assert figure in table


def test_a_shape_of_ones_own_is_counted_and_a_parameter_count_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    counted = report_of(capsys, *OWN_SHAPE)
    assert (counted["model"], counted["parameters"]) == ("own shape", 8_029_995_008)
    stated = report_of(capsys, *OWN_SHAPE, "--params", "8e9")
    named = report_of(capsys, "--model", "Llama-3-8B")
    assert {**stated, "model": named["model"]} == named


def test_the_element_size_scales_what_a_token_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "--dtype-bytes", "1")
    assert (report["kv_bytes_per_token"], report["pool_blocks"]) == (65_536, 40_960)


def test_a_real_model_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "--model", "smollm2-135m-instruct", "--tokens-per-s", "1000", "--context", "500")
    assert report["shape"] == {
        "layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536, "vocab": 49_152,
        "dtype_bytes": 2, "tied_embeddings": True, "stated_parameters": 0,
    }  # fmt: skip
    assert report["cold_seconds"] == 0.5
    assert report["context_blocks"] == 32


def test_a_hugging_face_directory_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128_256,
                "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            }
        )
    )  # fmt: skip
    assert report_of(capsys, "--model", str(tmp_path))["kv_bytes_per_token"] == 131_072


def test_a_context_that_needs_the_null_page_too_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_of(capsys, "--kv-memory", "1", "--context", "8176")["fits"] is True
    assert report_of(capsys, "--kv-memory", "1", "--context", "8177")["fits"] is False


def test_recompute_that_always_wins_has_no_tie(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--link", "0.1"]) == 0
    assert "recompute is quicker even when nothing survives" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--layers", "2", "--hidden", "8"], "also needs --heads, --kv-heads"),
        (["--model", "llama-3-8b", "--layers", "2"], "--model and --layers exclude each other"),
        (["--model", "no-such-model"], "'no-such-model'"),
        ([*OWN_SHAPE, "--kv-heads", "7"], "32 query heads can't share 7"),
    ],
)
def test_a_model_that_can_not_be_told_is_a_usage_error(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--link", "inf"], ["--link", "0"], ["--tflops", "1", "--tokens-per-s", "1"]])
def test_rates_are_finite_positive_and_given_once(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_a_named_shape_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from ops.cli import main; sys.exit(main(['costs']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "131,072 B" in done.stdout
