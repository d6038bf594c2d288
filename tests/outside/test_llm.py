"""Simon Willison's `llm`: the command line, with a model from its file of OpenAI-compatible ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from place import MODEL, PARIS, QUESTION, Place, run

pytest.importorskip("llm")

CLIENTS = ("llm",)
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture
def home(server: Place, tmp_path: Path) -> Path:
    """A directory of settings that names our model."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {server.base}\n  supports_schema: true\n"
        f"  supports_tools: true\n- model_id: plain\n  model_name: {MODEL}\n  api_base: {server.base}\n"
        f"  completion: true\n"
    )
    return tmp_path


def llm(home: Path, *arguments: str) -> str:
    """What the command prints."""
    program = [sys.executable, "-m", "llm", *arguments]
    return run(program, 120, LLM_USER_PATH=str(home), PATH=os.environ["PATH"])


@pytest.mark.parametrize("more", [(), ("--no-stream",)])
def test_a_prompt_is_answered(home: Path, more: tuple[str, ...]) -> None:
    assert llm(home, "-m", "ours", "-o", "temperature", "0", *more, QUESTION).strip() == PARIS


def test_a_schema_is_kept(home: Path) -> None:
    out = llm(home, "-m", "ours", "-o", "max_tokens", "50", "--schema", json.dumps(SCHEMA), "How old is Ada?")
    assert 0 <= json.loads(out)["age"] <= 99


def test_a_conversation_goes_on_and_is_logged_with_its_usage(home: Path) -> None:
    llm(home, "-m", "ours", "-o", "temperature", "0", QUESTION)
    llm(home, "-c", "-o", "max_tokens", "10", "And of Italy?")
    log = json.loads(llm(home, "logs", "--json"))
    assert len(log) == 2 and all(entry["output_tokens"] for entry in log)


def test_plain_completion(home: Path) -> None:
    assert llm(home, "-m", "plain", "-o", "max_tokens", "5", "The sea is").strip()
