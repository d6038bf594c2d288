"""A model cut into parts: what each rank reads, and that the parts together compute what the whole does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from runner.loader import LoadedModel, ModelError, load_model
from runner.loader.gguf import GgufCheckpoint
from runner.loader.huggingface import HuggingFaceCheckpoint
from runner.model.parameters import layout
from runner.model.shard import Shard
from runner.ops import TorchOps
from tests.runner.gguf_files import write_gguf
from tests.runner.parallel_kit import ThreadGroup, on_all_ranks

PROMPTS = [[1, 5, 9, 77, 31, 8, 64], [40, 3, 3]]
OUTPUTS = 5


def load(path: Path, peers: ThreadGroup | None = None, **options: Any) -> LoadedModel:
    return load_model(path, "float32", TorchOps(), peers=peers, **options)


@pytest.mark.parametrize(
    ("family", "size", "changes"),
    [
        ("llama", 2, {}),
        ("llama", 4, {}),  # more ranks than the 2 key/value heads
        ("llama", 4, {"num_key_value_heads": 1}),
        ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
        ("llama", 3, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "vocab_size": 97}),
        ("llama", 4, {"tie_word_embeddings": True, "vocab_size": 97}),
        ("qwen2", 2, {}),
        ("qwen3", 4, {"head_dim": 16, "vocab_size": 99}),
    ],
)
def test_the_parts_together_compute_what_the_whole_model_does(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    paged_rows: Callable[..., Any],
    family: str,
    size: int,
    changes: dict[str, Any],
) -> None:
    tiny_model(family, **changes).save_pretrained(tmp_path)
    whole_logits, whole_tokens = paged_rows(load(tmp_path).decoder, 2, 64).generate(PROMPTS, OUTPUTS)

    def run(peers: ThreadGroup) -> Any:
        rows = paged_rows(load(tmp_path, peers).decoder, 2, 64)
        logits = rows.step(dict(enumerate(PROMPTS)))
        for index in range(OUTPUTS):
            fed = {row: [tokens[index]] for row, tokens in enumerate(whole_tokens)}
            logits = {row: torch.cat((logits[row], more)) for row, more in rows.step(fed).items()}
        return logits

    first, *_ = on_all_ranks(size, run)
    for row, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(first[row][: len(prompt)], whole_logits[row], rtol=1e-4, atol=1e-4)
        assert first[row][len(prompt) - 1 : -1].argmax(1).tolist() == whole_tokens[row]


def parts_of(checkpoint: Any, size: int) -> list[dict[str, torch.Tensor]]:
    slots = [layout(checkpoint.config, Shard(rank, size)) for rank in range(size)]
    return [dict(checkpoint.tensors({name: slot.part for name, slot in mine.items()})) for mine in slots]


@pytest.mark.parametrize("quantization", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1])
def test_the_parts_of_a_gguf_are_those_of_its_whole_tensors(
    tmp_path: Path, tiny_model: Callable[..., Any], quantization: GGMLQuantizationType
) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=64)
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", model, quantization=quantization))
    whole = dict(checkpoint.tensors())
    for rank, parts in enumerate(parts_of(checkpoint, 2)):
        slots = layout(checkpoint.config, Shard(rank, 2))
        assert parts.keys() == whole.keys() == slots.keys()
        for name, part in parts.items():
            assert torch.equal(part, whole[name][slots[name].part]), name


def test_a_rank_reads_its_slices_of_a_safetensors_file_and_nothing_else(
    tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    checkpoint = HuggingFaceCheckpoint(tmp_path)
    whole = dict(checkpoint.tensors())
    first, second = parts_of(checkpoint, 2)
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.up_proj.weight"):
        key = f"layers.1.{name}"
        assert torch.equal(torch.cat((first[key], second[key])), whole[key])
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        key = f"layers.0.{name}"
        assert torch.equal(torch.cat((first[key], second[key]), 1), whole[key])
    assert torch.equal(torch.cat((first["lm_head.weight"], second["lm_head.weight"])), whole["lm_head.weight"])
    assert torch.equal(first["embed_tokens.weight"], whole["embed_tokens.weight"])


def test_weights_take_less_memory_on_each_of_two_ranks(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    whole = load(tmp_path)
    parts = on_all_ranks(2, lambda peers: load(tmp_path, peers))
    embedding_and_norms = (96 * 32 + 5 * 32) * 4
    assert sum(part.weight_bytes for part in parts) == whole.weight_bytes + embedding_and_norms
    assert [part.config.num_kv_heads for part in parts] == [1, 1]


def test_each_rank_keeps_its_own_cached_weights(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    cache = tmp_path / "cache"

    def head(peers: ThreadGroup | None) -> torch.Tensor:
        return load(path, peers, cache_dir=cache).decoder.logits(torch.ones(1, 32))

    fresh = on_all_ranks(2, head)
    assert len(list(cache.iterdir())) == 2
    assert torch.equal(fresh[0], head(None)) and len(list(cache.iterdir())) == 3
    path.write_bytes(path.read_bytes())  # a newer file: what was kept of the old one must not be read
    again = on_all_ranks(2, head)
    assert len(list(cache.iterdir())) == 3 and torch.equal(fresh[0], again[0])


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "4 query heads can't be split over tensor_parallel_size 3: this model takes 1, 2, 4"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            2,
            "3 key/value heads can be neither split nor repeated evenly over tensor_parallel_size 2: "
            "this model takes 1, 3, 6",
        ),
        ({"intermediate_size": 50}, 4, "50 intermediate_size can't be split over tensor_parallel_size 4"),
    ],
)
def test_a_model_that_cannot_be_split_evenly_is_refused_with_the_numbers(
    tmp_path: Path, tiny_model: Callable[..., Any], changes: dict[str, Any], size: int, message: str
) -> None:
    tiny_model("llama", **changes).save_pretrained(tmp_path)

    def refused(peers: ThreadGroup) -> str:
        with pytest.raises(ModelError) as caught:
            load(tmp_path, peers)
        assert caught.value.code == "cant_split"
        return str(caught.value)

    assert all(message in text for text in on_all_ranks(size, refused))


def test_several_ranks_hold_one_key_value_head_beside_its_own_query_heads(tiny_model: Callable[..., Any]) -> None:
    from runner.model.config import from_huggingface

    config = from_huggingface(
        tiny_model("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=4).config.to_dict()
        | {"architectures": ["LlamaForCausalLM"]}
    )
    shards = [Shard(rank, 4) for rank in range(4)]
    assert [shard.kv_heads(config) for shard in shards] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [shard.heads(config) for shard in shards] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_the_real_model_takes_one_or_three_ranks(smollm2_path: Path) -> None:
    config = GgufCheckpoint(smollm2_path).config
    with pytest.raises(ModelError, match="9 query heads can't be split over tensor_parallel_size 2: .* takes 1, 3$"):
        Shard(0, 2).local(config)
    local = Shard(1, 3).local(config)
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (3, 1, 512)


def test_half_precision_parts_are_summed_as_one_rank_would_within_its_rounding(
    tmp_path: Path, tiny_model: Callable[..., Any], paged_rows: Callable[..., Any]
) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)

    def logits(dtype: str, peers: ThreadGroup | None) -> torch.Tensor:
        model = load_model(tmp_path, dtype, TorchOps(), peers=peers)
        return paged_rows(model.decoder, 1, 64).step({0: PROMPTS[0]})[0]  # type: ignore[no-any-return]

    exact, whole = logits("float32", None), logits("bfloat16", None)
    split, _ = on_all_ranks(2, lambda peers: logits("bfloat16", peers))
    scale = exact.abs().amax()
    assert (split - exact).abs().amax() / scale < 2 * (whole - exact).abs().amax() / scale + 0.01
