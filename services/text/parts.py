"""What a tokenizer loader hands over, whatever the file format, and the one error that loading raises."""

from __future__ import annotations

from dataclasses import dataclass, field

import tokenizers


class TokenizerError(ValueError):
    """The tokenizer can't be loaded exactly. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A `tokenizers` backend and what the files around it say.

    `eos_token_ids` is the union of every end id that the files name, the most authoritative first.
    `special_tokens` maps template variable names (`bos_token`, `eos_token`, …) to token text.
    `chat_templates` maps a name (`default`, `tool_use`, …) to Jinja source. `max_context` is in tokens.
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    max_context: int | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
