"""Reads chosen keys of a GGUF file's header, and skips the rest of it.

The `gguf` package takes seconds for a vocabulary, since it maps every element of an array on its own; here it is a
tenth of one. Tensors are the loader's business.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_keys(path: Path, wanted: Collection[str]) -> dict[str, Any]:
    """The values of those keys that the file has. ValueError if it is no GGUF file (version 2 or 3) or is cut short."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != _MAGIC or struct.unpack_from("<I", data, 4)[0] not in (2, 3):
            raise ValueError(f"{path} is no GGUF file of version 2 or 3")
        header, found = _Header(data), {}
        try:
            for _ in range(header.number("Q", at=16)):
                key = header.string().decode()
                value = header.value(header.number("I"), keep=key in wanted)
                if key in wanted:
                    found[key] = value
        except (struct.error, KeyError) as error:
            raise ValueError(f"the header of {path} is damaged near offset {header.at}: {error}") from error
        return found


class _Header:
    """A position in the mapped file. Reads past its end raise struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 24

    def number(self, kind: str, at: int | None = None) -> Any:
        if at is not None:
            return struct.unpack_from(f"<{kind}", self._data, at)[0]
        (value,) = struct.unpack_from(f"<{kind}", self._data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def string(self) -> bytes:
        length = self.number("Q")
        self.at += length
        if self.at > len(self._data):
            raise struct.error(f"a string ends at {self.at}, the file at {len(self._data)}")
        return self._data[self.at - length : self.at]

    def value(self, kind: int, *, keep: bool) -> Any:
        """Strings as text; arrays as lists, [] where they aren't kept."""
        if kind == _STRING:
            return self.string().decode("utf-8", "replace")
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        element, count = self.number("I"), self.number("Q")
        if element == _STRING:
            texts = [self.string() for _ in range(count)]
            return [text.decode("utf-8", "replace") for text in texts] if keep else []
        size = struct.calcsize(f"<{_SCALARS[element]}")
        if keep:
            values = list(struct.unpack_from(f"<{count}{_SCALARS[element]}", self._data, self.at))
        self.at += count * size
        return values if keep else []
