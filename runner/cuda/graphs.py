"""Decode steps as recorded graphs: one launch in place of hundreds, which is what a small batch would wait for.

One graph per bucket of rows; a step runs in the smallest that holds it, padded with rows that live on the null page.
The sizes are those of vLLM's `cudagraph_capture_sizes`: 1, 2, 4, then every 8 up to 256, then every 16.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from runner.attention.base import AttentionBackend
from runner.cuda.device import Device, Graph
from runner.metadata import BatchMetadata, build
from runner.model.decoder import Decoder

log = logging.getLogger("triptych.runner")

FINE, COARSE, FINE_UP_TO = 8, 16, 256


def buckets_up_to(most: int) -> list[int]:
    """The sizes to record for at most `most` rows; the last of them is `most`."""
    sizes = [1, 2, 4, *range(FINE, FINE_UP_TO + 1, FINE), *range(FINE_UP_TO + COARSE, most + 1, COARSE)]
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """One bucket: its graph, and the backend that is planned before each replay."""

    graph: Graph
    attention: AttentionBackend


class DecodeGraphs:
    """Records all buckets at construction. `attention_of(rows)` makes a backend over fixed buffers for that many rows,
    which pads what it is planned for. All graphs read and write the first rows of the same tensors."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        attention_of: Callable[[int], AttentionBackend],
        buckets: Sequence[int],
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._buckets = sorted(buckets)
        most = self._buckets[-1]
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device.torch)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device.torch)
        self._logits: Tensor | None = None
        device.begin_graphs()
        # The largest first: the smaller ones then fit into the memory that it left.
        order = tqdm(reversed(self._buckets), "Recording graphs", len(self._buckets), disable=None, unit="graph")
        with torch.inference_mode():
            self._recorded = {rows: self._record(rows, attention_of(rows)) for rows in order}

    def takes(self, rows: int) -> bool:
        """Whether a step of so many decode rows is recorded."""
        return 0 < rows <= self._buckets[-1]

    def run(self, meta: BatchMetadata, token_ids: Tensor, positions: Tensor) -> Tensor:
        """A step of decode rows: token_ids, positions int64 [R] -> logits float32 [R, V], valid until the next run."""
        count = meta.num_rows
        recorded = self._recorded[self._buckets[bisect.bisect_left(self._buckets, count)]]
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        recorded.attention.plan(meta)
        recorded.graph.replay()
        assert self._logits is not None
        return self._logits[:count]

    def _record(self, rows: int, attention: AttentionBackend) -> _Recorded:
        token_ids, positions = self._token_ids[:rows], self._positions[:rows]

        def forward() -> Tensor:
            return self._decoder.logits(self._decoder.forward(token_ids, positions, attention))

        nobody = np.zeros(0, np.int32)
        attention.plan(build(np.zeros((0, 1), np.int32), nobody, nobody, 1))
        found = forward()  # compiles and allocates what is used for the first time, too
        if self._logits is None:
            self._logits = torch.empty_like(found)
        logits = self._logits[:rows]
        return _Recorded(self._device.capture(lambda: logits.copy_(forward())), attention)
