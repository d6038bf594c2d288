"""Builds a `tokenizers` backend from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

It builds only what it can build exactly. GGUF names the pre-tokenizer but doesn't carry it, so a name that isn't in the
table below is refused ("give --tokenizer"), because a wrong split gives other ids without any error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from services.text.parts import TokenizerError, TokenizerParts

# Part of the key of cached conversions: raise it when a change here can change ids.
CONVERTER_VERSION = 1

_GIVE_TOKENIZER = "give --tokenizer a Hugging Face directory with this model's tokenizer.json"

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type; 1 is normal, 5 unused

# Control tokens that end a turn or a document. GGUF has one key for the end id, while chat models have several; like
# llama.cpp, find the others by name, but only among control tokens.
_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Pre:
    """One pre-tokenizer kind: how text is split before BPE, and the defaults that come with it."""

    split: Callable[[], Any]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)


def _digits_then_gpt2() -> Any:
    # Each digit stands alone *before* the byte-level split; without this step "1234" gets other ids.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _regex_split(digits: str) -> Callable[[], Any]:
    pattern = f"{_CONTRACTIONS}|{_WORDS}|{digits}|{_REST}"

    def build() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
            ]
        )

    return build


_LLAMA3 = _Pre(_regex_split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = _Pre(_regex_split(r"\p{N}"), nfc=True)
_PRE = {
    "gpt-2": _Pre(_gpt2),
    "smollm": _Pre(_digits_then_gpt2),
    "starcoder": _Pre(_digits_then_gpt2),
    "refact": _Pre(_digits_then_gpt2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}


def parts_from_metadata(metadata: dict[str, Any], source: Path, backend: Tokenizer | None = None) -> TokenizerParts:
    """The tokenizer that the file's metadata describes; `backend`, when given, is an earlier conversion of it.

    Raises `TokenizerError` when the metadata lacks a vocabulary, contradicts itself, or names a kind that can't be
    built exactly.
    """
    if "tokenizer.ggml.tokens" not in metadata or "tokenizer.ggml.model" not in metadata:
        raise TokenizerError(f"{source} carries no tokenizer; {_GIVE_TOKENIZER}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"{source}: {len(tokens)} tokens but {len(types)} token types")

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return int(value) if value is not None and 0 <= int(value) < len(tokens) else None

    bos, eos = token_id("bos"), token_id("eos")
    return TokenizerParts(
        backend=backend if backend is not None else _build(metadata, source, tokens, types, bos, eos),
        bos_token_id=bos,
        eos_token_ids=_end_ids(tokens, types, [eos, token_id("eot"), token_id("eom")]),
        max_context=_context_length(metadata),
        special_tokens={
            f"{variable}_token": tokens[found]
            for variable, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (found := token_id(key)) is not None
        },
        chat_templates=_templates(metadata),
    )


def _build(
    metadata: dict[str, Any], source: Path, tokens: list[str], types: list[int], bos: int | None, eos: int | None
) -> Tokenizer:
    vocab = {text: index for index, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"{source}: {len(tokens) - len(vocab)} tokens occur twice; {_GIVE_TOKENIZER}")
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, source, vocab)
    elif kind == "llama":
        backend, adds_bos = _sentence_piece(metadata, source, vocab, types), True
    else:
        raise TokenizerError(f"{source}: tokenizer model {kind!r} can't be rebuilt from GGUF; {_GIVE_TOKENIZER}")

    added = [
        AddedToken(text, normalized=False, special=type_ != _USER_DEFINED)
        for text, type_ in zip(tokens, types, strict=True)
        if type_ in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    backend.add_tokens(added)
    if backend.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise TokenizerError(f"{source}: its added tokens don't keep their ids; {_GIVE_TOKENIZER}")
    _add_ends(
        backend,
        source,
        (tokens[bos], bos) if bos is not None else None,
        (tokens[eos], eos) if eos is not None else None,
        bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )
    return backend


def _byte_level(metadata: dict[str, Any], source: Path, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    pre = _PRE.get(name) if name is not None else None
    if pre is None:
        said = (
            f"pre-tokenizer {name!r} is not one of {', '.join(sorted(_PRE))}" if name else "no pre-tokenizer is named"
        )
        raise TokenizerError(f"{source}: {said}, so token ids could be wrong; {_GIVE_TOKENIZER}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    try:
        backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises plain Exception for a merge outside the vocabulary
        raise TokenizerError(f"{source}: its merges don't fit its vocabulary: {error}") from error
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.split()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentence_piece(metadata: dict[str, Any], source: Path, vocab: dict[str, int], types: list[int]) -> Tokenizer:
    scores: list[float] | None = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocab):
        raise TokenizerError(f"{source}: a SentencePiece vocabulary without scores; {_GIVE_TOKENIZER}")
    if metadata.get("tokenizer.ggml.precompiled_charsmap") or metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise TokenizerError(f"{source}: it normalizes text in a way that can't be rebuilt exactly; {_GIVE_TOKENIZER}")
    missing = sum(f"<0x{byte:02X}>" not in vocab for byte in range(256))
    if missing:
        raise TokenizerError(f"{source}: {missing} of its 256 byte tokens are missing; {_GIVE_TOKENIZER}")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unk = next((text for text, index in vocab.items() if index == unknown), None) if unknown is not None else None
    merges = merges_from_scores(vocab, scores, types, source)
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def merges_from_scores(
    vocab: dict[str, int], scores: list[float], types: list[int], source: Path
) -> list[tuple[str, str]]:
    """The merge list that makes BPE do what SentencePiece does with scores: the best-scored result merges first.

    Exact only while scores order the merges, so equal scores of two mergeable pieces are refused.
    """
    plain = {text for text, index in vocab.items() if types[index] not in (_UNKNOWN, _CONTROL, _BYTE)}
    merges: list[tuple[str, str]] = []
    last_score, last_piece = None, ""
    for piece in sorted(plain, key=lambda text: -scores[vocab[text]]):
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        local = [(left, right) for left, right in splits if left in plain and right in plain]
        if not local:
            continue
        score = scores[vocab[piece]]
        if score == last_score:
            raise TokenizerError(
                f"{source}: the pieces {last_piece!r} and {piece!r} share the score {score}, so the order of their "
                f"merges is not in the file; {_GIVE_TOKENIZER}"
            )
        last_score, last_piece = score, piece
        merges.extend(local)
    return merges


def _add_ends(
    backend: Tokenizer,
    source: Path,
    bos: tuple[str, int] | None,
    eos: tuple[str, int] | None,
    add_bos: bool,
    add_eos: bool,
) -> None:
    if (add_bos and bos is None) or (add_eos and eos is None):
        raise TokenizerError(f"{source}: it asks for a begin or end token and names none; {_GIVE_TOKENIZER}")
    used = [token for token, wanted in ((bos, add_bos), (eos, add_eos)) if wanted and token is not None]
    if not used:
        return
    before, after = (["$bos"] if add_bos else []), (["$eos"] if add_eos else [])
    names = {"$bos": bos[0] if bos else "", "$eos": eos[0] if eos else ""}
    single = [names[part] for part in before] + ["$A"] + [names[part] for part in after]
    pair = single + [f"{part}:1" for part in [*(names[p] for p in before), "$B", *(names[p] for p in after)]]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)


def _end_ids(tokens: list[str], types: list[int], named: list[int | None]) -> tuple[int, ...]:
    by_text = {tokens[index]: index for index, type_ in enumerate(types) if type_ == _CONTROL}
    found = [by_text.get(text) for text in _END_TOKENS if not (text == "<|end|>" and "<|return|>" in by_text)]
    return tuple(dict.fromkeys(index for index in [*named, *found] if index is not None))


def _context_length(metadata: dict[str, Any]) -> int | None:
    value = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return int(value) if value else None


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    return ({"default": metadata[key]} if metadata.get(key) else {}) | named
