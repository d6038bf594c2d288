"""The ranks of one runner as one rank sees them: collectives over tensors and bytes. Knows nothing of steps or models.

Bytes travel as uint8 tensors, never pickled. Every rank must make the same calls in the same order, from one thread.
A call that fails means that a rank is lost, and with it the runner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # a C++ class without a stub

from runner.model.shard import Shard
from runner.parallel.place import Place
from runner.parallel.watch import RankWatch, rank_lost

_FRAME = 4096
"""Bytes of the first part of a broadcast: its length and what fits. An ordinary decode step takes no second part."""
_LENGTH = 8
_FOREVER = timedelta(days=3650)
"""An idle rank waits as long as it takes; that its peers live is the watch's business."""

# The older name is deprecated where the newer one exists.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """Joins the others at construction, which blocks until all `place.size` are there.

    `store` is torch's rendezvous; `device` is where this rank's tensors are. `timeout_s`: how long a rank may be stuck,
    or a host unreachable, before all end. `lost` is called with what failed, and must not return.
    """

    def __init__(
        self,
        place: Place,
        store: Store,
        device: torch.device,
        timeout_s: float,
        lost: Callable[[str], None] = rank_lost,
    ) -> None:
        self.place = place
        self.shard = Shard(place.rank, place.size)
        self.device = device
        self._lost = lost
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=_FOREVER,
            device_id=None if device.type == "cpu" else device,
        )
        self._watch = RankWatch(dist.new_group(backend="gloo", timeout=_FOREVER), timeout_s, lost)
        self._watch.start()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that the scheduler knows."""
        return self.place.rank == 0

    def close(self) -> None:
        """All ranks together: from here on, one that goes away is not missed."""
        self._watch.stop()
        dist.destroy_process_group()

    def lose(self, what: str) -> None:
        """Something went wrong on this rank that the others can't know: end."""
        self._lost(what)

    # --- bytes, on the host

    def broadcast(self, payload: bytes = b"") -> bytes:
        """The first rank's payload, on every rank."""
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        room = _FRAME - _LENGTH
        if self.is_first:
            head = len(payload).to_bytes(_LENGTH, "little") + payload[:room]
            frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        with self._together("a broadcast"):
            dist.broadcast(frame, 0)
        data = frame.numpy().tobytes()
        length = int.from_bytes(data[:_LENGTH], "little")
        if length <= room:
            return data[_LENGTH : _LENGTH + length]
        rest = torch.empty(length - room, dtype=torch.uint8)
        if self.is_first:
            rest = torch.frombuffer(bytearray(payload[room:]), dtype=torch.uint8)
        with self._together("a broadcast"):
            dist.broadcast(rest, 0)
        return data[_LENGTH:] + rest.numpy().tobytes()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, on every rank."""
        lengths = self._gathered(torch.tensor([len(payload)])).flatten().tolist()
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = self._gathered(padded)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    # --- tensors, on the device

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, the same bits on each rank. May overwrite `part`.

        On the CPU it is taken in the order of the ranks, so that a row's sum does not depend on how many rows there
        are; in half precision it is returned in float32, to be rounded once. NCCL picks its own order.
        """
        if part.device.type != "cpu":
            with self._together("a sum"):
                dist.all_reduce(part)
            return part
        parts = self._gathered(part.contiguous())
        total = parts[0].float() if part.dtype.itemsize == 2 else parts[0]
        for other in parts[1:]:
            total += other
        return total

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """part [S, W], of which rank r fills widths[r] columns -> on the first rank all of those, [S, sum of widths];
        on others `part`."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in widths] if self.is_first else None
        with self._together("a gather"):
            dist.gather(part, parts, 0)
        if parts is None:
            return part
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], 1)

    def share(self, values: Tensor) -> Tensor:
        """The first rank's `values`, written into those of the others, which have the same shape and dtype."""
        with self._together("a broadcast"):
            dist.broadcast(values, 0)
        return values

    def _gathered(self, tensor: Tensor) -> Tensor:
        """[…] contiguous -> [ranks, …]."""
        size = self.place.size
        flat = tensor.view(1, -1).view(torch.uint8)
        rows = flat.new_empty((size, flat.shape[1]))
        with self._together("an exchange"):
            _all_gather(rows, flat)
        return rows.view(tensor.dtype).view(size, *tensor.shape)

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._lost(f"{what} failed: {error}")
            raise
