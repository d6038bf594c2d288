"""Dequantized weights between starts: the second load is the first one, and a bad entry costs nothing but time."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from runner.loader import LoadedModel, ModelError, cache, default_cache_dir, load_model
from runner.loader import load as loading
from runner.ops import TorchOps
from tests.runner.gguf_files import write_gguf

PROMPT = list(range(3, 40))


@pytest.fixture
def source(tmp_path: Path, tiny_model: Callable[..., Any]) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen3"), quantization=GGMLQuantizationType.BF16)


@pytest.fixture
def logits(paged_rows: Callable[..., Any]) -> Callable[[LoadedModel], torch.Tensor]:
    return lambda model: paged_rows(model.decoder, 1, len(PROMPT)).step({0: PROMPT})[0]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The GGUF files that are opened from here on."""
    paths: list[Path] = []
    original = loading.GgufCheckpoint
    monkeypatch.setattr(loading, "GgufCheckpoint", lambda path: (paths.append(path), original(path))[1])
    return paths


def load(source: Path, directory: Path | None, dtype: str = "auto", **options: Any) -> LoadedModel:
    return load_model(source, dtype, TorchOps(), cache_dir=directory, **options)


def entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def test_the_second_load_equals_the_first_without_opening_the_file(
    source: Path, tmp_path: Path, logits: Any, opened: list[Path]
) -> None:
    first = load(source, tmp_path / "cache")
    second = load(source, tmp_path / "cache")
    assert opened == [source]
    assert (second.config, second.dtype) == (first.config, first.dtype)
    assert second.tokenizer_vocab_size == first.tokenizer_vocab_size == 90
    assert torch.equal(logits(second), logits(first))


def test_without_a_directory_nothing_is_kept(source: Path, tmp_path: Path, opened: list[Path]) -> None:
    load(source, None)
    load(source, None)
    assert opened == [source, source]
    assert entries(tmp_path) == [source]


def test_a_changed_file_is_read_again_and_replaces_its_entry(
    source: Path, tmp_path: Path, logits: Any, tiny_model: Callable[..., Any]
) -> None:
    old = load(source, tmp_path / "cache")
    (before,) = entries(tmp_path / "cache")
    write_gguf(source, tiny_model("qwen2"), quantization=GGMLQuantizationType.BF16)
    new = load(source, tmp_path / "cache")
    (after,) = entries(tmp_path / "cache")
    assert before != after
    assert (old.config.qk_norm, new.config.qk_norm) == (True, False)
    assert torch.equal(logits(new), logits(load(source, None)))


def test_a_touched_file_is_read_again(source: Path, tmp_path: Path, opened: list[Path]) -> None:
    load(source, tmp_path / "cache")
    status = source.stat()
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    load(source, tmp_path / "cache")
    assert opened == [source, source]


def test_each_dtype_has_its_own_entry(source: Path, tmp_path: Path) -> None:
    for dtype in ("auto", "float32", "auto", "float32"):
        assert load(source, tmp_path / "cache", dtype).dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)
    assert len(entries(tmp_path / "cache")) == 2


@pytest.mark.parametrize("damage", ["truncate", "garbage", "foreign", "misshapen"])
def test_a_bad_entry_is_replaced(
    damage: str, source: Path, tmp_path: Path, logits: Any, opened: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = logits(load(source, tmp_path / "cache"))
    (entry,) = entries(tmp_path / "cache")
    good = entry.read_bytes()
    if damage == "truncate":
        os.truncate(entry, len(good) - 10)
    elif damage == "garbage":
        entry.write_bytes(b"garbage")
    elif damage == "foreign":
        cache.save_file({"x": torch.ones(1)}, entry)
    else:
        model = cache.read(entry)
        assert model is not None
        tensors = {name: tensor.clone() for name, tensor in model.parameters.items()}
        tensors["norm.weight"] = torch.ones(31)
        cache.write(entry, cache.CachedModel(model.config, model.tokenizer_vocab_size, tensors))
    assert torch.equal(logits(load(source, tmp_path / "cache")), wanted)
    assert entry.name in caplog.text
    assert torch.equal(logits(load(source, tmp_path / "cache")), wanted)
    assert opened == [source, source]


def test_an_unwritable_directory_is_a_warning_and_leaves_nothing(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert load(source, tmp_path / "cache").dtype == torch.bfloat16
    assert "can't cache" in caplog.text


def test_a_failed_write_leaves_no_partial_entry(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "save_file", full)
    load(source, tmp_path / "cache")
    assert entries(tmp_path / "cache") == []
    assert "No space left" in caplog.text


def test_a_model_beyond_the_size_limit_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_MAX_BYTES", 1000)
    load(source, tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_only_the_user_can_enter_the_directory(source: Path, tmp_path: Path) -> None:
    load(source, tmp_path / "a" / "cache")
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700


def test_a_cached_model_still_refuses_a_length_beyond_its_own(source: Path, tmp_path: Path) -> None:
    load(source, tmp_path / "cache")
    with pytest.raises(ModelError, match="128 tokens, not 129"):
        load(source, tmp_path / "cache", max_model_len=129)


def test_the_default_directory_follows_the_users_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "triptych" / "weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "triptych" / "weights"


def test_the_real_model_comes_back_whole(
    smollm2_path: Path, smollm2_cache: Path, smollm2_bfloat16: LoadedModel
) -> None:
    again = load_model(smollm2_path, "auto", TorchOps(), max_model_len=1024, cache_dir=smollm2_cache)
    assert again.config == smollm2_bfloat16.config
    hidden = torch.randn(3, 576, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(again.decoder.logits(hidden), smollm2_bfloat16.decoder.logits(hidden))
