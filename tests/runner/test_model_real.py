"""The real small model against transformers: same logits in float32, same greedy tokens, across page borders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.columns import f32, i32
from protocol.messages import Limits, SamplingParams
from runner.attention.cpu import CpuAttention
from runner.attention.torch_paged import TorchAttention
from runner.kernels.build import KernelError
from runner.kernels.native import NativeOps
from runner.kv import KvPool
from runner.loader import LoadedModel, load_model
from runner.model_executor import ModelExecutor
from tests.runner.kit import new, step

LENGTHS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 37, 48, 49, 64, 65, 300]
GENERATED = 8
# The default system prompt and "What is the capital of France?" in the model's chat template.
PARIS = [
    int(number)
    for number in (
        "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 "
        "198 1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"
    ).split()
]


TEXT = """
The river runs from the mountains to the sea and every town along its banks has a story about the water . In the
spring when the snow melts the valley fills with flowers and people walk for hours along the old road between the
villages . Some of them carry bread and cheese while others bring only a small book to read under the trees . A teacher
once said that the best way to learn the history of a place is to follow its river from the first stone to the last
bridge . Today the road is quiet but the children still play near the mill and the lights of the houses still shine
over the water at night
"""


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Inverse of what llama.cpp's converter does: reshape(heads, 2, D/2, …).swapaxes(1, 2)."""
    return (
        weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


@pytest.fixture(scope="module")
def reader(smollm2_path: Path) -> GGUFReader:
    return GGUFReader(smollm2_path)


@pytest.fixture(scope="module")
def reference(reader: GGUFReader) -> LlamaForCausalLM:
    """SmolLM2 in transformers, float32, with weights read from the file without any code of ours."""
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.startswith("blk."):
            _, layer, kind, _ = tensor.name.split(".")
            heads = {"attn_q": 9, "attn_k": 3}.get(kind)
            weight = weight if heads is None else unpermuted(weight, heads)
            name = f"model.layers.{layer}.{names[kind]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                tensor.name
            ]
        state[name] = torch.tensor(weight)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.fixture(scope="module")
def prompts(reader: GGUFReader) -> list[list[int]]:
    """One prompt per length: a stretch of text, the chat prompt and its beginning, or random ids if it is short."""
    ids = {token: index for index, token in enumerate(reader.fields["tokenizer.ggml.tokens"].contents())}
    words = [ids[f"Ġ{word}"] for word in TEXT.split()]
    rng = np.random.default_rng(0)
    made = []
    for index, length in enumerate(LENGTHS):
        text = (words[7 * index :] + words * 4)[:length]
        noise = rng.integers(3, 49_000, size=length).tolist()
        made.append([text, (PARIS + text)[:length], noise if length < 32 else text][index % 3])
    made[LENGTHS.index(len(PARIS))] = PARIS
    return made


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM, prompts: list[list[int]], float32_run: Any) -> list[torch.Tensor]:
    """Per prompt: the reference's logits over the prompt and the tokens that our float32 run appended to it."""
    _, outputs = float32_run
    with torch.inference_mode():
        return [
            reference(torch.tensor([prompt + output])).logits[0]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]


@pytest.fixture(scope="module")
def float32_run(
    smollm2_float32: LoadedModel, prompts: list[list[int]], paged_rows: Callable[..., Any]
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """All prompts in one step, then greedy decoding of all rows together."""
    rows = paged_rows(smollm2_float32.decoder, len(prompts), max(LENGTHS) + GENERATED)
    return rows.generate(prompts, GENERATED)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference in a row over the largest magnitude in it, worst row."""
    return float(((got - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max())


def test_float32_logits_equal_the_reference_at_every_prompt_position(
    float32_run: Any, expected: list[torch.Tensor], prompts: list[list[int]]
) -> None:
    for prompt, got, wanted in zip(prompts, float32_run[0], expected, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, wanted[: len(prompt)]) < 1e-4, f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("chunk", [300, 37])
def test_log_probabilities_of_prompts_equal_the_reference(
    smollm2_float32: LoadedModel, expected: list[torch.Tensor], prompts: list[list[int]], chunk: int
) -> None:
    shape, limits = smollm2_float32.config, Limits("m", 16, 64, 1024, 49152, 4, 512)
    pool = KvPool(shape, limits.num_blocks, 16, torch.float32, 0)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale)
    executor = ModelExecutor(smollm2_float32, TorchAttention(pool.layers, *heads), pool, limits)
    which = LENGTHS.index(300)
    prompt, wanted = prompts[which], torch.log_softmax(expected[which][:299], 1)
    arrival = new(1, prompt, range(1, 20), params=SamplingParams(1, 0.0, prompt_logprobs=20))
    for number, begin in enumerate(range(0, 300, chunk)):
        one = step(number, {1: min(chunk, 300 - begin)}, arrivals=[] if number else [arrival])
        for part in executor.execute(one, 0).prompt_logprobs:
            rows = wanted[part.position - 1 : part.end - 1]
            own = rows.gather(1, torch.tensor(prompt[part.position : part.end]).unsqueeze(1))
            np.testing.assert_allclose(f32(part.logprobs), own.flatten(), atol=5e-3)
            best = f32(part.top_logprobs).reshape(-1, 20)
            np.testing.assert_allclose(best, rows.topk(20, 1).values, atol=5e-3)
            ids = torch.from_numpy(i32(part.top_ids).astype(np.int64)).view(-1, 20)
            np.testing.assert_allclose(best, rows.gather(1, ids), atol=5e-3)
    assert part.end == 300


def test_greedy_tokens_equal_the_reference(
    float32_run: Any, expected: list[torch.Tensor], prompts: list[list[int]]
) -> None:
    for prompt, output, wanted in zip(prompts, float32_run[1], expected, strict=True):
        assert output == wanted[len(prompt) - 1 : -1].argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"


def test_the_capital_of_france_is_paris(smollm2_bfloat16: LoadedModel, paged_rows: Callable[..., Any]) -> None:
    _, (output,) = paged_rows(smollm2_bfloat16.decoder, 1, 64).generate([PARIS], 8)
    assert output == [504, 3575, 282, 4649, 314, 7042, 30, smollm2_bfloat16.eos_token_ids[0]]


def test_a_prompt_in_chunks_mixed_with_decodes_gives_the_logits_of_one_piece(
    smollm2_float32: LoadedModel, float32_run: Any, prompts: list[list[int]], paged_rows: Callable[..., Any]
) -> None:
    long, short = LENGTHS.index(300), LENGTHS.index(17)
    rows = paged_rows(smollm2_float32.decoder, 2, 320)
    got: list[torch.Tensor] = []
    start = 0
    for index, size in enumerate([15, 1, 17, 100, 32, 135]):
        neighbour = prompts[short] if index == 0 else float32_run[1][short][index - 1 : index]
        logits = rows.step({0: neighbour, 1: prompts[long][start : start + size]})
        assert int(logits[0][-1].argmax()) == float32_run[1][short][index]
        got.append(logits[1])
        start += size
    assert relative_error(torch.cat(got), float32_run[0][long]) < 1e-4


@pytest.fixture(scope="module")
def fed(prompts: list[list[int]], float32_run: Any) -> dict[int, list[int]]:
    """Each prompt with the tokens it was continued by."""
    return {row: prompt + output for row, (prompt, output) in enumerate(zip(prompts, float32_run[1], strict=True))}


def assert_clear_choices_agree(logits: dict[int, torch.Tensor], expected: list[torch.Tensor]) -> None:
    """The same best token wherever the reference's best is ahead by more than bfloat16 can blur."""
    compared = 0
    for row, wanted in enumerate(expected):
        best = wanted.topk(2).values
        clear = best[:, 0] - best[:, 1] > 1.0
        compared += int(clear.sum())
        assert torch.equal(logits[row].argmax(-1)[clear], wanted.argmax(-1)[clear])
    assert compared > 200


def test_bfloat16_chooses_the_same_tokens_where_the_choice_is_clear(
    smollm2_bfloat16: LoadedModel,
    expected: list[torch.Tensor],
    fed: dict[int, list[int]],
    paged_rows: Callable[..., Any],
) -> None:
    rows = paged_rows(smollm2_bfloat16.decoder, len(fed), max(map(len, fed.values())))
    assert_clear_choices_agree(rows.step(fed), expected)


@pytest.fixture(scope="module")
def native() -> None:
    try:
        NativeOps(torch.float32)
    except KernelError as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.mark.usefixtures("native")
def test_native_float32_kernels_give_the_reference_logits_and_greedy_tokens(
    smollm2_path: Path,
    smollm2_cache: Path,
    prompts: list[list[int]],
    expected: list[torch.Tensor],
    float32_run: Any,
    paged_rows: Callable[..., Any],
) -> None:
    model = load_model(smollm2_path, "float32", NativeOps, max_model_len=1024, cache_dir=smollm2_cache)
    rows = paged_rows(model.decoder, len(prompts), max(LENGTHS) + GENERATED, CpuAttention)
    logits, outputs = rows.generate(prompts, GENERATED)
    assert outputs == float32_run[1]
    for prompt, got, wanted in zip(prompts, logits, expected, strict=True):
        assert relative_error(got, wanted[: len(prompt)]) < 1e-4, f"prompt of {len(prompt)} tokens"


@pytest.mark.usefixtures("native")
def test_native_bfloat16_kernels_choose_the_same_tokens_where_the_choice_is_clear(
    smollm2_path: Path,
    smollm2_cache: Path,
    expected: list[torch.Tensor],
    fed: dict[int, list[int]],
    paged_rows: Callable[..., Any],
) -> None:
    model = load_model(smollm2_path, "auto", NativeOps, max_model_len=1024, cache_dir=smollm2_cache)
    rows = paged_rows(model.decoder, len(fed), max(map(len, fed.values())), CpuAttention)
    assert_clear_choices_agree(rows.step(fed), expected)
