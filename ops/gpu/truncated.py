"""The first layers of a GGUF model, and what the CPU says with them: a real model that is small enough to carry.

Weights stay as they are stored. The vocabulary is cut too: byte-pair ids are in order of frequency, so its first half
reads nearly all text. The tokenizer is left out; prompts are ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runner.attention.base import AttentionBackend
from runner.attention.torch_paged import TorchAttention
from runner.loader import LoadedModel, load_model
from runner.metadata import build
from runner.ops import TorchOps

PAGE = 16
LAYERS, VOCABULARY = 7, 32_768
DECODES = 16
KEPT = 64
"""Of each position's logits, the largest are kept, and every so many-th."""
STRIDE = 61
CLEAR = 4.0
"""By how many times the noise of bfloat16 a choice must lead for every device to make it."""
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
LENGTHS = (1, 15, 16, 17, 65, 200)


def truncate(source: Path, target: Path, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> None:
    """Write the first `layers` blocks, the first `vocabulary` rows of the embedding, and the final norm."""
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    changed: dict[str, Any] = {f"{architecture}.block_count": layers, f"{architecture}.vocab_size": vocabulary}
    for name, stored in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        kinds = stored.types
        inner = kinds[1] if kinds[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.get(name, stored.contents()), kinds[0], inner)
    for tensor in reader.tensors:
        block = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
        if block and int(block) >= layers:
            continue
        data = tensor.data[:vocabulary] if tensor.name in ("token_embd.weight", "output.weight") else tensor.data
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prompts(source: Path, vocabulary: int = VOCABULARY, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """The beginnings of different paragraphs of a real text, in ids of the model at `source` below `vocabulary`."""
    from services.text.tokenizer import load_tokenizer  # only where the pack is made

    tokenizer = load_tokenizer(source)
    paragraphs = [part for part in TEXT.read_text().split("\n\n") if len(part) > 40]
    found = []
    for index, length in enumerate(lengths):
        ids = tokenizer.encode("\n\n".join(paragraphs[3 * index :]), add_special_tokens=False)
        found.append([token for token in ids if token < vocabulary][:length])
    return found


class OneRow:
    """A decoder with pages for one sequence, fed step by step; every logit is the last token's, float32 [V]."""

    def __init__(self, model: LoadedModel, attention: AttentionBackend, first_page: int = 1) -> None:
        self._model, self._attention = model, attention
        self._pages = np.arange(first_page, first_page + -(-model.decoder.max_positions // PAGE), dtype=np.int32)
        self._length = 0

    def feed(self, tokens: Sequence[int]) -> Tensor:
        start, count = np.array([self._length], np.int32), np.array([len(tokens)], np.int32)
        meta = build(self._pages[None], start, count, PAGE)
        self._attention.plan(meta)
        decoder = self._model.decoder
        ids, positions = (torch.as_tensor(x).to(decoder.device) for x in (list(tokens), meta.positions))
        hidden = decoder.forward(ids, positions, self._attention)
        self._length += len(tokens)
        return decoder.logits(hidden[-1:])[0]


def pools_for(model: LoadedModel, device: torch.device | str = "cpu", rows: int = 1) -> list[Tensor]:
    """Pages for `rows` sequences of the longest length, and the null page; what nobody wrote is NaN."""
    shape = model.config
    pages = rows * -(-model.decoder.max_positions // PAGE) + 1
    size = (pages, 2, PAGE, shape.num_kv_heads, shape.head_dim)
    return [torch.full(size, float("nan"), dtype=model.dtype, device=device) for _ in range(shape.num_layers)]


def on_cpu(model: LoadedModel) -> OneRow:
    """One sequence on the reference path."""
    shape = model.config
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_scale)
    return OneRow(model, TorchAttention(pools_for(model), *heads))


@dataclass(frozen=True, slots=True)
class Expected:
    """What the CPU says of one prompt. P = DECODES + 1 positions: the prompt's last, then one for each token fed."""

    prompt: list[int]
    tokens: list[int]
    """int [P]: the greedy choice in float32 at each position, fed to the next."""
    margins: Tensor
    """float32 [P]: by how much the choice leads."""
    ids: Tensor
    """int64 [P, K]: which logits are kept."""
    logits: Tensor
    """float32 [P, K], computed in float32."""
    rounded: Tensor
    """float32 [P, K], computed in bfloat16."""

    @property
    def noise(self) -> float:
        """How far bfloat16 is from float32 on the CPU, root mean square."""
        return rms(self.rounded - self.logits)

    @property
    def clear(self) -> list[bool]:
        """At which positions bfloat16 can't change the choice."""
        return (self.margins > CLEAR * self.noise).tolist()


def rms(difference: Tensor) -> float:
    """Root mean square."""
    return float(difference.square().mean().sqrt())


def expectations(path: Path, asked: Sequence[list[int]], decodes: int = DECODES) -> Iterator[Expected]:
    """Run the model at `path` on the CPU, in float32 and, fed the same tokens, in bfloat16."""
    longest = max(map(len, asked)) + decodes + 1
    models = [load_model(path, dtype, TorchOps(), max_model_len=longest) for dtype in ("float32", "bfloat16")]
    for prompt in asked:
        rows = [on_cpu(model) for model in models]
        fed, tokens, margins, kept = prompt, list[int](), list[Tensor](), list[tuple[Tensor, Tensor, Tensor]]()
        for _ in range(decodes + 1):
            exact, rounded = (row.feed(fed) for row in rows)
            best = exact.topk(min(KEPT, len(exact)))
            ids = torch.cat((best.indices, torch.arange(0, len(exact), STRIDE)))
            kept.append((ids, exact[ids], rounded[ids]))
            margins.append(best.values[0] - best.values[1])
            tokens.append(int(best.indices[0]))
            fed = tokens[-1:]
        stacked = [torch.stack(column) for column in zip(*kept, strict=True)]
        yield Expected(prompt, tokens, torch.stack(margins), *stacked)


def save(path: Path, expected: Sequence[Expected]) -> None:
    """Write them as safetensors, the prompts and tokens in its header."""
    tensors = {
        f"{index}.{name}": getattr(one, name)
        for index, one in enumerate(expected)
        for name in ("margins", "ids", "logits", "rounded")
    }
    texts = json.dumps([[one.prompt, one.tokens] for one in expected])
    save_file(tensors, path, metadata={"texts": texts})


def load(path: Path) -> list[Expected]:
    """What `save` wrote."""
    with safe_open(path, framework="pt") as opened:
        texts = json.loads(opened.metadata()["texts"])
        names = ("margins", "ids", "logits", "rounded")
        return [
            Expected(prompt, tokens, *(opened.get_tensor(f"{index}.{name}") for name in names))
            for index, (prompt, tokens) in enumerate(texts)
        ]
