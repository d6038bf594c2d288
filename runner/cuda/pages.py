"""The KV pages on the device, and those that were swapped out in host memory that copies don't wait for.

A page's layers lie together on the host, so that it moves in one copy: gathered on the device first, scattered last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.batch import Int32s
from runner.cuda.device import Device
from runner.cuda.feeding import Ring
from runner.model.config import ModelConfig

CHUNK = 16
"""Pages that are gathered at a time: bounds what a swap needs beside the pool."""
INDEX_BUFFERS = 8
"""Chunks whose indices may be on their way before the next one waits."""


class DevicePages:
    """Per layer a tensor [pages, 2, page_size, kv_heads, head_dim] on the device, zeroed; page 0 is the null page.

    Swaps are issued in the order of the steps: out before anything is written, in before anything is read. What was
    gathered to go out travels beside the step; what comes in is waited for.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype,
        device: Device,
        host_blocks: int = 0,
    ) -> None:
        self._page = (model.num_layers, 2, page_size, model.num_kv_heads, model.head_dim)
        self._device = device
        self.layers = [
            torch.zeros((num_blocks, *self._page[1:]), dtype=dtype, device=device.torch)
            for _ in range(model.num_layers)
        ]
        size = torch.Size(self._page).numel()
        self._indices = Ring(device, INDEX_BUFFERS, CHUNK)
        self._host = device.staging(host_blocks * size, dtype).view(host_blocks, *self._page) if host_blocks else None

    def swap_out(self, pairs: Int32s) -> None:
        """Copy device pages to host pages; pairs int32 [n, 2] (device, host)."""
        for part in _chunks(pairs):
            pages = self._index(part[:, 0])
            gathered = torch.stack([layer.index_select(0, pages) for layer in self.layers], dim=1)
            with self._device.beside(gathered):
                for index, host in enumerate(part[:, 1].tolist()):
                    self._host_page(host).copy_(gathered[index], non_blocking=True)

    def swap_in(self, pairs: Int32s) -> None:
        """Copy host pages back to device pages; pairs int32 [n, 2] (device, host)."""
        for part in _chunks(pairs):
            pages = self._index(part[:, 0])
            shape = (len(part), *self._page)
            gathered = torch.empty(shape, dtype=self.layers[0].dtype, device=self._device.torch)
            with self._device.beside(gathered):
                for index, host in enumerate(part[:, 1].tolist()):
                    gathered[index].copy_(self._host_page(host), non_blocking=True)
            self._device.join()
            for number, layer in enumerate(self.layers):
                layer.index_copy_(0, pages, gathered[:, number])

    def _host_page(self, host: int) -> Tensor:
        assert self._host is not None, "swapped without host pages"
        return self._host[host]

    def _index(self, pages: Int32s) -> Tensor:
        staged = self._indices.take()
        staged[: len(pages)] = torch.from_numpy(pages.astype("int64"))
        index = staged[: len(pages)].to(self._device.torch, non_blocking=True)
        self._indices.give_back(staged)
        return index


def _chunks(pairs: Int32s) -> list[Int32s]:
    return [pairs[start : start + CHUNK] for start in range(0, len(pairs), CHUNK)]
