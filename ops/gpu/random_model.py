"""A decoder of a published shape with random weights, made on the device: for measuring speed, not for words."""

from __future__ import annotations

from typing import Any

import torch

from runner.cuda.ops import FlashInferOps
from runner.loader import LoadedModel
from runner.model.config import ModelConfig
from runner.model.decoder import Decoder
from runner.model.parameters import fused_shapes, layout
from runner.model.rope import RopeSpec
from scheduler.costs import ModelShape

SPREAD = 0.02  # of the weights: what models are initialised with


def config_of(shape: ModelShape, max_context: int) -> ModelConfig:
    """A Llama of this shape."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        rope=RopeSpec("default", 500_000.0, shape.head_dim),
        max_context=max_context,
        tie_word_embeddings=shape.tied_embeddings,
        checkpoint_dtype="bfloat16",
    )


def random_model(
    shape: ModelShape, max_context: int, module: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> LoadedModel:
    """Normal weights, norms of one. `module` is flashinfer."""
    config = config_of(shape, max_context)
    parameters = {}
    for name, size in fused_shapes(layout(config)).items():
        parameter = torch.empty(size, dtype=dtype, device=device)
        parameters[name] = parameter.fill_(1.0) if len(size) == 1 else parameter.normal_(std=SPREAD)
    weight_bytes = sum(tensor.nbytes for tensor in parameters.values())
    decoder = Decoder(config, parameters, FlashInferOps(dtype, module), max_context)
    return LoadedModel(config, decoder, dtype, config.vocab_size, weight_bytes)
