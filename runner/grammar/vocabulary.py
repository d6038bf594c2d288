"""The bytes that each token of a model stands for, read from its GGUF file or its tokenizer.json.

Only what a grammar must know: nothing here cuts text into tokens. A tokenizer whose tokens aren't plainly bytes is
refused, since a wrong spelling would let an answer through that breaks its grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.grammar.header import read_keys

Spell = Callable[[str], bytes]

_UNKNOWN, _CONTROL, _UNUSED = 2, 3, 5  # token types of GGUF that no text contains
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class VocabularyError(ValueError):
    """What the tokens of this model spell can't be told. The message says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[i]`: the bytes of id i, in the middle of a text. `special`: ids that stand for no text."""

    tokens: list[bytes]
    special: frozenset[int]


def load_vocabulary(model: Path, size: int) -> Vocabulary:
    """The first `size` ids of a GGUF file or a Hugging Face directory. Raises VocabularyError."""
    try:
        return _from_gguf(model, size) if model.is_file() else _from_directory(model, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, VocabularyError):
            raise
        raise VocabularyError(f"the vocabulary of {model} can't be read: {error}") from error


def _from_gguf(path: Path, size: int) -> Vocabulary:
    names = ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    kind, texts, types = (read_keys(path, names).get(name) for name in names)
    if not texts:
        raise VocabularyError(f"{path} carries no tokenizer")
    if kind not in ("gpt2", "llama"):
        raise VocabularyError(f"{path}: tokens of kind {kind!r} aren't known; gpt2 and llama are")
    special = {index for index, type_ in enumerate(types or ()) if type_ in (_UNKNOWN, _CONTROL, _UNUSED)}
    spell = _byte_level if kind == "gpt2" else _pieces("▁", byte_tokens=True)
    return _vocabulary({index: spell(text) for index, text in enumerate(texts)}, special, size)


def _from_directory(directory: Path, size: int) -> Vocabulary:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise VocabularyError(f"{directory} has no tokenizer.json")
    content = json.loads(file.read_bytes())
    vocab = content["model"]["vocab"]
    texts = vocab.items() if isinstance(vocab, dict) else ((piece[0], index) for index, piece in enumerate(vocab))
    spell = _spelling(content.get("decoder"), file)
    spelled = {index: spell(text) for text, index in texts}
    added = {token["id"]: token for token in content.get("added_tokens") or ()}
    settings = directory / "tokenizer_config.json"
    declared = json.loads(settings.read_bytes()).get("added_tokens_decoder") if settings.is_file() else None
    for index, token in (declared or {}).items():
        added[int(index)] = token
    # An added token stands for itself, whatever the decoder does with others.
    spelled |= {index: token["content"].encode("utf-8", "replace") for index, token in added.items()}
    return _vocabulary(spelled, {index for index, token in added.items() if token.get("special")}, size)


def _vocabulary(spelled: dict[int, bytes], special: set[int], size: int) -> Vocabulary:
    tokens = [spelled.get(index, b"") for index in range(size)]
    return Vocabulary(tokens, frozenset(index for index in range(size) if index in special or not tokens[index]))


def _spelling(decoder: dict[str, Any] | None, file: Path) -> Spell:
    """What the decoder of a tokenizer.json makes of a token in the middle of a text."""
    steps = (decoder or {}).get("decoders") or [decoder or {}]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if kinds == ["Metaspace"]:
        return _pieces(steps[0].get("replacement", "▁"), byte_tokens=False)
    known = {"Replace", "ByteFallback", "Fuse", "Strip"}
    spaces = [step["pattern"].get("String") for step in steps if step.get("type") == "Replace"]
    if set(kinds) <= known and "Fuse" in kinds and len(spaces) == 1 and spaces[0]:
        return _pieces(spaces[0], byte_tokens="ByteFallback" in kinds)
    raise VocabularyError(f"{file}: what its decoder ({' + '.join(map(str, kinds))}) does can't be told token by token")


def _alphabet() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: those that print are themselves, the others are taken from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:  # an added token with other characters stands for itself
        return text.encode("utf-8", "replace")


def _pieces(space: str, *, byte_tokens: bool) -> Spell:
    """SentencePiece: one character stands for a space, and perhaps `<0x0A>` for a byte."""

    def spell(text: str) -> bytes:
        if byte_tokens and (match := _BYTE_TOKEN.match(text)):
            return bytes([int(match[1], 16)])
        return text.replace(space, " ").encode("utf-8", "replace")

    return spell
