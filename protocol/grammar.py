"""What the grammar of a request says: a kind, a colon, and a text of that kind. Knows no grammar engine and no model.

`lark` puts all kinds into one language, the Lark dialect of llguidance, in which the API checks them and the runner
compiles them. Whatever both must do alike is here.
"""

from __future__ import annotations

import json
from typing import Any

JSON_SCHEMA, REGEX, LARK = "json_schema", "regex", "lark"

# As many blanks as an indented document needs: a model that only writes blanks has to go on some time.
_BLANKS = r"[ \t\n\r]{1,100}"
# Masks may come between any two bytes: the model chooses how a text that is certain is cut into tokens.
_HEADER = '%llguidance {"no_forcing": true}\n'
# A keyword that can't be kept is an error, whatever the schema says about that.
_SCHEMA_OPTIONS = {"x-guidance": {"lenient": False, "whitespace_pattern": _BLANKS}}

LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
"""What compiling a grammar and computing a mask may take of llguidance: about 20 ms each, and 40 MB of states."""


def tagged(kind: str, text: str) -> str:
    """The grammar as a request carries it."""
    return f"{kind}:{text}"


def lark(grammar: str) -> str:
    """A tagged grammar in Lark. ValueError if its kind is unknown or its schema is no JSON."""
    kind, _, text = grammar.partition(":")
    if kind == JSON_SCHEMA:
        return f"{_HEADER}start: %json {_schema(text)}"
    if kind == REGEX:
        return f"{_HEADER}start: /{_between_slashes(text)}/"
    if kind == LARK:
        return _HEADER + text
    raise ValueError(f"a grammar of unknown kind {kind[:40]!r}")


def _schema(text: str) -> str:
    try:
        schema: Any = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object or a boolean")
    return json.dumps(schema | _SCHEMA_OPTIONS, ensure_ascii=False)


def _between_slashes(regex: str) -> str:
    """What ends a regex in Lark, a slash or the line, as an escape."""
    parts: list[str] = []
    characters = iter(regex)
    for character in characters:
        if character == "\\":
            character += next(characters, "")
        parts.append({"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}.get(character, character))
    return "".join(parts)
