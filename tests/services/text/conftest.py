"""Tokenizers for the text tests: the real small model's, and tiny ones of the other families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from services.text.parts import TokenizerParts
from services.text.tokenizer import Tokenizer, load_tokenizer

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="session")
def smollm2(real_model_path: Path) -> Tokenizer:
    return load_tokenizer(real_model_path)


def _wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(TokenizerParts(backend=backend, bos_token_id=1, eos_token_ids=(2,), max_context=None))


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """Llama-2 style: ▁ for spaces, bytes for what the vocabulary lacks, a leading space stripped from texts."""
    words = ["▁", "a", "b", "H", "i", "▁a", "▁H", "▁Hi", "Hi", "▁▁", "▁▁▁", ".", ",", "!", "▁.", "é", "漢", "▁漢"]
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *BYTE_TOKENS, *words])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return _wrap(backend)


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """T5 style: the Metaspace decoder."""
    words = ["▁", "▁Hi", "Hi", "▁a", "b", "▁▁", "a▁b", "漢", ".", "▁."]
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *words])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _wrap(backend)


@pytest.fixture(scope="session")
def families(smollm2: Tokenizer, byte_fallback: Tokenizer, metaspace: Tokenizer) -> dict[str, Tokenizer]:
    return {"byte-level": smollm2, "byte-fallback": byte_fallback, "metaspace": metaspace}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[[Mapping[str, Any]], Path]:
    """Writes a GGUF file that holds only the given metadata and no tensors."""

    def write(metadata: Mapping[str, Any]) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        for key, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, list(value))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write
