"""Prints the requirements in a pyproject.toml, one a line, so that an image can install them before the source comes.

Usage: requirements.py PYPROJECT [EXTRA …]
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The project's dependencies and those of `extras`. Raises KeyError for an extra that isn't there."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(requirement for extra in extras for requirement in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])))
