"""Outside load generators: every request must succeed and be counted; their numbers go on record, not to the test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from place import MODEL, Place, run, tool, version_of

REQUESTS, STREAMS, PROMPT, OUTPUT = 24, 4, 64, 32


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_vllm_bench_serve(server: Place, tmp_path: Path, note: Callable[[str], None], chat: bool) -> None:
    program = tool("vllm", "vllm")
    if program is None:
        pytest.skip("vllm is not installed")
    backend, path = ("openai-chat", "/v1/chat/completions") if chat else ("openai", "/v1/completions")
    command = [str(program), "bench", "serve", "--backend", backend, "--endpoint", path, "--base-url", server.root]
    command += ["--model", MODEL, "--tokenizer", os.environ["CONFORMANCE_WEIGHTS"], "--dataset-name", "random"]
    command += ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--num-prompts", str(REQUESTS)]
    command += ["--max-concurrency", str(STREAMS), "--ignore-eos", "--seed", "1", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
    run(command, 580)
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS and not result.get("failed")
    assert result["total_output_tokens"] == REQUESTS * OUTPUT
    note(
        f"vllm {version_of('vllm', 'vllm')}, {path}: {REQUESTS} requests of {PROMPT} and {OUTPUT} tokens, "
        f"{STREAMS} at once: {result['output_throughput']:.0f} output tokens/s, mean TTFT {result['mean_ttft_ms']:.0f} "
        f"ms, mean TPOT {result['mean_tpot_ms']:.1f} ms"
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(server: Place, tmp_path: Path, note: Callable[[str], None], path: str) -> None:
    program = tool("guidellm", "guidellm")
    if program is None:
        pytest.skip("guidellm is not installed")
    command = [str(program), "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={server.root},model={MODEL},request_format={path}"]
    command += ["--profile", f"kind=concurrent,streams={STREAMS}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={os.environ['CONFORMANCE_WEIGHTS']}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"]
    command += ["--output", f"kind=json,path={tmp_path / 'result.json'}"]
    run(command, 580)
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == REQUESTS and not totals["errored"]
    means = [
        metrics[name]["successful"]["mean"]
        for name in ("output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
    ]
    note(
        f"guidellm {version_of('guidellm', 'guidellm')}, {path}: {REQUESTS} requests of {PROMPT} and {OUTPUT} tokens, "
        f"{STREAMS} at once: {means[0]:.0f} output tokens/s, mean TTFT {means[1]:.0f} ms, mean ITL {means[2]:.1f} ms"
    )
