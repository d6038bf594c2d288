"""The executor on the real model: whatever way a request is cut into steps, its tokens are the same."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.columns import f32, i32
from protocol.messages import Limits, SamplingParams
from runner.attention.torch_paged import TorchAttention
from runner.config import RunnerConfig
from runner.cuda.device import HostDevice
from runner.cuda.executor import DeviceExecutor
from runner.cuda.pages import DevicePages
from runner.errors import StartError
from runner.kv import KvPool
from runner.loader import LoadedModel
from runner.model_executor import ModelExecutor, load_executor
from tests.runner.kit import GREEDY, generate, new, pages_for, random_hash, step, tokens_of

PAGE = 16
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, 504, 3575]  # 18 ids
OTHER = [1, 4093, 198, 28, 30, 340, 282, 905, 1480]
OUTPUTS = 6
SEEDED = SamplingParams(
    max_tokens=64, temperature=0.9, top_p=0.95, top_k=200, seed=42, repetition_penalty=1.2, frequency_penalty=0.3
)


@dataclasses.dataclass
class Made:
    """An executor and its pool."""

    executor: ModelExecutor | DeviceExecutor
    pool: KvPool | DevicePages

    def run(self, one: Any) -> Any:
        return self.executor.execute(one, 0)


Make = Callable[..., Made]


AT_ONCE, AHEAD = "at once", "launched and collected"


@pytest.fixture(params=[AT_ONCE, AHEAD])
def make(smollm2_float32: LoadedModel, request: pytest.FixtureRequest) -> Make:
    """Executors of both kinds over the real model in float32, each with pages of its own, filled with `fill`."""

    def build(fill: float = 0.0, **changes: Any) -> Made:
        values = {"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}
        limits = Limits(
            **{"model": "m", "block_size": PAGE, "vocab_size": 49152, "host_blocks": 8, **values, **changes}
        )
        config = smollm2_float32.config
        sizes = (config, limits.num_blocks, PAGE, torch.float32)
        heads = (config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale)
        if request.param == AT_ONCE:
            pool = KvPool(*sizes, limits.host_blocks)
            made = Made(ModelExecutor(smollm2_float32, TorchAttention(pool.layers, *heads), pool, limits), pool)
        else:
            device = HostDevice()
            pages = DevicePages(*sizes, device, limits.host_blocks)
            attention = TorchAttention(pages.layers, *heads)
            made = Made(DeviceExecutor(smollm2_float32, attention, pages, limits, device), pages)
        for layer in made.pool.layers:
            layer.fill_(fill)
        return made

    return build


@pytest.fixture(scope="module")
def greedy(smollm2_float32: LoadedModel, paged_rows: Callable[..., Any]) -> list[int]:
    """What a plain loop with another attention implementation makes of PROMPT."""
    _, (outputs,) = paged_rows(smollm2_float32.decoder, 1, 64).generate([PROMPT], OUTPUTS)
    return outputs  # type: ignore[no-any-return]


def test_greedy_tokens_are_those_of_a_plain_loop(make: Make, greedy: list[int]) -> None:
    assert generate(make().run, PROMPT, OUTPUTS, size=PAGE) == greedy


def test_pages_full_of_nan_make_no_difference(make: Make, greedy: list[int]) -> None:
    assert generate(make(fill=math.nan).run, PROMPT, OUTPUTS, size=PAGE) == greedy


@pytest.mark.parametrize(("make", "chunk"), [(AT_ONCE, 5), (AHEAD, 16), (AT_ONCE, 17)], indirect=["make"])
def test_chunks_make_no_difference(make: Make, greedy: list[int], chunk: int) -> None:
    assert generate(make().run, PROMPT, OUTPUTS, size=PAGE, chunk=chunk) == greedy


@pytest.mark.parametrize(
    ("make", "params"), [(AT_ONCE, GREEDY), (AHEAD, SEEDED)], ids=["greedy", "seeded"], indirect=["make"]
)
def test_a_request_resumed_at_any_point_goes_on_as_if_nothing_had_happened(make: Make, params: SamplingParams) -> None:
    made = make()
    whole = generate(made.run, PROMPT, OUTPUTS, size=PAGE, params=params)
    for number, cut in enumerate((1, 3, 5), 2):
        rest = generate(
            made.run, PROMPT, OUTPUTS, size=PAGE, params=params, emitted=whole[:cut], chunk=7, incarnation=number
        )
        assert whole[:cut] + rest == whole


def test_a_batch_of_prefill_chunks_and_decodes_gives_each_row_its_own_tokens(make: Make) -> None:
    """PROMPT starts first; while it decodes, OTHER arrives in two chunks; both then decode together."""
    alone = generate(make().run, PROMPT, OUTPUTS, size=PAGE, params=SEEDED)
    other_alone = generate(make().run, OTHER, 3, size=PAGE)
    run = make().run
    mine = new(1, PROMPT, [9, 3], params=SEEDED)
    other = new(2, OTHER, [5, 7])
    steps = [
        step(1, {1: 18}, arrivals=[mine]),
        step(2, {1: 1, 2: 4}, arrivals=[other]),
        step(3, {2: 5, 1: 1}),
        step(4, {2: 1, 1: 1}),
        step(5, {1: 1, 2: 1}),
        step(6, {1: 1}, left=[2]),
    ]
    results = [tokens_of(run(one)) for one in steps]
    assert [found[1] for found in results if 1 in found] == alone
    assert [found[2] for found in results if 2 in found] == other_alone
    assert results[1].keys() == {1}, "an unfinished prompt gives no token"


def test_a_shared_prefix_gives_the_same_tokens_as_a_cold_start(make: Make, greedy: list[int]) -> None:
    made = make()
    made.run(step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2])], filled={1: random_hash(1)}))
    before = [layer[1].clone() for layer in made.pool.layers]
    first = tokens_of(made.run(step(2, {2: 2}, arrivals=[new(2, PROMPT, [1, 3], num_computed=16)])))
    second = tokens_of(made.run(step(3, {2: 1})))
    assert [first[2], second[2]] == greedy[:2]
    assert all(torch.equal(layer[1], old) for layer, old in zip(made.pool.layers, before, strict=True))


def test_a_prefix_computed_in_the_same_step_may_be_read(make: Make, greedy: list[int]) -> None:
    both = step(1, {1: 18, 2: 2}, arrivals=[new(1, PROMPT, [1, 2]), new(2, PROMPT, [1, 3], num_computed=16)])
    assert tokens_of(make().run(both)) == {1: greedy[0], 2: greedy[0]}


def test_swapped_pages_are_saved_before_they_are_reused_and_back_before_they_are_read(
    make: Make, greedy: list[int]
) -> None:
    made = make(fill=math.nan)
    first = tokens_of(made.run(step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2])])))[1]
    # In one step: 1 goes out to host blocks 4 and 0, and its pages are given to 2, which overwrites them.
    thief = new(2, OTHER, [2, 1])
    made.run(step(2, {2: 9}, arrivals=[thief], left=[1], swap_out=[1, 4, 2, 0]))
    back = new(1, [*PROMPT, first], [8, 6], num_prompt=18, num_computed=18, incarnation=2)
    tokens = [first]
    tokens.append(tokens_of(made.run(step(3, {1: 1, 2: 1}, arrivals=[back], swap_in=[8, 4, 6, 0])))[1])
    tokens += [tokens_of(made.run(step(number, {1: 1})))[1] for number in (4, 5)]
    assert tokens == greedy[:4]


def test_a_row_whose_logits_are_not_finite_fails_alone(make: Make, greedy: list[int]) -> None:
    made = make()
    arrivals = [new(1, PROMPT, [1, 2]), new(2, OTHER, [3], incarnation=4)]
    first = tokens_of(made.run(step(1, {1: 18, 2: 9}, arrivals=arrivals)))
    made.pool.layers[3][3] = math.nan
    second = made.run(step(2, {1: 1, 2: 1}, filled={3: random_hash(3)}))
    assert [(error.id, error.incarnation, error.code) for error in second.errors] == [(2, 4, "non_finite_logits")]
    third = made.run(step(3, {1: 1, 2: 1}))  # was on its way already
    assert [first[1], *tokens_of(second).values(), *tokens_of(third).values()] == greedy[:3]
    assert i32(made.executor.inventory.export()[0]).tolist() == []
    fourth = made.run(step(4, {1: 1, 2: 9}, left=[2], arrivals=[new(2, OTHER, [3], incarnation=5)]))
    assert tokens_of(fourth) == {1: greedy[3], 2: first[2]}


def test_the_largest_legal_batch_with_logprobs_runs_right_after_start(make: Make) -> None:
    made = make(max_num_seqs=4, max_num_batched_tokens=128)
    rich = SamplingParams(max_tokens=9, seed=1, top_p=0.9, logprobs=20)
    arrivals = [
        new(request, [*PROMPT, *OTHER, *range(300, 305)], pages_for(32, PAGE, 1 + 2 * request), params=rich)
        for request in range(4)
    ]
    result = made.run(step(1, dict.fromkeys(range(4), 32), arrivals=arrivals))
    assert len(tokens_of(result)) == 4
    for entry in result.logprobs:
        assert len(i32(entry.top_ids)) == 20 and np.isfinite(f32(entry.top_logprobs)).all() and entry.position == 32


# --- starting -------------------------------------------------------------------------------------------------


def tiny_checkpoint(path: Path, vocab: int = 96) -> Path:
    """A random two-layer Llama as a Hugging Face directory."""
    hidden, inner, heads, head_dim = 32, 48, 2, 16
    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": [2, 7],
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": (head_dim, hidden),
            prefix + "self_attn.v_proj.weight": (head_dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}, path / "model.safetensors"
    )
    return path


def loaded(path: Path, **changes: Any) -> ModelExecutor:
    return load_executor(RunnerConfig(model=str(path), attention_backend="torch", num_threads=1, **changes))


def test_limits_come_from_model_pool_and_settings(tmp_path: Path) -> None:
    executor = loaded(tiny_checkpoint(tmp_path / "m"), num_blocks_override=40, swap_space_bytes=1 << 20)
    limits = executor.limits
    assert (limits.num_blocks, limits.max_model_len, limits.vocab_size) == (40, 128, 96)
    assert limits.eos_token_ids == (2, 7) and limits.dtype == "float32"
    assert limits.kv_bytes_per_block == 2 * 16 * 1 * 16 * 4 * 2
    assert limits.host_blocks == (1 << 20) // limits.kv_bytes_per_block
    assert executor.weight_bytes > 4 * 96 * 32
    tokens = generate(lambda one: executor.execute(one, 0), [1, 2, 3], 4, size=16)
    assert len(tokens) == 4 and max(tokens) < 96


def test_a_model_that_computes_no_numbers_is_refused_before_serving(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e30
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(StartError, match="can't compute in float16.*not finite"):
        loaded(path, dtype="float16")


def test_warming_up_leaves_nothing_behind(tmp_path: Path) -> None:
    executor = loaded(tiny_checkpoint(tmp_path / "m"), num_blocks_override=40)
    assert executor.num_residents == 0 and len(executor.inventory) == 0


def test_a_pool_without_room_for_one_request_is_refused_before_serving(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="holds 112 tokens .* less than one request of 128 tokens"):
        loaded(tiny_checkpoint(tmp_path / "m"), num_blocks_override=8, max_model_len=128)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="model is not set"):
        load_executor(RunnerConfig())
    with pytest.raises(StartError, match="does not exist"):
        loaded(tmp_path / "nowhere")


def test_a_step_without_rows_may_swap_and_the_time_of_copies_is_reported(make: Make, greedy: list[int]) -> None:
    made = make(fill=math.nan)
    tokens = [tokens_of(made.run(step(1, {1: 18}, arrivals=[new(1, PROMPT, [1, 2])])))[1]]
    out = made.run(step(2, {}, left=[1], swap_out=[1, 4, 2, 0]))
    assert out.failure is None and out.ids == b"" and out.copy_ns > 0
    for layer in made.pool.layers:
        layer.fill_(math.nan)
    back = new(1, [*PROMPT, *tokens], [6, 3], num_computed=18, num_prompt=18, incarnation=2)
    returned = made.run(step(3, {1: 1}, arrivals=[back], swap_in=[6, 4, 3, 0]))
    tokens.append(tokens_of(returned)[1])
    assert returned.copy_ns > 0
    last = made.run(step(4, {1: 1}))
    assert last.copy_ns == 0
    assert [*tokens, *tokens_of(last).values()] == greedy[:3]
