"""Every checkpoint tensor has one place, is written once, and nothing stays unwritten."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from runner.model.config import ModelConfig
from runner.model.errors import ModelError
from runner.model.parameters import ParameterSet, fused_shapes, layout
from runner.model.rope import RopeSpec

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=6,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    rms_norm_eps=1e-6,
    rope=RopeSpec("default", 10_000.0, 2),
    max_context=64,
)
EVERYTHING = dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)


@pytest.mark.parametrize("config", [CONFIG, EVERYTHING, dataclasses.replace(CONFIG, tie_word_embeddings=True)])
def test_the_slots_of_a_parameter_cover_its_rows_without_overlap(config: ModelConfig) -> None:
    rows: dict[str, list[int]] = {}
    for slot in layout(config).values():
        rows.setdefault(slot.target, []).extend(range(slot.start, slot.start + slot.shape[0]))
    for target, shape in fused_shapes(layout(config)).items():
        assert sorted(rows[target]) == list(range(shape[0]))


def test_fused_parameters_stack_their_parts_in_order() -> None:
    parameters = ParameterSet(layout(EVERYTHING), torch.float32)
    for number, (name, slot) in enumerate(layout(EVERYTHING).items()):
        parameters.write(name, torch.full(slot.shape, float(number)))
    tensors = parameters.complete()
    order = {name: float(number) for number, name in enumerate(layout(EVERYTHING))}
    qkv = [order[f"layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert tensors["layers.1.qkv.weight"][:, 0].tolist() == [qkv[0]] * 8 + [qkv[1]] * 4 + [qkv[2]] * 4
    gate_up = [order[f"layers.0.mlp.{part}_proj.bias"] for part in ("gate", "up")]
    assert tensors["layers.0.gate_up.bias"].tolist() == [gate_up[0]] * 6 + [gate_up[1]] * 6


def test_a_tensor_that_comes_twice_is_refused() -> None:
    parameters = ParameterSet(layout(CONFIG), torch.float32)
    parameters.write("norm.weight", torch.ones(8))
    with pytest.raises(ModelError, match=r"'norm\.weight' came twice"):
        parameters.write("norm.weight", torch.ones(8))


def test_a_tensor_without_a_place_or_of_another_shape_is_refused() -> None:
    parameters = ParameterSet(layout(CONFIG), torch.float32)
    with pytest.raises(ModelError, match=r"'norm\.bias' has no place"):
        parameters.write("norm.bias", torch.ones(8))
    with pytest.raises(ModelError, match=r"\[9\].*\[8\]"):
        parameters.write("norm.weight", torch.ones(9))


def test_a_set_with_unwritten_tensors_is_never_complete() -> None:
    parameters = ParameterSet(layout(CONFIG), torch.float32)
    for name, slot in list(layout(CONFIG).items())[:-1]:
        parameters.write(name, torch.ones(slot.shape))
    with pytest.raises(ModelError, match=r"lacks 'lm_head\.weight'"):
        parameters.complete()
