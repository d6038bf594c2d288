"""Loads a model's tokenizer, from a GGUF file or a Hugging Face directory, and turns text into ids and back.

It neither renders chats nor streams; see `chat_template` and `detokenizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.text.conversion_cache import load_gguf
from services.text.hf_tokenizer import load_directory
from services.text.parts import TokenizerError, TokenizerParts
from services.text.pieces import Pieces

__all__ = ["TextError", "Tokenizer", "TokenizerError", "load_tokenizer"]


class TextError(ValueError):
    """Text that can't be tokenized: it holds half of a surrogate pair, which no UTF-8 text can."""


class Tokenizer:
    """Text to ids and back, with what the model's files say about special tokens, end ids, context and templates.

    A special token that a user types (`<|im_end|>`) becomes the control token, as in most engines: the chat template
    itself writes control tokens as text, and completions clients rely on it. Whoever relays untrusted text into a chat
    must filter it before it gets here.

    Decoding never "cleans up" spaces before punctuation, whatever `clean_up_tokenization_spaces` says: that rewrites
    text already sent, and would make the streamed and the whole answer differ.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        # Saved tokenizer files may carry training-time limits that silently cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = Pieces(backend)
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        if self.vocab_size and backend.id_to_token(self.vocab_size - 1) is None:  # ids with gaps
            self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._pieces.check(self.vocab_size)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = tuple(index for index in parts.eos_token_ids if 0 <= index < self.vocab_size)
        self.max_context = parts.max_context
        self.special_tokens = parts.special_tokens
        self.chat_templates = parts.chat_templates

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template; None if the model brings none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; with `add_special_tokens` also the begin (and end) tokens that the model wants around it.

        Raises `TextError`, naming the position, if the text holds a lone surrogate.
        """
        return self.encode_many([text], add_special_tokens)[0]

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text. Releases the GIL while it works, so a thread that calls it doesn't block the others."""
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise TextError(
                    f"text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
                    "it is not valid Unicode text"
                ) from None
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, decoded at once; bytes that are no UTF-8 become U+FFFD. Ids without a token vanish."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        pieces = [(index, piece) for index in token_ids if index not in skipped and (piece := self._pieces.of(index))]
        if not pieces:
            return ""
        rest = b"".join(piece for _, piece in pieces[1:])
        return (self._pieces.first(pieces[0][0]) + rest).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token in the middle of a text stands for; a special token's are those of its name."""
        return self._pieces.of(token_id)

    def token_text(self, token_id: int) -> str | None:
        """The text of a token that is made of whole characters, in the middle of a text; None for any other."""
        return self._pieces.text(token_id)

    def first_token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token with nothing before it; SentencePiece families drop its leading space."""
        return self._pieces.first(token_id)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`); None for an id that has none, negative ones too."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    def save(self, path: str | Path) -> None:
        """Write it as a `tokenizer.json` that the `tokenizers` library reads."""
        self._backend.save(str(path))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file, of a Hugging Face directory, or of the directory that holds a `tokenizer.json`.

    Raises `TokenizerError`, saying what to do, when it is missing or can't be rebuilt exactly.
    """
    path = Path(path)
    if path.name == "tokenizer.json":
        path = path.parent
    if path.is_dir():
        return Tokenizer(load_directory(path))
    if not path.is_file():
        raise TokenizerError(f"no tokenizer at {path}: there is no such file or directory")
    return Tokenizer(load_gguf(path))
