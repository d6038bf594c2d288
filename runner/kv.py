"""The KV pages as tensors, on the device and in host memory for swap, and the copies between them. No bookkeeping."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from runner.batch import Int32s
from runner.model.config import ModelConfig

_ALIGNMENT = 4096  # a vector load must not straddle cache lines


class KvPool:
    """Per layer a tensor [pages, 2, page_size, kv_heads, head_dim], zeroed; page 0 is the null page."""

    def __init__(
        self, model: ModelConfig, num_blocks: int, page_size: int, dtype: torch.dtype, host_blocks: int = 0
    ) -> None:
        page = (2, page_size, model.num_kv_heads, model.head_dim)
        self.layers = [_zeros((num_blocks, *page), dtype) for _ in range(model.num_layers)]
        self._host = [_zeros((host_blocks, *page), dtype) for _ in range(model.num_layers)] if host_blocks else []

    def swap_out(self, pairs: Int32s) -> None:
        """Copy device pages to host pages; pairs [n, 2]. Done when this returns."""
        self._copy(self.layers, self._host, pairs[:, 0], pairs[:, 1])

    def swap_in(self, pairs: Int32s) -> None:
        """Copy host pages back to device pages; pairs [n, 2] (device, host)."""
        self._copy(self._host, self.layers, pairs[:, 1], pairs[:, 0])

    @staticmethod
    def _copy(sources: list[Tensor], targets: list[Tensor], read: Int32s, write: Int32s) -> None:
        if len(read) == 0:
            return
        from_pages, to_pages = torch.from_numpy(read.astype(np.int64)), torch.from_numpy(write.astype(np.int64))
        for source, target in zip(sources, targets, strict=True):
            target[to_pages] = source[from_pages].to(target.device)


def block_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return 2 * page_size * model.num_kv_heads * model.head_dim * dtype.itemsize * model.num_layers


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed memory that the system hands out page by page on first touch, so a large pool costs nothing to make.

    (torch.zeros would write all of it.)
    """
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
