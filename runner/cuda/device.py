"""What the asynchronous executor needs of a device: memory that copies don't wait for, events, graphs, and numbers.

`CudaDevice` is a GPU. `HostDevice` stands in for one on the CPU: work is done when it is issued, but its results reach
the host only when somebody waits for them, so that whoever reads too early reads what is not there yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Whether the work up to there is done. Doesn't wait."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class Mark(Event, Protocol):
    """An event that says when it was reached."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds of the device's time from here to `end`, both reached."""
        ...


class Graph(Protocol):
    """Work that was recorded once, over fixed memory."""

    def replay(self) -> None:
        """Issue it again."""
        ...


class Device(Protocol):
    """One device and its order of work: what is issued runs in order, and the host goes on meanwhile."""

    torch: torch.device

    def staging(self, count: int, dtype: torch.dtype) -> Tensor:
        """Host memory [count] that copies to and from the device needn't wait for."""
        ...

    def event(self) -> Event:
        """Where the work stands that was issued so far."""
        ...

    def mark(self) -> Mark:
        """The same, with its time."""
        ...

    def copy_out(self, source: Tensor, target: Tensor) -> Event:
        """Copy a device tensor to `staging` memory beside the work that is issued later. Done at the event."""
        ...

    def beside(self, *kept: Tensor) -> AbstractContextManager[None]:
        """What is issued within runs after what was issued before, beside what is issued later, and in order with what
        other such contexts issue. `kept` is not reused before it has run."""
        ...

    def join(self) -> None:
        """What is issued from now on runs after all that was issued beside."""
        ...

    def begin_graphs(self) -> None:
        """Graphs that are captured from now on share their memory with each other, and not with earlier ones."""
        ...

    def capture(self, run: Callable[[], object]) -> Graph:
        """Record what `run` issues. It ran before, so that nothing is allocated or compiled for the first time."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes (free, in all)."""
        ...

    def peak(self, run: Callable[[], None]) -> int:
        """Bytes that `run` needed at most beyond what was taken before it."""
        ...

    def forbid_waiting(self) -> None:
        """From now on whatever makes the host wait unasked is an error."""
        ...

    def may_wait(self) -> AbstractContextManager[None]:
        """A context in which waiting is meant."""
        ...


class CudaDevice:
    """A GPU through torch. Small copies out and work beside have a stream each; all else is on the current one."""

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self._out = torch.cuda.Stream(self.torch)
        self._side = torch.cuda.Stream(self.torch)
        self._graph_memory: tuple[int, int] | None = None
        self._forbidden = False

    def staging(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def event(self) -> Event:
        return _recorded(torch.cuda.Event())

    def mark(self) -> Mark:
        return _recorded(torch.cuda.Event(enable_timing=True))

    def copy_out(self, source: Tensor, target: Tensor) -> Event:
        self._out.wait_stream(torch.cuda.current_stream())
        done = torch.cuda.Event()
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
            done.record(self._out)
        source.record_stream(self._out)  # its memory is not reused before
        return done

    @contextmanager
    def beside(self, *kept: Tensor) -> Iterator[None]:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield
        for tensor in kept:
            tensor.record_stream(self._side)

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._side)

    def begin_graphs(self) -> None:
        self._graph_memory = None  # of graphs that may be gone: torch doesn't take such a pool up again

    def capture(self, run: Callable[[], object]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            run()
        self._graph_memory = graph.pool()  # one pool for all: replays never overlap
        return graph

    def memory(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch)
        return int(free), int(total)

    def peak(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = torch.cuda.memory_allocated(self.torch)
        run()
        torch.cuda.synchronize()
        return max(0, int(torch.cuda.max_memory_allocated(self.torch) - before))

    def forbid_waiting(self) -> None:
        self._forbidden = True
        torch.cuda.set_sync_debug_mode("error")

    @contextmanager
    def may_wait(self) -> Iterator[None]:
        if not self._forbidden:
            yield
            return
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("error")


def _recorded(event: torch.cuda.Event) -> torch.cuda.Event:
    event.record()
    return event


class HostDevice:
    """The CPU in a device's place, for tests and machines without a GPU. `patience`: how often an event says that its
    work isn't done before it is, if nobody waits for it."""

    def __init__(self, patience: int = 1) -> None:
        self.torch = torch.device("cpu")
        self._patience = patience

    def staging(self, count: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # what is copied later may be copied outside of it
            return torch.zeros(count, dtype=dtype)

    def event(self) -> Event:
        return self.mark()

    def mark(self) -> Mark:
        return _Later(lambda: None, self._patience)

    def copy_out(self, source: Tensor, target: Tensor) -> Event:
        kept = source.clone()  # what comes later may change the source
        return _Later(lambda: target.copy_(kept), self._patience)

    @contextmanager
    def beside(self, *kept: Tensor) -> Iterator[None]:
        yield

    def join(self) -> None:
        """Nothing runs beside."""

    def begin_graphs(self) -> None:
        """There is no memory to share."""

    def capture(self, run: Callable[[], object]) -> Graph:
        return _Again(run)

    def memory(self) -> tuple[int, int]:
        raise RuntimeError("the host's memory is read by runner.pool")

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return 0

    def forbid_waiting(self) -> None:
        """Nothing waits here."""

    @contextmanager
    def may_wait(self) -> Iterator[None]:
        yield


class _Later:
    """An event whose work becomes visible when it is waited for, or after it was asked often enough."""

    def __init__(self, work: Callable[[], object], patience: int) -> None:
        self._work, self._left, self._done = work, patience, False
        self._ns = time.monotonic_ns()

    def elapsed_time(self, end: _Later) -> float:
        return (end._ns - self._ns) / 1e6

    def query(self) -> bool:
        if not self._done and self._left == 0:
            self.synchronize()
        self._left -= 1
        return self._done

    def synchronize(self) -> None:
        if not self._done:
            self._done = True
            self._work()


class _Again:
    """A graph that issues the same calls again."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()
