"""What the services' tests share: tokenizers (the real model's, tiny ones of other families) and running services."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from services.config import ApiConfig
from services.text.parts import TokenizerParts
from services.text.tokenizer import Tokenizer, load_tokenizer
from tests.services.service_kit import MakeService, Service

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


WriteGguf = Callable[[Mapping[str, Any]], Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
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


@pytest.fixture(scope="session")
def make_service(
    smollm2: Tokenizer, real_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeService]:
    """Start API services with other settings; what a test leaves running ends with the session."""
    started: list[Service] = []

    def make(*, keys: Sequence[str] = (), scheduler: bool = True, **settings: Any) -> Service:
        directory = tmp_path_factory.mktemp("run")
        directory.chmod(0o700)
        base = ApiConfig(model=str(real_model_path), port=0, runtime_dir=str(directory), log_interval_s=0.0)
        service = Service(replace(base, **settings), smollm2, list(keys), scheduler=scheduler)
        started.append(service)
        return service

    yield make
    for service in started:
        service.close()


@pytest.fixture(scope="session")
def shared_service(make_service: MakeService) -> Service:
    """One service for all tests that don't need their own."""
    return make_service()


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """The shared service, its scheduler as new."""
    shared_service.reset()
    yield shared_service
    shared_service.reset()
