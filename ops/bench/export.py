"""Writes a GGUF model as a Hugging Face directory in bf16, so that peers that read no GGUF can be measured beside us.

    python -m ops.bench.export MODEL.gguf DIRECTORY

Weights are dequantized by this project's loader and stored unquantized; the tokenizer and chat template come along.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ops.models import resolve_model


def export(source: Path, target: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json of `source` into `target`."""
    import torch
    from safetensors.torch import save_file

    from runner.loader.gguf import GgufCheckpoint
    from runner.model.parameters import HEAD
    from services.text.tokenizer import load_tokenizer

    checkpoint = GgufCheckpoint(source)
    config = checkpoint.config
    tokenizer = load_tokenizer(source)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        name if name == HEAD else f"model.{name}": tensor.to(torch.bfloat16).contiguous()
        for name, tensor in checkpoint.tensors()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    ends = list(tokenizer.eos_token_ids)
    described = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0],
    }
    (target / "config.json").write_text(json.dumps(described, indent=1))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer.save(target / "tokenizer.json")
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.id_to_token(ends[0]),
        "bos_token": tokenizer.id_to_token(tokenizer.bos_token_id) if tokenizer.bos_token_id is not None else None,
        "chat_template": tokenizer.chat_template,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(names, indent=1))


def main(argv: list[str]) -> int:
    """Command line: MODEL DIRECTORY."""
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source = resolve_model(argv[0])
    if source.suffix != ".gguf":
        print(f"{source} is not a GGUF file", file=sys.stderr)
        return 2
    export(source, Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
