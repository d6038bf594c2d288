"""The pack on the machine with the GPU: its packages made importable, its files found. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import zipfile
from pathlib import Path

PACKAGES, MODEL, EXPECTED = "packages", "model.gguf", "expected.safetensors"
JIT_CACHE = "flashinfer_jit_cache"
ARCH = "9.0a"


def unpack(pack: Path, site: Path) -> list[str]:
    """Unpack every wheel and archive of the pack into `site`; their names. A pack that isn't there has none."""
    names = []
    for archive in sorted((pack / PACKAGES).glob("*")):
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(site)
            names.append(archive.name)
    return names


def environment(site: Path, root: Path, base: dict[str, str]) -> dict[str, str]:
    """The variables of a process that computes with what was unpacked: nothing is compiled there."""
    paths = [str(site), str(root), *filter(None, [base.get("PYTHONPATH", "")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "FLASHINFER_CUDA_ARCH_LIST": ARCH, "FLASHINFER_USE_CUDA_NORM": "1"}
    if (site / JIT_CACHE).is_dir():
        ours |= {"FLASHINFER_DISABLE_JIT": "1"}
    return {**base, **ours, "FLASHINFER_WORKSPACE_BASE": str(site / "work"), "PYTHONUNBUFFERED": "1"}


def compiled_modules() -> list[str]:
    """Names of the modules that were compiled ahead and can be imported here."""
    found = importlib.util.find_spec(JIT_CACHE)
    if found is None or not found.submodule_search_locations:
        return []
    folder = Path(next(iter(found.submodule_search_locations)))
    return sorted(file.stem for file in folder.glob("*/*.so"))
