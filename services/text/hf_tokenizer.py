"""Reads a Hugging Face directory's tokenizer: `tokenizer.json` and the files that complete it.

Those are tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and chat_template.jinja.
Slow (Python-only) tokenizers are not converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.text.parts import TokenizerError, TokenizerParts

_NO_LIMIT = 10**9  # tokenizer_config.json writes "no limit" as 1e30
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_directory(path: Path) -> TokenizerParts:
    """What the directory says. Raises `TokenizerError` if `tokenizer.json` is missing or any file is malformed."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{path} has no tokenizer.json; slow tokenizers aren't converted: save it with "
            "AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…), or give --tokenizer another directory"
        )
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a broken file
        raise TokenizerError(f"{file} can't be read: {error}") from error
    settings, config = _json(path / "tokenizer_config.json"), _json(path / "config.json")
    special = _special_tokens(settings, _json(path / "special_tokens_map.json"))
    _complete(backend, file, settings, special)
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    text_config = config.get("text_config") or {}
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos if bos is not None else _first(_ids(config.get("bos_token_id"))),
        eos_token_ids=_union(
            _ids(_json(path / "generation_config.json").get("eos_token_id")),
            _ids(config.get("eos_token_id")),
            _ids(text_config.get("eos_token_id")),
            _ids(backend.token_to_id(special["eos_token"]) if "eos_token" in special else None),
        ),
        max_context=_context(config, text_config, settings),
        special_tokens=special,
        chat_templates=_templates(path, settings),
    )


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold an object, not {type(content).__name__}")
    return content


def _content(token: Any) -> str | None:
    """The text of a token given as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _special_tokens(settings: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    merged = token_map | {name: value for name, value in settings.items() if value is not None}
    return {name: text for name in _NAMED if (text := _content(merged.get(name))) is not None}


def _complete(backend: Tokenizer, file: Path, settings: dict[str, Any], special: dict[str, str]) -> None:
    """Adds what only tokenizer_config.json declares, and marks the named tokens as special, as transformers does."""
    declared = settings.get("added_tokens_decoder") or {}
    present = backend.get_added_tokens_decoder()
    for key, token in sorted(declared.items(), key=lambda item: int(item[0])):
        flags = {name: bool(token[name]) for name in ("lstrip", "rstrip", "single_word", "special") if name in token}
        text = _content(token)
        if text is None:
            raise TokenizerError(f"{file.parent}/tokenizer_config.json: added token {key} has no content")
        known = present.get(int(key))
        if known is None or (flags.get("special") and not known.special):
            special_flag = flags.get("special", False)
            normalized = bool(token.get("normalized", not special_flag))
            backend.add_tokens([AddedToken(text, normalized=normalized, **flags)])
        if backend.token_to_id(text) != int(key):
            raise TokenizerError(
                f"{file.parent}: tokenizer_config.json gives {text!r} the id {key}, tokenizer.json gives it "
                f"{backend.token_to_id(text)}"
            )
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    names = [*special.values(), *filter(None, map(_content, extra if isinstance(extra, list) else extra.values()))]
    # A token that the vocabulary lacks would get a new id, which the model has no row for: leave it out.
    backend.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True)
            for text in dict.fromkeys(names)
            if text not in marked and backend.token_to_id(text) is not None
        ]
    )


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _union(*lists: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(item for values in lists for item in values))


def _first(values: list[int]) -> int | None:
    return values[0] if values else None


def _context(config: dict[str, Any], text_config: dict[str, Any], settings: dict[str, Any]) -> int | None:
    for value in (
        config.get("max_position_embeddings"),
        text_config.get("max_position_embeddings"),
        settings.get("model_max_length"),
    ):
        if isinstance(value, (int, float)) and 0 < value < _NO_LIMIT:
            return int(value)
    return None


def _templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The separate files win over tokenizer_config.json, as in transformers."""
    given = settings.get("chat_template")
    if isinstance(given, str):
        templates = {"default": given}
    else:
        named = given if isinstance(given, list) else []
        templates = {str(entry.get("name")): str(entry.get("template")) for entry in named if isinstance(entry, dict)}
    if isinstance(legacy := _json(path / "chat_template.json").get("chat_template"), str):
        templates["default"] = legacy
    files = sorted((path / "additional_chat_templates").glob("*.jinja"))
    templates |= {file.stem: file.read_text(encoding="utf-8") for file in files}
    main = path / "chat_template.jinja"
    return templates | ({"default": main.read_text(encoding="utf-8")} if main.is_file() else {})
