"""What the runner takes the tokens of a model to spell: the same bytes as the API, or an error that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runner.grammar.header import read_keys
from runner.grammar.vocabulary import Vocabulary, VocabularyError, load_vocabulary
from services.text.tokenizer import load_tokenizer

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def test_every_token_of_the_real_model_is_what_the_api_takes_it_for(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    vocabulary = load_vocabulary(smollm2_path, tokenizer.vocab_size)
    assert vocabulary.tokens == [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    assert vocabulary.special == tokenizer.special_ids


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, "Ġthe", "ĉĊ", "Ã©"]
    backend = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(words)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    backend.add_tokens([AddedToken("<tool> é", special=False, normalized=False)])
    return backend


def byte_fallback() -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "▁", "a", "▁a", "▁▁", "é", "漢", "▁漢"]
    vocab = {text: index for index, text in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("▁", -1.0), ("▁Hi", -1.5), ("a▁b", -2.0), ("漢", -3.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_a_directory_of_each_family_is_read_as_the_api_reads_it(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    vocabulary = load_vocabulary(tmp_path, tokenizer.vocab_size)
    assert vocabulary.tokens == [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    assert vocabulary.special == tokenizer.special_ids


def test_tokens_that_only_the_configuration_declares_special_are_special(tmp_path: Path) -> None:
    backend = byte_level()
    backend.save(str(tmp_path / "tokenizer.json"))
    declared = {"2": {"content": backend.id_to_token(2), "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    assert load_vocabulary(tmp_path, 10).special == {0, 1, 2}


def test_ids_without_a_token_stand_for_nothing(tmp_path: Path) -> None:
    metaspace().save(str(tmp_path / "tokenizer.json"))
    assert load_vocabulary(tmp_path, 8) == Vocabulary(
        [b"<unk>", b"<s>", b" ", b" Hi", b"a b", "漢".encode(), b"", b""], frozenset({0, 1, 6, 7})
    )


def changed(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content.update(decoder={"type": "WordPiece", "prefix": "##"}), "WordPiece"),
        (lambda content: content.update(decoder=None), "decoder"),
        (lambda content: content.update(model={}), "vocab"),
        (lambda content: content["model"].update(vocab=5), "can't be read"),
    ],
)
def test_a_tokenizer_that_cannot_be_spelled_exactly_is_refused(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    changed(tmp_path / "tokenizer.json", change)
    with pytest.raises(VocabularyError, match=said):
        load_vocabulary(tmp_path, 10)


def test_a_directory_without_tokenizer_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="no tokenizer.json"):
        load_vocabulary(tmp_path, 10)
    (tmp_path / "model.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(VocabularyError, match="no GGUF file"):
        load_vocabulary(tmp_path / "model.gguf", 10)


@pytest.mark.parametrize("length", [30, 200, 5000, 900_000])
def test_a_header_that_is_cut_short_is_refused(smollm2_path: Path, tmp_path: Path, length: int) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        cut.write_bytes(file.read(length))
    with pytest.raises(VocabularyError):
        load_vocabulary(cut, 10)


def test_keys_of_a_header_are_read_whatever_lies_before_them(smollm2_path: Path) -> None:
    expected = {"tokenizer.ggml.eos_token_id": 2, "general.architecture": "llama", "llama.rope.freq_base": 100_000}
    assert read_keys(smollm2_path, (*expected, "absent")) == expected
