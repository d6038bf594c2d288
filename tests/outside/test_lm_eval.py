"""lm-eval's `local-completions` against the server in float32, beside its own `hf` model on the same weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from place import MODEL, Place, run, tool, version_of

FACTS = Path(__file__).with_name("facts.jsonl")
TOLERANCE = 2e-3  # of a whole answer's log-likelihood, between two float32 implementations
TASK = """\
task: facts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {facts}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: " "
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""


def evaluate(place: Path, name: str, model: str, arguments: str) -> tuple[dict[str, float], list[Any]]:
    """What lm-eval finds: its metrics, and for each item the (log-likelihood, is greedy) of each choice."""
    program = tool("lm-eval", "lm_eval")
    if program is None:
        pytest.skip("lm-eval is not installed")
    out = place / name
    command = [str(program), "run", "--model", model, "--model_args", arguments, "--tasks", "facts"]
    command += ["--include_path", str(place), "--log_samples", "--output_path", str(out), "--device", "cpu"]
    run(command, 580, HF_HOME=str(place / "home"))
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    likelihoods = [[(float(ll), str(greedy)) for ll, greedy in row["filtered_resps"]] for row in rows]
    found = json.loads(results.read_text())["results"]["facts"]
    return {metric: found[f"{metric},none"] for metric in ("acc", "acc_norm")}, likelihoods


@pytest.mark.timeout(1200)
def test_log_likelihoods_are_those_of_transformers(exact: Place, tmp_path: Path, note: Callable[[str], None]) -> None:
    (tmp_path / "facts.yaml").write_text(TASK.format(facts=FACTS))
    weights = os.environ["CONFORMANCE_WEIGHTS"]
    ours_is = f"model={MODEL},base_url={exact.base}/completions,tokenizer={weights},num_concurrent=4,max_retries=1"
    ours, our_items = evaluate(tmp_path, "ours", "local-completions", f"{ours_is},tokenized_requests=True")
    theirs, their_items = evaluate(tmp_path, "hf", "hf", f"pretrained={weights},dtype=float32")
    assert len(our_items) == len(FACTS.read_text().splitlines()) == 40
    pairs = list(zip(chain(*our_items), chain(*their_items), strict=True))
    worst = max(abs(mine[0] - other[0]) for mine, other in pairs)
    note(
        f"lm-eval {version_of('lm-eval', 'lm-eval')}, 40 items, {len(pairs)} log-likelihoods: acc {ours['acc']:.3f} "
        f"and acc_norm {ours['acc_norm']:.3f} here, {theirs['acc']:.3f} and {theirs['acc_norm']:.3f} with "
        f"transformers; largest difference of a log-likelihood {worst:.1e}"
    )
    assert worst < TOLERANCE and ours == theirs
    assert [mine[1] for mine, _ in pairs] == [other[1] for _, other in pairs], "what is greedy is so to both"
    assert 0.3 < ours["acc"] < 1
