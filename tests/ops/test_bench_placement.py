"""`triptych bench placement`: the dispatch that serves on a virtual clock, and what prefixes are worth."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ops.bench.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six long prompts that come again and again, with a tail of their own each; more than one pool holds."""
    lines, draw = [], random.Random(1)
    for number in range(72):
        first = 100 * draw.randrange(6)
        shared = list(range(first, first + 12))
        row = {"timestamp": 400 * number, "input_length": 13 * 512, "output_length": 4}
        lines.append(json.dumps(row | {"hash_ids": [*shared, 10_000 + number]}))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def rows(text: str) -> dict[str, float]:
    """Policy → prefix hits in percent."""
    lines = [line.split() for line in text.splitlines()[2:]]
    return {words[0]: float(words[1].rstrip("%")) for words in lines}


def test_placement_by_prefix_finds_more_in_the_caches_than_the_others(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["placement", str(trace), "--blocks", "1700"]) == 0
    hits = rows(capsys.readouterr().out)
    assert set(hits) == {"prefix", "least-loaded", "round-robin"}
    assert hits["prefix"] > 80 > 60 > max(hits["least-loaded"], hits["round-robin"])


def test_the_same_trace_gives_the_same_numbers(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert main(["placement", str(trace), "--policy", "prefix", "--replicas", "3", "--blocks", "1700"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_trace_that_can_not_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["placement", str(tmp_path / "none")]) == 2
    assert "triptych bench placement: " in capsys.readouterr().err
