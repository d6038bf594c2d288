"""What bringing a preempted request back costs: formulas for KV bytes, prefill work, copies, and where they tie.

Pure arithmetic: nothing here measures, decides or knows a device. Rates come from whoever calls.

Symbols: n tokens, f the fraction of them whose KV survives in the prefix cache, L layers, H query heads and G key/value
heads of size D, N parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NULL_BLOCKS = 1
"""Blocks of a pool that never hold a token: the null page."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder-only transformer with grouped-query attention and a gated feed-forward.

    `dtype_bytes` is the size of one KV element. `stated_parameters` is the count that work is reckoned with, where it
    isn't to be counted from the shape (0): a model's published size, say.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2
    tied_embeddings: bool = False
    stated_parameters: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads can't share {self.kv_heads} key/value heads evenly")
        if self.stated_parameters < 0:
            raise ValueError(f"a model can't have {self.stated_parameters} parameters")

    @property
    def parameters(self) -> int:
        """N: the stated count if there is one, else the counted one."""
        return self.stated_parameters or count_parameters(self)


NAMED_SHAPES: dict[str, ModelShape] = {
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128_256, stated_parameters=8_000_000_000),
    "llama-3-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128_256, stated_parameters=70_000_000_000),
    "llama-2-7b": ModelShape(32, 4096, 32, 32, 128, 11008, 32_000, stated_parameters=7_000_000_000),
    "mistral-7b": ModelShape(32, 4096, 32, 8, 128, 14336, 32_000, stated_parameters=7_300_000_000),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151_936, stated_parameters=8_200_000_000),
    "smollm2-135m": ModelShape(
        30, 576, 9, 3, 64, 1536, 49_152, tied_embeddings=True, stated_parameters=135_000_000
    ),
}  # fmt: skip
"""Published shapes with 16-bit KV, and N as each publisher states it."""


# --- memory -------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Bytes of K and V that one token keeps in all layers: 2·L·G·D·dtype_bytes."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype_bytes


def pool_blocks(shape: ModelShape, memory_bytes: float, block_size: int) -> int:
    """Whole blocks of `block_size` tokens that fit in `memory_bytes`, the null page included."""
    return int(memory_bytes // (kv_bytes_per_token(shape) * block_size))


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens: ⌈n / block_size⌉."""
    return -(-tokens // block_size)


# --- work ---------------------------------------------------------------------------------------------------------


def layer_parameters(shape: ModelShape) -> int:
    """Weights of the matrices in all layers: per layer q and o (hidden·H·D each), k and v (hidden·G·D each), and
    gate, up and down (hidden·intermediate each). Norms and biases, a ten-thousandth, are left out."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def count_parameters(shape: ModelShape) -> int:
    """Weights of the layers, the embedding, and the head unless it is tied to the embedding."""
    return layer_parameters(shape) + (1 if shape.tied_embeddings else 2) * shape.hidden * shape.vocab


def weight_flops(shape: ModelShape, tokens: int) -> int:
    """2·N per token: a multiply and an add for each weight (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).

    By convention N counts the embedding and the head too, though prefill only looks the one up and needs the other
    for the last token alone: 15 % more than the layers' matrices of Llama-3-8B, 27 % of SmolLM2-135M. A rate that was
    measured by the same convention cancels it.
    """
    return 2 * shape.parameters * tokens


def attention_flops(shape: ModelShape, tokens: int, cached: int = 0) -> int:
    """Causal attention of `tokens` new tokens behind `cached` ones, all layers.

    A query against one key is 2·D for the score and 2·D for the value, over H heads: 4·H·D. Without the mask n tokens
    would be 4·n²·H·D·L; with it each sees half of them on average: 2·n²·H·D·L. New tokens behind a cached prefix are
    the difference of two such triangles.
    """
    whole = cached + tokens
    return 2 * shape.heads * shape.head_dim * shape.layers * (whole * whole - cached * cached)


def prefill_flops(shape: ModelShape, tokens: int, cached: int = 0) -> int:
    """FLOPs to compute the KV of `tokens` tokens when the KV of `cached` tokens before them exists."""
    return weight_flops(shape, tokens) + attention_flops(shape, tokens, cached)


# --- time ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to prefill a whole context from nothing, in two parts that a surviving prefix shortens differently.

    `linear` costs the same for every token; `triangular` grows with a token's position (attention).
    """

    linear: float
    triangular: float = 0.0

    @property
    def cold(self) -> float:
        """Nothing survives."""
        return self.linear + self.triangular

    def after(self, survived: float) -> float:
        """Seconds when the leading fraction `survived` of the context is still there."""
        return self.linear * (1 - survived) + self.triangular * (1 - survived * survived)


def prefill_at_flops(shape: ModelShape, tokens: int, flops_per_second: float) -> PrefillCost:
    """The cost of a context at a rate of arithmetic: a device's peak times the share of it that prefill reaches."""
    return PrefillCost(
        weight_flops(shape, tokens) / flops_per_second, attention_flops(shape, tokens) / flops_per_second
    )


def prefill_at_tokens(tokens: int, tokens_per_second: float) -> PrefillCost:
    """The cost of a context at a measured rate of tokens, taken to be the same at every position."""
    return PrefillCost(tokens / tokens_per_second)


def copy_seconds(shape: ModelShape, tokens: int, block_size: int, bytes_per_second: float) -> float:
    """Seconds to copy the KV of `tokens` tokens over the host link once. Copies move whole blocks."""
    return blocks_of(tokens, block_size) * block_size * kv_bytes_per_token(shape) / bytes_per_second


def swap_seconds(shape: ModelShape, tokens: int, block_size: int, bytes_per_second: float) -> float:
    """Out at preemption and back in at return. All of it goes out: what will survive isn't known at that time."""
    return 2 * copy_seconds(shape, tokens, block_size, bytes_per_second)


def tie_fraction(prefill: PrefillCost, swap: float) -> float:
    """The surviving fraction f at which recomputing the rest takes as long as `swap` seconds; recompute wins above it.

    Solves linear·x + triangular·(2x − x²) = swap for x = 1 − f, in the form of the quadratic's root that also holds
    when `triangular` is 0. 0.0 where recompute wins even from nothing.
    """
    if swap >= prefill.cold:
        return 0.0
    slope = prefill.linear + 2 * prefill.triangular
    return 1 - 2 * swap / (slope + math.sqrt(slope * slope - 4 * prefill.triangular * swap))
