"""One line of recorded traffic, as an API service writes it and a replay reads it: a file format, not a message."""

from __future__ import annotations

import msgspec


class TraceLine(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A request. Times are seconds from any common zero; lines come in any order.

    The prompt is `token_ids`, or `prompt_tokens` of them, of which `hash_ids` (one per `block_tokens`) or `prefix`
    (groups as [name, tokens], equal names being equal tokens) say what is shared.
    """

    at_s: float
    output_tokens: int
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 16
    prefix: tuple[tuple[int, int], ...] = ()
    priority: int = 0
    tenant: str = ""
    deadline_ms: int = 0
    cancel_at_s: float = 0.0
