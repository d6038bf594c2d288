"""A process that tries grammars: `python -m services.grammar_worker`, with a socket as its standard input.

Whoever writes a grammar can make compiling it take all memory, for ever, or recurse until the stack ends. Here that
ends this process, and nothing else. It compiles for an alphabet of 256 bytes, which takes no model.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import sys
import threading

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from protocol.grammar import LARK, LIMITS, lark, tagged
from protocol.process import die_with_parent

MEMORY_BYTES = 1 << 30
STACK_BYTES = 2 << 20
"""A quarter of what a thread of the runner has: what recurses too deeply there has failed here."""
_SILENT = "<non-verbose/>"
_PLACE = re.compile(r"at (\d+)\((\d+)\): ")


class _Bytes:
    """The alphabet as llguidance wants to see it: an id for each byte, then the end."""

    def __init__(self) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<|end|>"]
        self.special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def examine(tokenizer: LLTokenizer, kind: str, text: str) -> tuple[str, str]:
    """(the grammar as a request carries it, "") or ("", what is wrong with it)."""
    try:
        grammar = tagged(kind, text) if kind != "grammar" else tagged(LARK, any_to_lark(text))
        compiled = LLMatcher.grammar_from_lark(lark(grammar))
    except RecursionError:
        return "", "nested too deeply"
    except Exception as error:  # of several kinds, plain Exception among them, where a grammar is no GBNF
        return "", str(error)
    limits = LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]  # all of them are numbers
    matcher = LLMatcher(tokenizer, compiled, log_level=0, limits=limits)
    if matcher.is_error():
        return "", _plain(matcher.get_error(), kind)
    matcher.compute_bitmask()
    if matcher.is_error():
        why = matcher.get_error()
        return "", "no text has this form" if why.startswith("NoExtension") else _plain(why, kind)
    return grammar, ""


def _plain(error: str, kind: str) -> str:
    """An error without what was put around the client's text: the first line of it, and of a grammar the place."""
    place, message = _PLACE.match(error), error
    if place is not None:
        message = error[place.end() :]
        if kind == "grammar":
            message = f"line {max(1, int(place[1]) - 1)}, column {place[2]}: {message}"
    message = message.removeprefix("failed to compile JSON schema: ")
    lines = [line for line in message.partition("\n   1 | ")[0].split("\n") if line.strip("-^ ") not in ("", _SILENT)]
    return " ".join(line.strip() for line in lines)[:1000]


def serve(connection: socket.socket) -> None:
    """Answer lines of [kind, text] with [grammar, error], the first of them unasked, until the other side closes."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=[256], slices=[])
    connection.sendall(b"\n")
    with connection.makefile("rb") as lines:
        for line in lines:
            kind, text = msgspec.json.decode(line, type=tuple[str, str])
            connection.sendall(msgspec.json.encode(examine(tokenizer, kind, text)) + b"\n")


def main() -> int:
    """Serve on the standard input, until the other end of it closes."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to hear
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(socket.socket(fileno=0),), daemon=True)
    thread.start()
    thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
