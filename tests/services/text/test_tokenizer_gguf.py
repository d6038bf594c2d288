"""Tokenizers rebuilt from GGUF metadata: the same ids as independent implementations, or a clear refusal."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from tokenizers import Tokenizer as Backend
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from services.text.conversion_cache import SLOW_BUILD_S, load_gguf
from services.text.gguf_metadata import read_metadata
from services.text.gguf_tokenizer import merges_from_scores
from services.text.pieces import _ALPHABET
from services.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer

WriteGguf = Callable[[Mapping[str, Any]], Path]

CORPUS = [
    "",
    " ",
    "  two spaces",
    "\n\n",
    "a\n\n\n  b\t\tc \n",
    "1234567",
    "v3.14, 2026-11-30 and ½ ² ٣ Ⅷ",
    "naïve 漢字 🇫🇷",
    "👩‍💻 é e\u0301",
    "<s>hi",
    "don't I'LL they've 'tis",
    "def f(x):\n    return x**2  # ok\n",
    "Hello , world !    .",
    "Ünïcödé ßtraße Ελληνικά Русский العربية हिन्दी ไทย",
    "https://example.org/a?b=c&d=%20 [x](y) {z}",
    "\u00a0\u2003\u200b\ufeff\x00\x7f",
    "The capital of France is Paris. " * 20,
]


@pytest.fixture(scope="module")
def metadata(real_model_path: Path) -> dict[str, Any]:
    return read_metadata(real_model_path)


# A byte-level BPE written from its definition, sharing nothing with the library.
_WORDS = regex.compile(r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def slow_twin(metadata: dict[str, Any]) -> Callable[[str], list[int]]:
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    char_of = {byte: char for char, byte in _ALPHABET.items()}

    @cache
    def word(text: str) -> list[int]:
        parts = [char_of[byte] for byte in text.encode()]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [vocab[part] for part in parts if part in vocab]

    def encode(text: str) -> list[int]:
        # The digit split comes first, and what stands between digits is then split on its own.
        chunks = regex.split(r"(\p{N})", text)
        return [index for chunk in chunks for match in _WORDS.findall(chunk) for index in word(match)]

    return encode


def test_ids_equal_an_independent_implementation(smollm2: Tokenizer, metadata: dict[str, Any]) -> None:
    encode = slow_twin(metadata)
    for text in CORPUS:
        assert smollm2.encode(text) == encode(text), text
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choices(" \n\t'abcXYZ019.,é漢🇫½_-", k=rng.randint(1, 30)))
        assert smollm2.encode(text) == encode(text), text


@pytest.mark.parametrize("text", CORPUS)
def test_text_survives_the_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_every_digit_is_a_token_of_its_own(smollm2: Tokenizer) -> None:
    assert [smollm2.id_to_token(index) for index in smollm2.encode("1234567")] == list("1234567")
    assert [smollm2.id_to_token(index) for index in smollm2.encode("a 12")] == ["a", "Ġ", "1", "2"]


def test_each_added_token_typed_in_text_is_one_control_token(smollm2: Tokenizer) -> None:
    assert len(smollm2.special_ids) == 17
    for index in smollm2.special_ids:
        text = smollm2.id_to_token(index)
        assert text is not None
        assert smollm2.encode(f"a{text}b") == [*smollm2.encode("a"), index, *smollm2.encode("b")]
        assert smollm2.decode([index], skip_special_tokens=False) == text
        assert smollm2.decode([index]) == ""


def test_facts_beside_the_vocabulary_come_from_the_file(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.max_context == 8192
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.chat_template is not None and "<|im_start|>" in smollm2.chat_template
    assert smollm2.encode("hi", add_special_tokens=True) == smollm2.encode("hi", add_special_tokens=False)


def test_the_named_end_id_comes_first_and_other_end_tokens_join_it(smollm2: Tokenizer) -> None:
    assert [smollm2.id_to_token(index) for index in smollm2.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_every_token_decodes_as_the_library_decodes_it(smollm2: Tokenizer, real_model_path: Path) -> None:
    backend = load_gguf(real_model_path).backend
    for index in range(smollm2.vocab_size):
        assert smollm2.decode([index], False) == backend.decode([index], skip_special_tokens=False)


def test_the_header_reader_agrees_with_the_gguf_package(metadata: dict[str, Any], real_model_path: Path) -> None:
    fields = gguf.GGUFReader(str(real_model_path)).fields
    for key, value in metadata.items():
        assert value == fields[key].contents(), key


def byte_level(pre: str | None, **more: Any) -> dict[str, Any]:
    """A tiny byte-level vocabulary: the 256 bytes, a few merges, two control tokens."""
    merges = ["Ġ a", "a b", "1 2", "12 3", "ab c"]
    tokens = [*_ALPHABET, *(merge.replace(" ", "") for merge in merges), "abcd", "<|begin|>", "<|eot_id|>"]
    types = [1] * (len(tokens) - 2) + [3, 3]
    named = {"tokenizer.ggml.pre": pre} if pre else {}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **named,
        **more,
    }


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "123 a", ["123", "Ġa"]),
        ("smollm", "123 a", ["1", "2", "3", "Ġa"]),
        ("llama-bpe", "1231", ["<|begin|>", "123", "1"]),
        ("llama-bpe", "abcd", ["<|begin|>", "abcd"]),  # a whole word in the vocabulary needs no merges
        ("gpt-2", "abcd", ["abc", "d"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed first, as the original tokenizer does
        ("gpt-2", "e\u0301", ["e", "Ì", "ģ"]),
    ],
)
def test_each_pre_tokenizer_kind_splits_its_own_way(
    write_gguf: WriteGguf, pre: str, text: str, expected: list[str]
) -> None:
    tokenizer = load_tokenizer(write_gguf(byte_level(pre)))
    assert [tokenizer.id_to_token(index) for index in tokenizer.encode(text)] == expected


@pytest.mark.parametrize(("pre", "original"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_ids_equal_those_of_the_original_tokenizers_class(write_gguf: WriteGguf, pre: str, original: Any) -> None:
    metadata = byte_level(pre)
    tokenizer = load_tokenizer(write_gguf(metadata))
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    reference = original(vocab=vocab, merges=merges)
    for text in CORPUS:
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize("pre", ["deepseek-v9", "default", None])
def test_an_unknown_pre_tokenizer_is_refused_with_what_to_do(write_gguf: WriteGguf, pre: str | None) -> None:
    with pytest.raises(TokenizerError, match="give --tokenizer"):
        load_tokenizer(write_gguf(byte_level(pre)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "t5"}, "can't be rebuilt"),
        ({"tokenizer.ggml.merges": ["x zzz"]}, "merges don't fit"),
        ({"tokenizer.ggml.token_type": [1, 3]}, "token types"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "occur twice"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6}, "names none"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    write_gguf: WriteGguf, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TokenizerError, match=reason):
        load_tokenizer(write_gguf(byte_level("gpt-2") | change))


def test_begin_and_end_tokens_are_added_when_the_file_says_so(write_gguf: WriteGguf) -> None:
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(write_gguf(byte_level("gpt-2", **flags)))
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_ids[0]
    assert tokenizer.encode("ab") == [begin, tokenizer.token_to_id("ab"), end]
    assert tokenizer.encode("ab", add_special_tokens=False) == [tokenizer.token_to_id("ab")]


def test_named_templates_of_a_file_are_all_read(write_gguf: WriteGguf) -> None:
    more = {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"}
    assert load_tokenizer(write_gguf(byte_level("gpt-2", **more))).chat_templates == {"default": "d", "tool_use": "t"}


def test_a_file_without_a_template_has_none(write_gguf: WriteGguf) -> None:
    assert load_tokenizer(write_gguf(byte_level("gpt-2"))).chat_template is None


def sentence_piece(**more: Any) -> dict[str, Any]:
    """A tiny SentencePiece vocabulary whose scores, not its ids, order the merges."""
    pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "aa", "aab", "bc", "▁▁", "▁▁▁"]
    scores = [-100.0, -101.0, -102.0, -103.0, -5.0, -3.0, -7.0, -8.0, -9.0, -2.0, -4.0, -6.0, -10.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def sentence_piece_twin(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's rule: join the adjacent pair whose result scores best, leftmost first; then bytes."""
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    score = {token: metadata["tokenizer.ggml.scores"][index] for token, index in vocab.items()}
    parts = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        joined = [(score[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in vocab]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [vocab[part]] if part in vocab else [vocab[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


def test_a_sentencepiece_vocabulary_gives_the_ids_of_its_scores(write_gguf: WriteGguf) -> None:
    metadata = sentence_piece()
    tokenizer, rng = load_tokenizer(write_gguf(metadata)), random.Random(5)
    for _ in range(2000):
        text = "".join(rng.choices("abc   é漢", k=rng.randrange(12)))
        ids = tokenizer.encode(text)
        assert ids == [1, *sentence_piece_twin(metadata, text)], text
        assert tokenizer.decode(ids) == text


def test_a_space_prefix_is_added_only_when_the_file_wants_it(write_gguf: WriteGguf) -> None:
    tokenizer = load_tokenizer(write_gguf(sentence_piece(**{"tokenizer.ggml.add_space_prefix": False})))
    assert [tokenizer.id_to_token(index) for index in tokenizer.encode("ab", add_special_tokens=False)] == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_a_control_token_in_sentencepiece_text_is_that_token(write_gguf: WriteGguf) -> None:
    tokenizer = load_tokenizer(write_gguf(sentence_piece()))
    tokens = [tokenizer.id_to_token(index) for index in tokenizer.encode("<s>ab", add_special_tokens=False)]
    assert tokens == ["<s>", "▁ab"]


def test_scores_that_do_not_order_the_merges_are_refused(write_gguf: WriteGguf) -> None:
    metadata = sentence_piece()
    metadata["tokenizer.ggml.scores"] = [0.0] * len(metadata["tokenizer.ggml.scores"])
    with pytest.raises(TokenizerError, match="share the score"):
        load_tokenizer(write_gguf(metadata))


def test_merges_follow_scores_and_not_ids() -> None:
    vocab = {text: index for index, text in enumerate(["a", "b", "ab", "aa"])}
    assert merges_from_scores(vocab, [0.0, 0.0, -2.0, -1.0], [1] * 4, Path("x")) == [("a", "a"), ("a", "b")]


class FakeClock:
    """Every reading is `step` seconds after the last."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_slow_conversion_is_kept_and_used_again(write_gguf: WriteGguf, tmp_path: Path) -> None:
    path, store = write_gguf(sentence_piece()), tmp_path / "cache"
    built = load_gguf(path, cache=store, clock=FakeClock(2 * SLOW_BUILD_S)).backend
    (entry,) = store.iterdir()
    marked = Backend.from_file(str(entry))
    marked.add_special_tokens(["<marker>"])
    marked.save(str(entry))
    again = load_gguf(path, cache=store, clock=FakeClock(0)).backend
    assert again.token_to_id("<marker>") is not None
    assert again.encode("ab c").ids == built.encode("ab c").ids


def test_a_fast_conversion_is_not_kept(write_gguf: WriteGguf, tmp_path: Path) -> None:
    load_gguf(write_gguf(sentence_piece()), cache=tmp_path / "cache", clock=FakeClock(0))
    assert not (tmp_path / "cache").exists()


def test_a_changed_file_or_a_broken_entry_is_converted_again(write_gguf: WriteGguf, tmp_path: Path) -> None:
    store, slow = tmp_path / "cache", 2 * SLOW_BUILD_S
    path = write_gguf(sentence_piece())
    load_gguf(path, cache=store, clock=FakeClock(slow))
    (entry,) = store.iterdir()
    entry.write_text("{", encoding="utf-8")
    assert load_gguf(path, cache=store, clock=FakeClock(slow)).backend.encode("ab").tokens == ["<s>", "▁ab"]
    write_gguf(sentence_piece(**{"tokenizer.ggml.add_bos_token": False}))
    assert load_gguf(path, cache=store, clock=FakeClock(slow)).backend.encode("ab").tokens == ["▁ab"]
    assert len(list(store.iterdir())) == 2


def test_a_cache_that_cannot_be_written_does_no_harm(write_gguf: WriteGguf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    parts = load_gguf(write_gguf(sentence_piece()), cache=tmp_path / "file" / "x", clock=FakeClock(2 * SLOW_BUILD_S))
    assert parts.backend.encode("ab").tokens == ["<s>", "▁ab"]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(40), b"GGUF\x00\x00\x00\x03" + bytes(40)])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match="GGUF"):
        load_tokenizer(path)


def test_a_file_cut_anywhere_in_its_header_is_refused(write_gguf: WriteGguf) -> None:
    path = write_gguf(byte_level("gpt-2"))
    whole = path.read_bytes()
    for size in range(24, len(whole) - 8, 41):
        path.write_bytes(whole[:size])
        with pytest.raises(TokenizerError):
            load_tokenizer(path)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="nothing-here"):
        load_tokenizer(tmp_path / "nothing-here")
