"""Maps token ids to the bytes they stand for, for the decoders that language models use.

Text is then simply the concatenated bytes read as UTF-8, so decoding in steps and decoding at once can't differ. A
decoder that this doesn't describe exactly is refused when the tokenizer loads, never approximated.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from services.text.parts import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_ID_LIMIT = 2**32  # the library's ids are u32, and it raises OverflowError beyond
_SAMPLE = 256  # ids compared with the library's own decoder when a tokenizer loads


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: the bytes that print keep their character, the others take U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + n): byte for n, byte in enumerate(b for b in range(256) if b not in set(printable))}
    return alphabet


_ALPHABET = _byte_level_alphabet()


class Pieces:
    """The bytes of each token of one tokenizer, computed on first use.

    One difference to the `tokenizers` library is deliberate: where a run of byte-fallback tokens is not valid UTF-8 the
    library replaces the whole run, however long; here only the broken part becomes U+FFFD. That keeps the valid
    characters, and a stream never has to take back what it has sent.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._space: str | None = None  # the character that stands for a space
        self._strip_text = False  # one leading space of the whole text goes
        self._strip_token = False  # all leading-space marks of the first token go
        self._read(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None)

    def of(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text. An id without a token has none."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._compute(token_id)
        return piece

    def text(self, token_id: int) -> str | None:
        """The bytes as text; None if they are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.of(token_id).decode()
            except UnicodeDecodeError:
                text = None
            return self._texts.setdefault(token_id, text)

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text: SentencePiece families drop the space they put there."""
        if self._strip_token:
            token = self._backend.id_to_token(token_id) or ""
            return token.replace(self._space or "", "").encode("utf-8", "replace")
        piece = self.of(token_id)
        return piece[1:] if self._strip_text and piece.startswith(b" ") else piece

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < _ID_LIMIT else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:  # an added token with characters outside the alphabet stands for itself
                return token.encode("utf-8")
        if self._byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match[1], 16)])
        return token.replace(self._space, " ").encode("utf-8") if self._space else token.encode("utf-8")

    def _read(self, decoder: dict[str, Any] | None) -> None:
        steps = decoder.get("decoders", [decoder]) if decoder else []
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self._byte_level = True
            return
        if kinds == ["Metaspace"]:
            self._space = steps[0]["replacement"]
            self._strip_token = steps[0].get("prepend_scheme", "always") != "never"
            return
        if kinds and "Fuse" in kinds and all(self._step(step) for step in steps):
            return
        raise TokenizerError(
            f"the tokenizer's decoder ({' + '.join(kinds) or 'none'}) can't be streamed exactly; supported are "
            "ByteLevel, Metaspace, and Replace + ByteFallback + Fuse + Strip"
        )

    def _step(self, step: dict[str, Any]) -> bool:
        """Takes over one step of a SentencePiece decoder; false if it does something that pieces can't express."""
        kind = step["type"]
        if kind == "Replace":
            pattern = step["pattern"].get("String")
            self._space = pattern
            return bool(pattern) and step["content"] == " "
        if kind == "ByteFallback":
            self._byte_fallback = True
            return True
        if kind == "Strip":
            self._strip_text = step["start"] == 1
            return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
        return bool(kind == "Fuse")

    def check(self, size: int) -> None:
        """Compares with the library's decoder on ids spread over the vocabulary; raises `TokenizerError` if it differs.

        Byte-fallback tokens are left out: a lone one is not a character.
        """
        sample = [
            token_id
            for token_id in range(0, size, max(1, size // _SAMPLE))
            if not (self._byte_fallback and _BYTE_TOKEN.match(self._backend.id_to_token(token_id) or ""))
        ]
        if not sample:
            return
        mine = self.first(sample[0]) + b"".join(map(self.of, sample[1:]))
        if mine.decode("utf-8", "replace") != self._backend.decode(sample, skip_special_tokens=False):
            raise TokenizerError("the tokenizer's decoder doesn't do what its description says; it can't be streamed")
