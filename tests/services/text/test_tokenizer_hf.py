"""Tokenizers from Hugging Face directories, and what both kinds of file must agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.text.gguf_metadata import read_metadata
from services.text.tokenizer import TextError, Tokenizer, TokenizerError, load_tokenizer

TEXTS = ["  two spaces", "\n\n", "1234567", "naïve 漢字 🇫🇷 👩‍💻", "<s>hi", "a<|im_end|>b <|im_start|>user\nx"]


def save(path: Path, **files: Any) -> Path:
    """Writes the files, `tokenizer_config={…}` to tokenizer_config.json and so on."""
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def tiny(**special: bool) -> Backend:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=flag, normalized=False) for text, flag in special.items()])
    return backend


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny(**{"<s>": True, "</s>": True, "<end>": True}).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture(scope="module")
def smollm2_directory(real_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer.json as its authors published it, written out from what the GGUF file lists."""
    path, facts = tmp_path_factory.mktemp("smollm2"), read_metadata(real_model_path)
    tokens = facts["tokenizer.ggml.tokens"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [
        {"id": index, "content": token, **flags}
        for index, token in enumerate(tokens)
        if facts["tokenizer.ggml.token_type"][index] == 3
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return save(
        path,
        tokenizer={
            "version": "1.0",
            "truncation": {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
            "post_processor": None,
            "decoder": byte_level | {"add_prefix_space": True},
            "model": {
                "type": "BPE",
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": facts["tokenizer.ggml.merges"],
            },
        },
        tokenizer_config={
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "chat_template": facts["tokenizer.chat_template"],
            "model_max_length": 8192,
            "tokenizer_class": "GPT2Tokenizer",
        },
        generation_config={"bos_token_id": 1, "eos_token_id": 2},
        config={"max_position_embeddings": 8192, "eos_token_id": 2},
    )


def test_the_same_model_as_directory_and_as_gguf_gives_the_same_ids(
    smollm2: Tokenizer, smollm2_directory: Path
) -> None:
    other = load_tokenizer(smollm2_directory)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(smollm2_directory / "tokenizer.json"))
    for text in [*TEXTS, "The quick brown fox. " * 30]:
        expected = reference(text)["input_ids"]
        assert other.encode(text) == smollm2.encode(text) == expected
        assert other.decode(expected) == smollm2.decode(expected)
    assert other.special_ids == smollm2.special_ids
    assert (other.vocab_size, other.bos_token_id, other.max_context) == (49152, 1, 8192)
    assert other.eos_token_ids[0] == smollm2.eos_token_ids[0]
    assert other.chat_template == smollm2.chat_template


def test_a_saved_truncation_does_not_cut_prompts(smollm2_directory: Path) -> None:
    assert len(load_tokenizer(smollm2_directory).encode("one two three four five six")) == 6


def test_end_ids_are_the_union_of_all_files_generation_config_first(directory: Path) -> None:
    save(
        directory,
        generation_config={"eos_token_id": [258, 257]},
        config={"eos_token_id": 257},
        tokenizer_config={"eos_token": {"content": "a", "special": True}},
    )
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_ids == (258, 257, tokenizer.token_to_id("a"))


def test_an_end_id_outside_the_vocabulary_is_left_out(directory: Path) -> None:
    save(directory, generation_config={"eos_token_id": [257, 999999, -1]})
    assert load_tokenizer(directory).eos_token_ids == (257,)


def test_tokens_that_only_the_config_declares_are_added_and_special(directory: Path) -> None:
    new = {"content": "<new>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    save(directory, tokenizer_config={"added_tokens_decoder": {"259": new}})
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("<new>") == [259]
    assert 259 in tokenizer.special_ids and tokenizer.vocab_size == 260
    assert tokenizer.id_to_token(259) == "<new>"


def test_files_that_disagree_about_an_id_are_refused(directory: Path) -> None:
    save(directory, tokenizer_config={"added_tokens_decoder": {"7": {"content": "<end>", "special": True}}})
    with pytest.raises(TokenizerError, match="'<end>' the id 7"):
        load_tokenizer(directory)


def test_named_special_tokens_are_special_even_if_tokenizer_json_forgot(tmp_path: Path) -> None:
    tiny(**{"<s>": False}).save(str(tmp_path / "tokenizer.json"))
    save(tmp_path, special_tokens_map={"bos_token": {"content": "<s>"}, "pad_token": "<absent>"})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_token_id in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("<s>a")) == "a"
    assert tokenizer.vocab_size == 257  # the absent one got no id


def test_special_flags_match_transformers(directory: Path) -> None:
    save(
        directory,
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    reference = AutoTokenizer.from_pretrained(directory)
    ids = load_tokenizer(directory).encode("<s>a b</s>c<end>")
    assert ids == reference("<s>a b</s>c<end>")["input_ids"]
    assert load_tokenizer(directory).decode(ids) == reference.decode(ids, skip_special_tokens=True) == "a bc"


def test_a_separate_template_file_wins_over_the_config(directory: Path) -> None:
    save(directory, tokenizer_config={"chat_template": "from the config"})
    assert load_tokenizer(directory).chat_template == "from the config"
    (directory / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(directory).chat_template == "from the file"


def test_a_list_of_named_templates_is_read(directory: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    save(directory, tokenizer_config={"chat_template": named})
    assert load_tokenizer(directory).chat_templates == {"default": "d", "tool_use": "t"}


def test_a_directory_without_a_template_has_none(directory: Path) -> None:
    assert load_tokenizer(directory).chat_template is None


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"config": {"max_position_embeddings": 99}, "tokenizer_config": {"model_max_length": 7}}, 99),
        ({"config": {"text_config": {"max_position_embeddings": 5}}}, 5),
        ({"tokenizer_config": {"model_max_length": 7}}, 7),
        ({"tokenizer_config": {"model_max_length": 1e30}}, None),
    ],
)
def test_the_context_length_comes_from_the_model_then_the_tokenizer(
    directory: Path, files: dict[str, Any], limit: int | None
) -> None:
    assert load_tokenizer(save(directory, **files)).max_context == limit


def test_the_path_of_tokenizer_json_itself_will_do(directory: Path) -> None:
    assert load_tokenizer(directory / "tokenizer.json").encode("<s>") == [256]


def test_a_directory_without_tokenizer_json_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match="no tokenizer.json.*--tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
def test_a_broken_file_is_named(directory: Path, name: str) -> None:
    (directory / f"{name}.json").write_text("{")
    with pytest.raises(TokenizerError, match=f"{name}.json"):
        load_tokenizer(directory)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    backend = tiny()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_a_lone_surrogate_is_named_with_its_position(smollm2: Tokenizer) -> None:
    with pytest.raises(TextError, match=r"U\+D83D\) at character 3"):
        smollm2.encode("abc\ud83d")
    with pytest.raises(ValueError):
        smollm2.encode_many(["fine", "\udc00"])
    assert smollm2.decode(smollm2.encode(json.loads('"\\ud83d\\ude00"'))) == "😀"


def test_many_texts_give_what_each_gives_alone(smollm2: Tokenizer) -> None:
    assert smollm2.encode_many(TEXTS) == [smollm2.encode(text) for text in TEXTS]
    assert smollm2.encode_many([]) == []


def test_ids_that_do_not_exist_have_no_token_and_no_text(smollm2: Tokenizer) -> None:
    for index in (-1, 49152, 2**31, 2**40):
        assert smollm2.id_to_token(index) is None
        assert smollm2.token_bytes(index) == b""
        assert smollm2.decode([index]) == ""
