"""Hugging Face directories: shards and indexes, tied heads, dtypes, and errors that name the file or tensor."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.loader import LoadedModel, ModelError, load_model
from runner.loader.huggingface import INDEX, SINGLE, tokenizer_size
from runner.model.decoder import Decoder
from runner.ops import TorchOps

PROMPT = list(range(3, 40))


@pytest.fixture
def logits(paged_rows: Callable[..., Any]) -> Callable[[Decoder], torch.Tensor]:
    return lambda decoder: paged_rows(decoder, 1, len(PROMPT)).step({0: PROMPT})[0]


def load(directory: Path, dtype: str = "auto", **options: Any) -> LoadedModel:
    return load_model(directory, dtype, TorchOps(), **options)


def refused(directory: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(directory)
    return caught.value


@pytest.fixture
def single(tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    """An untied model in one file."""
    directory = tmp_path / "single"
    tiny_model("llama").save_pretrained(directory)
    assert (directory / SINGLE).exists() and not (directory / INDEX).exists()
    return directory


@pytest.fixture
def sharded(single: Path, tmp_path: Path) -> Path:
    """The same model in two shards with an index."""
    directory = tmp_path / "sharded"
    directory.mkdir()
    os.link(single / "config.json", directory / "config.json")
    tensors = load_file(single / SINGLE)
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-0000{shard}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(directory: Path) -> dict[str, str]:
    return json.loads((directory / INDEX).read_text())["weight_map"]


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / SINGLE).items()}
    edit(tensors)
    save_file(tensors, directory / SINGLE)


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def test_two_shards_equal_the_single_file(single: Path, sharded: Path, logits: Any) -> None:
    assert torch.equal(logits(load(sharded).decoder), logits(load(single).decoder))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    error = refused(sharded)
    assert error.code == "missing_file" and "model-00002-of-00002.safetensors" in str(error)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    error = refused(sharded)
    assert error.code == "damaged_file" and shard.name in str(error)


def test_a_damaged_checkpoint_is_refused_before_anything_is_allocated(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    refused(sharded)


def test_files_outside_the_index_are_left_alone(single: Path, sharded: Path, logits: Any) -> None:
    save_file({"model.norm.weight": torch.full((32,), 1e6)}, sharded / "consolidated.safetensors")
    (sharded / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert torch.equal(logits(load(sharded).decoder), logits(load(single).decoder))


def test_a_copy_that_the_index_gives_to_another_shard_is_left_alone(single: Path, sharded: Path, logits: Any) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (name,) = [
        name for name, file in read_index(sharded).items() if file == second and name.endswith("model.norm.weight")
    ]
    tensors = {key: tensor.clone() for key, tensor in load_file(sharded / first).items()}
    save_file({**tensors, name: torch.full((32,), 1e6)}, sharded / first)
    assert torch.equal(logits(load(sharded).decoder), logits(load(single).decoder))


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(sharded: Path) -> None:
    write_index(sharded, {**read_index(sharded), "model.extra.weight": "model-00001-of-00002.safetensors"})
    error = refused(sharded)
    assert error.code == "missing_tensor"
    assert "'model.extra.weight'" in str(error) and "model-00001-of-00002.safetensors" in str(error)


def test_a_shard_with_a_tensor_that_the_index_does_not_name_is_refused(sharded: Path) -> None:
    weight_map = read_index(sharded)
    del weight_map["model.norm.weight"]
    write_index(sharded, weight_map)
    error = refused(sharded)
    assert error.code == "unexpected_tensor" and "'model.norm.weight'" in str(error)


def test_an_index_may_not_lead_out_of_the_directory(sharded: Path) -> None:
    write_index(sharded, {**read_index(sharded), "model.norm.weight": "../single/model.safetensors"})
    assert refused(sharded).code == "damaged_file"


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    error = refused(sharded)
    assert error.code == "missing_file" and INDEX in str(error)


def test_one_file_of_any_name_needs_no_index(single: Path, logits: Any) -> None:
    before = logits(load(single).decoder)
    (single / SINGLE).rename(single / "weights.safetensors")
    assert torch.equal(logits(load(single).decoder), before)


def test_pickled_weights_are_refused_with_advice(single: Path) -> None:
    (single / SINGLE).unlink()
    (single / "pytorch_model.bin").write_bytes(b"pickle")
    error = refused(single)
    assert error.code == "unsupported_format"
    assert "pytorch_model.bin" in str(error) and "convert to safetensors" in str(error)


def test_a_directory_without_weights_or_config_is_refused(single: Path, tmp_path: Path) -> None:
    (single / SINGLE).unlink()
    assert refused(single).code == "missing_file"
    assert "config.json" in str(refused(tmp_path))
    assert "nowhere" in str(refused(tmp_path / "nowhere"))


def test_a_damaged_config_is_named(single: Path) -> None:
    (single / "config.json").write_text("{")
    error = refused(single)
    assert error.code == "damaged_file" and "config.json" in str(error)


def test_names_without_the_model_prefix_mean_the_same(single: Path, logits: Any) -> None:
    before = logits(load(single).decoder)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(single, strip)
    assert torch.equal(logits(load(single).decoder), before)


def test_a_tensor_under_both_names_is_refused(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({"norm.weight": torch.ones(32)}))
    error = refused(single)
    assert error.code == "duplicate_tensor" and "'norm.weight'" in str(error)


def test_a_missing_tensor_is_named(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.pop("model.layers.1.self_attn.v_proj.weight"))
    error = refused(single)
    assert error.code == "missing_tensor" and "'layers.1.self_attn.v_proj.weight'" in str(error)


def test_an_unexpected_tensor_is_named(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    error = refused(single)
    assert error.code == "unexpected_tensor" and "'layers.0.self_attn.q_proj.bias'" in str(error)


def test_a_left_over_rotary_buffer_is_no_unexpected_tensor(single: Path, logits: Any) -> None:
    before = logits(load(single).decoder)
    buffer = torch.arange(4)  # An integer one, even: it isn't read.
    edit_tensors(single, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": buffer}))
    assert torch.equal(logits(load(single).decoder), before)


def test_a_misshapen_tensor_is_named_with_both_shapes(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(47, 32)}))
    error = refused(single)
    assert error.code == "wrong_shape"
    assert all(part in str(error) for part in ("'layers.0.mlp.up_proj.weight'", "[47, 32]", "[48, 32]"))


def test_a_tensor_of_integers_is_refused_with_its_type(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    error = refused(single)
    assert error.code == "unsupported_format" and "'model.norm.weight'" in str(error) and "I8" in str(error)


def test_tied_without_a_head_uses_the_embedding(tiny_model: Callable[..., Any], tmp_path: Path, logits: Any) -> None:
    reference = tiny_model("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE)
    assert_equals(logits(load(tmp_path).decoder), reference)


def test_tied_with_an_equal_head_is_the_same_and_says_nothing(
    tiny_model: Callable[..., Any], tmp_path: Path, logits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reference = tiny_model("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    edit_tensors(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert_equals(logits(load(tmp_path).decoder), reference)
    assert not caplog.records


def test_tied_with_another_head_follows_the_flag_and_warns(
    tiny_model: Callable[..., Any], tmp_path: Path, logits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reference = tiny_model("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(96, 32)}))
    assert_equals(logits(load(tmp_path).decoder), reference)
    assert "lm_head.weight" in caplog.text


@pytest.mark.parametrize("flag", [False, None])
def test_untied_with_a_head_uses_the_head(flag: bool | None, single: Path, tiny_model: Any, logits: Any) -> None:
    edit_config(single, tie_word_embeddings=flag)
    assert_equals(logits(load(single).decoder), tiny_model("llama"))


@pytest.mark.parametrize("flag", [False, None])
def test_untied_without_a_head_is_refused(flag: bool | None, single: Path) -> None:
    edit_config(single, tie_word_embeddings=flag)
    edit_tensors(single, lambda tensors: tensors.pop("lm_head.weight"))
    error = refused(single)
    assert error.code == "missing_tensor" and "'lm_head.weight'" in str(error)


def assert_equals(got: torch.Tensor, reference: Any) -> None:
    with torch.inference_mode():
        wanted = reference(torch.tensor([PROMPT])).logits[0]
    scale = wanted.abs().amax()
    torch.testing.assert_close(got / scale, wanted / scale, rtol=0, atol=1e-4)


def test_a_tied_head_stays_one_tensor_after_the_cast(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    packed: list[int] = []

    class Watching(TorchOps):
        def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
            packed.append(weight.data_ptr())
            return super().pack_linear(weight, bias)

    decoder = load_model(tmp_path, "bfloat16", Watching()).decoder
    assert decoder._embedding.data_ptr() in packed


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("declared", [True, False])
def test_auto_is_the_dtype_of_the_checkpoint(
    stored: torch.dtype, declared: bool, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("llama").to(stored).save_pretrained(tmp_path)
    if not declared:
        edit_config(tmp_path, dtype=None, torch_dtype=None)
    assert load(tmp_path).dtype == stored


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_only_bfloat16_run_in_float16_is_warned_about(
    asked: str, tiny_model: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, asked).dtype == getattr(torch, asked)
    assert ("65504" in caplog.text) == (asked == "float16")


def test_an_activation_of_1e5_stays_finite_in_the_checkpoints_own_bfloat16(
    tiny_model: Callable[..., Any], tmp_path: Path, logits: Any
) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e5 / model.model.embed_tokens.weight.abs().max())
        model.model.layers[0].mlp.down_proj.weight.mul_(1e5)
    model.save_pretrained(tmp_path)
    assert logits(load(tmp_path).decoder).isfinite().all()
    assert not logits(load(tmp_path, "float16").decoder).isfinite().all()


def test_an_unknown_dtype_is_refused_with_the_known_ones(single: Path) -> None:
    with pytest.raises(ModelError, match="'int4' is not one of auto, float32"):
        load(single, "int4")


@pytest.mark.parametrize("length", [0, -1, 129])
def test_a_length_beyond_the_models_own_is_refused_with_both_numbers(length: int, single: Path) -> None:
    with pytest.raises(ModelError, match=rf"128 tokens, not {length}"):
        load(single, max_model_len=length)


def test_the_rotary_table_is_as_long_as_the_served_length(single: Path) -> None:
    assert load(single).decoder.max_positions == 128
    assert load(single, max_model_len=40).decoder.max_positions == 40


def test_end_ids_come_from_both_files(single: Path) -> None:
    (single / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(single).eos_token_ids == (7, 9, 2)


def test_a_head_wider_than_the_tokenizer_reports_both_sizes(single: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1, "c": 88}, "merges": [["a", "b"]]}, "added_tokens": [{"id": 90}]}
    (single / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = load(single)
    assert (model.vocab_size, model.tokenizer_vocab_size) == (96, 91)


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 4}}}, 5),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []}, 2),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 3, "content": "x"}]}, 4),
    ],
)
def test_the_tokenizers_size_is_its_highest_id(tokenizer: dict[str, Any], size: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert tokenizer_size(tmp_path) == size


def test_without_a_tokenizer_every_id_of_the_head_counts(single: Path) -> None:
    assert load(single).tokenizer_vocab_size == 96


def test_a_damaged_tokenizer_is_named(single: Path) -> None:
    (single / "tokenizer.json").write_text("[]")
    error = refused(single)
    assert error.code == "damaged_file" and "tokenizer.json" in str(error)
