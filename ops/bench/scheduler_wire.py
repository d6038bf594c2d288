"""What a step costs on its way to a runner: encode, send, receive and decode over a real ipc socket, each on its own.

The same codec and socket types as `protocol.channels`; both ends are in this process, so that one clock sees all parts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import zmq

from protocol.columns import i32, u64
from protocol.messages import SchedulerToRunner, Step
from protocol.wire import Codec

RECEIVE_TIMEOUT_MS = 10_000
WARM_UP = 10
PARTS = ("encode", "send", "receive", "decode")


def measure_wire(step: Step, messages: int, *, clock: Callable[[], int] = time.perf_counter_ns) -> dict[str, Any]:
    """Medians in µs over `messages` sendings of `step`. `receive` lasts until the frame has arrived; `decode`
    includes views of the two main columns. RuntimeError if what arrives isn't what was sent."""
    codec: Codec[Any] = Codec(SchedulerToRunner)
    times: list[list[int]] = []
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as directory, zmq.Context() as context:
        address = f"ipc://{Path(directory) / 'step.sock'}"
        with context.socket(zmq.ROUTER) as runner, context.socket(zmq.DEALER) as scheduler:
            for socket in (runner, scheduler):
                socket.setsockopt(zmq.LINGER, 0)
            runner.setsockopt(zmq.RCVTIMEO, RECEIVE_TIMEOUT_MS)
            runner.bind(address)
            scheduler.connect(address)
            for sequence in range(WARM_UP + messages):
                marks = [clock()]
                frame = codec.encode(step, 1, sequence)
                marks.append(clock())
                scheduler.send(frame)
                marks.append(clock())
                received = runner.recv_multipart()[1]
                marks.append(clock())
                _, number, arrived = codec.decode(received)
                rows = u64(arrived.ids), i32(arrived.num_tokens)
                marks.append(clock())
                if number != sequence or arrived != step or len(rows[0]) != len(rows[1]):
                    raise RuntimeError("a step changed on its way")
                times.append([after - before for before, after in pairwise(marks)])
    kept = times[WARM_UP:]
    medians = {f"{part}_us": statistics.median(row[index] for row in kept) / 1e3 for index, part in enumerate(PARTS)}
    return {
        "messages": messages,
        "bytes": len(frame),
        **medians,
        "total_us": statistics.median(sum(row) for row in kept) / 1e3,
    }
