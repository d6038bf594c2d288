"""The interface of attention over paged KV. An implementation owns no memory but its scratch: pools are lent to it.

The pool of a layer is a tensor [pages, 2, page_size, kv_heads, head_dim]: axis 1 is key / value, page 0 is the null
page that padding points to. A step is planned once and run once per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from runner.metadata import BatchMetadata


class AttentionBackend(Protocol):
    """Appends a step's keys and values to the pages and attends to them, causally, row by row."""

    def plan(self, meta: BatchMetadata) -> None:
        """Take a step's page tables. Holds until the next plan(); `meta` must not change in between."""
        ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hk, D] (rows may be strided, heads may not) -> [T, Hq * D], contiguous.

        Writes k and v at the planned slots first (a negative slot: nowhere); then token t of a row attends to that
        row's positions 0..position(t).
        """
        ...


class AttentionError(ValueError):
    """Pools, heads or metadata that an attention backend can't serve; the message names the numbers."""


def check_pools(pools: list[Tensor], num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise AttentionError unless every pool is [pages, 2, page_size, num_kv_heads, head_dim] and heads divide."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise AttentionError(f"{num_q_heads} query heads can't share {num_kv_heads} key/value heads evenly")
    if not pools:
        raise AttentionError("there is no pool: a model has at least one layer")
    for layer, pool in enumerate(pools):
        shape = tuple(pool.shape)
        if len(shape) != 5 or shape[1] != 2 or shape[3:] != (num_kv_heads, head_dim):
            raise AttentionError(
                f"layer {layer}: pool has shape {shape}, expected [pages, 2, page_size, {num_kv_heads}, {head_dim}]"
            )
        if not pool.is_contiguous():
            raise AttentionError(f"layer {layer}: the pool is not contiguous")
