"""Loads a GGUF file's tokenizer, and keeps conversions that were slow to build for the next start.

A cached conversion is named after the file's path, size and time, and the versions of what built it, so it is never
stale; one that can't be read is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from services.text.gguf_metadata import read_metadata
from services.text.gguf_tokenizer import CONVERTER_VERSION, parts_from_metadata
from services.text.parts import TokenizerParts

_log = logging.getLogger(__name__)

# Reading a cached conversion of 49k tokens takes 0.09 s and building it 0.05 s, so only slow builds are worth keeping:
# those of SentencePiece vocabularies, whose merges must be found first.
SLOW_BUILD_S = 0.5


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/triptych/tokenizers`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "triptych" / "tokenizers"


def load_gguf(
    path: Path, *, cache: Path | None = None, clock: Callable[[], float] = time.perf_counter
) -> TokenizerParts:
    """The tokenizer of a GGUF file. `clock` (seconds) decides whether building took long enough to keep the result."""
    metadata = read_metadata(path)
    entry = (cache_dir() if cache is None else cache) / f"{_key(path)}.json"
    backend = _read(entry)
    if backend is not None:
        return parts_from_metadata(metadata, path, backend)
    started = clock()
    parts = parts_from_metadata(metadata, path)
    if clock() - started > SLOW_BUILD_S:
        _write(entry, parts.backend)
    return parts


def _key(path: Path) -> str:
    stat = path.stat()
    facts = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, CONVERTER_VERSION, tokenizers.__version__)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _read(entry: Path) -> tokenizers.Tokenizer | None:
    if not entry.is_file():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(entry))
    except Exception as error:  # the library raises plain Exception for a broken file
        _log.warning("cached tokenizer %s can't be read and is built again: %s", entry, error)
        return None


def _write(entry: Path, backend: tokenizers.Tokenizer) -> None:
    """Write beside, then rename: another process sees the whole file or none. Not being able to is no error."""
    temporary: str | None = None
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=entry.parent, prefix=".writing-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(backend.to_str())
        os.replace(temporary, entry)
    except OSError as error:
        _log.info("tokenizer conversion isn't cached: %s", error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
