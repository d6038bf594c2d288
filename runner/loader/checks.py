"""What must hold of a checkpoint's tensors before anything is allocated. Looks at names and shapes, never at data."""

from __future__ import annotations

from collections.abc import Mapping

from runner.model.errors import ModelError
from runner.model.parameters import Slot, abbreviate, wrong_shape

# Buffers that old exporters saved and every decoder computes itself.
_IGNORABLE_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def canonical(name: str) -> str:
    """A Hugging Face tensor name without the `model.` prefix that only some exporters write."""
    return name.removeprefix("model.")


def ignorable(name: str) -> bool:
    """Whether a tensor is a known left-over that carries no weights."""
    return name.endswith(_IGNORABLE_SUFFIXES)


def check_tensors(wanted: Mapping[str, Slot], found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise ModelError unless `found` (name → shape) has exactly the wanted tensors in the wanted shapes.

    `missing_tensor`, `unexpected_tensor` and `wrong_shape` name the tensors and `source`, the checkpoint.
    """
    if missing := [name for name in wanted if name not in found]:
        raise ModelError("missing_tensor", f"{source} lacks {abbreviate(missing)}")
    if unexpected := [name for name in found if name not in wanted]:
        raise ModelError(
            "unexpected_tensor", f"{source} holds {abbreviate(unexpected)}, which this model has no place for"
        )
    for name, slot in wanted.items():
        if found[name] != slot.shape:
            raise ModelError("wrong_shape", f"{source}: {wrong_shape(name, found[name], slot.shape)}")
